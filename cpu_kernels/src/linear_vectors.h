// The linear operation with vector registers, for a few rows: each row of the weight is read once for every four rows
// of x, widened to float32.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_call.h"
#include "parallel.h"
#include "rows.h"

namespace sparseserve::linear {

// T: elements of the weight.
template <class T>
void run_vectors(const Call& call, ffi::ThreadPool& threads) {
  const int stride = query_stride<T>(call.in), features = call.features();
  const T* weight = static_cast<const T*>(call.weight);
  std::vector<float> values(call.in), queries(call.rows * stride);
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int i = 0; i < call.in; ++i) values[i] = to_float(call.x[row * call.in + i]);
    make_query<T>(values.data(), call.in, queries.data() + row * stride);
  }
  const int64_t group_bytes = int64_t{kLanes} * call.in * sizeof(T);
  const int64_t num_groups = (features + kLanes - 1) / kLanes, grain = std::max<int64_t>(1, (128 << 10) / group_bytes);
  parallel_for(threads, num_groups, grain, [&](int64_t group) {
    const int first = static_cast<int>(group) * kLanes, n = std::min(kLanes, features - first);
    const auto row_of = [&](int begin) {
      return [=](int i) { return weight + static_cast<int64_t>(begin + std::min(i, n - 1)) * call.in; };
    };
    Prefetcher(row_of(first + kLanes)(0), group < num_groups - 1 ? group_bytes : 0).advance(group_bytes / 64);
    for (int64_t row = 0; row < call.rows; row += kMaxQueries) {
      const int count = static_cast<int>(std::min<int64_t>(kMaxQueries, call.rows - row));
      F32 sums[kMaxQueries], ups[kMaxQueries] = {};
      dot_rows<0, T>(count, queries.data() + row * stride, call.in, row_of(first), sums);
      if (call.gated) dot_rows<0, T>(count, queries.data() + row * stride, call.in, row_of(features + first), ups);
      for (int i = 0; i < count; ++i) write(call, row + i, first, n, sums[i], ups[i]);
    }
  });
}

}  // namespace sparseserve::linear
