// The ids of the best ranked blocks, ascending.
//
// Ranks become integers of the same order, and the smallest key that is chosen is found bit by bit: each step counts
// the keys at or above a threshold, which compilers vectorise. That is 32 passes at most over some KiB in the L1 cache,
// and no sorting: a last pass in order of ids takes all keys above the threshold and the first of those equal to it.
#include <vector>

#include "ffi_op.h"
#include "parallel.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 4096;  // ranks that one thread takes at least: waking another costs as much as this many

int32_t key_of(float rank) {
  int32_t bits;
  std::memcpy(&bits, &rank, sizeof bits);
  if (bits == INT32_MIN) return 0;  // -0 and 0 tie
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

int64_t count_at_least(const int32_t* keys, int64_t n, int32_t threshold) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] >= threshold;
  return count;
}

int64_t count_above(const int32_t* keys, int64_t n, int32_t threshold) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] > threshold;
  return count;
}

// The largest key that at least k keys reach; early if exactly k do.
int32_t threshold_of(const int32_t* keys, int64_t n, int64_t k) {
  uint32_t above_least = 0;  // distance from the smallest integer
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = above_least | (1u << bit);
    const int64_t count = count_at_least(keys, n, static_cast<int32_t>(candidate ^ 0x80000000u));
    if (count >= k) above_least = candidate;
    if (count == k) break;
  }
  return static_cast<int32_t>(above_least ^ 0x80000000u);
}

void select_row(const float* ranks, int64_t n, int64_t num_selected, int32_t* selected) {
  static thread_local std::vector<int32_t> keys;
  keys.resize(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = key_of(ranks[i]);
  const int32_t nothing = key_of(-__builtin_inff());
  const int64_t candidates = count_above(keys.data(), n, nothing);
  const int64_t k = std::min(num_selected, candidates);
  int64_t chosen = 0;
  if (k > 0) {
    const int32_t threshold = candidates == k ? nothing + 1 : threshold_of(keys.data(), n, k);
    int64_t ties = k - count_above(keys.data(), n, threshold);
    for (int64_t i = 0; i < n && chosen < k; ++i) {
      if (keys[i] > threshold) {
        selected[chosen++] = static_cast<int32_t>(i);
      } else if (keys[i] == threshold && ties > 0) {
        selected[chosen++] = static_cast<int32_t>(i);
        --ties;
      }
    }
  }
  std::fill(selected + chosen, selected + num_selected, -1);
}

ffi::Error select_blocks(ffi::ThreadPool threads, Floats ranks, ffi::Result<Ints> selected) {
  SPARSESERVE_CHECK(rank(ranks) == 3 && rank(*selected) == 3 && dim(*selected, 0) == dim(ranks, 0) &&
                        dim(*selected, 1) == dim(ranks, 1),
                    "ranks are [num_seqs, num_select_heads, max_blocks]");
  const int64_t n = dim(ranks, 2), num_selected = dim(*selected, 2);
  parallel_for(threads, dim(ranks, 0) * dim(ranks, 1), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n)), [&](int64_t row) {
    select_row(ranks.typed_data() + row * n, n, num_selected, selected->typed_data() + row * num_selected);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeSelectBlocks, sparseserve::select_blocks,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<sparseserve::Floats>()
                            .Ret<sparseserve::Ints>());
