// Scores of many rows (keys, digests) with one query: each lane of a result is the dot product of one row.
#pragma once

#include "simd.h"

namespace sparseserve {

// What a query is stored as, to be multiplied with rows of T, and how many of its values one step takes. A query's
// memory holds whole steps, zeros after the last value.
template <class T>
struct Query {
  using Element = float;
  static constexpr int kStep = kLanes;
  static F32 add_product(F32 sum, const T* row, const float* query) { return sum + load(row) * load(query); }
};

#if defined(__AVX512BF16__)
// 32 products of bfloat16 in one instruction, accumulated in float32.
template <>
struct Query<Bf16> {
  using Element = Bf16;
  static constexpr int kStep = 32;
  static F32 add_product(F32 sum, const Bf16* row, const Bf16* query) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(row), (__m512bh)_mm512_loadu_si512(query));
  }
};
#endif

// Values as a query for rows of T: rounded as the rows are.
template <class T>
void make_query(const float* values, int n, typename Query<T>::Element* query) {
  using Element = typename Query<T>::Element;
  constexpr bool kRound = sizeof(T) < sizeof(float);
  for (int i = 0; i < n; ++i) query[i] = from_float<Element>(kRound ? to_float(to_bf16(values[i])) : values[i]);
  for (int i = n; i < round_up(n, Query<T>::kStep); ++i) query[i] = from_float<Element>(0.0f);
}

// One row's products with the query, not yet summed over lanes. kWidth: the row's length, a multiple of the step, or 0
// = only known at run time.
template <int kWidth, class T>
inline F32 row_products(const T* row, const typename Query<T>::Element* query, int width) {
  constexpr int kStep = Query<T>::kStep;
  static_assert(kWidth % kStep == 0, "fixed widths are whole steps");
  const int n = kWidth ? kWidth : width;
  F32 sum = {};
  int i = 0;
#pragma GCC unroll 8
  for (; i + kStep <= n; i += kStep) sum = Query<T>::add_product(sum, row + i, query + i);
  if (kWidth == 0 && i < n) {
    T rest[kStep] = {};
    std::memcpy(rest, row + i, (n - i) * sizeof(T));
    sum = Query<T>::add_product(sum, rest, query + i);
  }
  return sum;
}

// kLanes dot products; `row(i)` is the i-th row.
template <int kWidth, class T, class Row>
inline F32 dot_rows(const typename Query<T>::Element* query, int width, Row&& row) {
  F32 sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = row_products<kWidth, T>(row(i), query, width);
  return sum_rows(sums);
}

}  // namespace sparseserve
