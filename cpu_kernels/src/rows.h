// Dot products of many rows (keys, digests) with the queries of a group.
#pragma once

#include "simd.h"

namespace sparseserve {

constexpr int kMaxQueries = 4;  // at a time; as many sums of four rows as registers hold

// Length of a query for rows of T in memory: whole steps, zeros after the last value.
template <class T>
int query_stride(int width) {
  return round_up(width, Steps<T>::kSize);
}

// Values as a query for rows of T: in the order in which rows are read, and rounded as the rows are.
template <class T>
void make_query(const float* values, int width, float* query) {
  std::memset(query, 0, query_stride<T>(width) * sizeof(float));
  for (int d = 0; d < width; ++d) {
    query[Steps<T>::place(d)] = sizeof(T) < sizeof(float) ? to_float(to_bf16(values[d])) : values[d];
  }
}

template <int kQueries, class T>
inline void add_products(const F32 (&x)[4][Steps<T>::kVectors], const float* queries, int stride,
                         F32 (&sums)[kQueries][4]) {
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 2
    for (int c = 0; c < Steps<T>::kVectors; ++c) {
      const F32 q = load(queries + g * stride + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[g][r] += x[r][c] * q;
    }
  }
}

// The products of four rows with each query, summed as `sum_four` does. kWidth: the rows' length, or 0 = only known at
// run time.
template <int kWidth, int kQueries, class T>
inline void dot_four(const T* const (&rows)[4], const float* queries, int width, F32 (&fours)[kQueries]) {
  constexpr int kSize = Steps<T>::kSize;
  const int n = kWidth ? kWidth : width, stride = kWidth ? round_up(kWidth, kSize) : query_stride<T>(width);
  F32 sums[kQueries][4] = {};
  F32 x[4][Steps<T>::kVectors];
  int d = 0;
#pragma GCC unroll 4
  for (; d + kSize <= n; d += kSize) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) Steps<T>::load(rows[r] + d, x[r]);
    add_products<kQueries, T>(x, queries + d, stride, sums);
  }
  if (kWidth % kSize != 0 || (kWidth == 0 && d < n)) {
    for (int r = 0; r < 4; ++r) load_first(rows[r] + d, n - d, x[r]);
    add_products<kQueries, T>(x, queries + d, stride, sums);
  }
  for (int g = 0; g < kQueries; ++g) fours[g] = sum_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
}

// Dot products of kLanes rows with each query: lane i of out[g] is that of `row(i)`.
template <int kWidth, int kQueries, class T, class Row>
inline void dot_rows(const float* queries, int width, Row&& row, F32 (&out)[kMaxQueries]) {
  F32 fours[kQueries][kLanes / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 4; ++i) {
    const T* const rows[4] = {row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)};
    F32 of_query[kQueries];
    dot_four<kWidth, kQueries, T>(rows, queries, width, of_query);
    for (int g = 0; g < kQueries; ++g) fours[g][i] = of_query[g];
  }
  for (int g = 0; g < kQueries; ++g) out[g] = sum_fours(fours[g]);
}

// The same for 1 to kMaxQueries queries.
template <int kWidth, class T, class Row>
inline void dot_rows(int num_queries, const float* queries, int width, Row&& row, F32 (&out)[kMaxQueries]) {
  switch (num_queries) {
    case 1: return dot_rows<kWidth, 1, T>(queries, width, row, out);
    case 2: return dot_rows<kWidth, 2, T>(queries, width, row, out);
    case 3: return dot_rows<kWidth, 3, T>(queries, width, row, out);
    default: return dot_rows<kWidth, 4, T>(queries, width, row, out);
  }
}

}  // namespace sparseserve
