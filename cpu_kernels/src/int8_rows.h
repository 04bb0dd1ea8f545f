// Products with rows of int8 in integers (AVX512-VNNI). As float32 a vector of 16 values takes two conversions and a
// product for each query; as int16 one conversion and one instruction for each query do 32. Queries and weights become
// int16, each with a scale of its own: the error is 2^-16 of the largest, finer than the bfloat16 of the queries and than
// the integers of the rows. Sums are exact: up to 64 products of 15 and 7 bits for a weighted sum, head_dim for a score.
#pragma once

#include <type_traits>

#include "rows.h"

namespace sparseserve {

// The width of rows (0 = only known at run time) and their type for which there are integer products here.
#if defined(__AVX512VNNI__)
template <int kWidth, class T>
constexpr bool kIntegerRows = std::is_same_v<T, int8_t> && kWidth > 0 && kWidth % 32 == 0;
#else
template <int kWidth, class T>
constexpr bool kIntegerRows = false;
#endif

// Writes n floats as `stride` int16, zeros after the last; returns the scale. `stride` is a multiple of kLanes, and that
// many floats may be read.
inline float to_int16(const float* values, int n, int stride, int16_t* out) {
  F32 most = {};
  for (int i = 0; i < n; i += kLanes) most = max(most, abs(first_lanes(load(values + i), n - i, F32{})));
  const float largest = reduce_max(most), factor = largest > 0.0f ? 32767.0f / largest : 0.0f;
  for (int i = 0; i < n; ++i) {
    const float shifted = values[i] * factor + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    out[i] = static_cast<int16_t>(bits - 0x4b400000);
  }
  for (int i = n; i < stride; ++i) out[i] = 0;
  return largest / 32767.0f;
}

// Declared everywhere, since code for kIntegerRows names it; see below.
template <int kWidth>
void add_rows(int num_queries, const int8_t* rows, int num_rows, const int16_t* weights, int weight_stride,
              const float* scales, float* acc, int acc_stride, Prefetcher& prefetcher);

#if defined(__AVX512VNNI__)

// Sums of sixteen vectors of integers: sum_four and sum_fours of simd.h.
inline __m512i sum_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto pairs = [](__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
  };
  const __m512i ab = pairs(a, b), cd = pairs(c, d);
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

inline __m512i sum_fours(const __m512i (&fours)[4]) {
  const auto halve = [](__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
  };
  return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
}

inline __m512i load_int16(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Dot products of 16 rows with each query `[kQueries, kWidth]`: lane i of out[g] is that of `row(i)`.
template <int kWidth, int kQueries, class Row>
inline void dot_rows(const int16_t* queries, Row&& row, F32 (&out)[kMaxQueries]) {
  __m512i fours[kQueries][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i sums[kQueries][4] = {};
    const int8_t* const rows[4] = {row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)};
#pragma GCC unroll 4
    for (int d = 0; d < kWidth; d += 32) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m512i x = load_int16(rows[r] + d);
#pragma GCC unroll 4
        for (int g = 0; g < kQueries; ++g) {
          sums[g][r] = _mm512_dpwssd_epi32(sums[g][r], x, _mm512_loadu_si512(queries + g * kWidth + d));
        }
      }
    }
    for (int g = 0; g < kQueries; ++g) fours[g][i] = sum_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
  }
  for (int g = 0; g < kQueries; ++g) out[g] = (F32)_mm512_cvtepi32_ps(sum_fours(fours[g]));
}

template <int kWidth, class Row>
inline void dot_rows(int num_queries, const int16_t* queries, Row&& row, F32 (&out)[kMaxQueries]) {
  switch (num_queries) {
    case 1: return dot_rows<kWidth, 1>(queries, row, out);
    case 2: return dot_rows<kWidth, 2>(queries, row, out);
    case 3: return dot_rows<kWidth, 3>(queries, row, out);
    default: return dot_rows<kWidth, 4>(queries, row, out);
  }
}

// acc[g][...] += scales[g] * sum over rows of weights[g][row] * rows[row][...]. Two rows at a time, as pairs of int16;
// an odd last one goes with itself, whose second weight is zero.
template <int kWidth, int kQueries>
void add_rows(const int8_t* rows, int num_rows, const int16_t* weights, int weight_stride, const float* scales,
              float* acc, int acc_stride, Prefetcher& prefetcher) {
  constexpr int kDims = 64 < kWidth ? 64 : kWidth, kVectors = kDims / 16;  // sums of so many dims fit the registers
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int begin = 0; begin < kWidth; begin += kDims) {
    __m512i sums[kQueries][kVectors] = {};
    for (int t = 0; t < num_rows; t += 2) {
      const int8_t *even = rows + t * kWidth + begin, *odd = t + 1 < num_rows ? even + kWidth : even;
      prefetcher.advance((2 * kDims + 63) / 64);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c += 2) {
        const __m512i a = load_int16(even + c * 16), b = load_int16(odd + c * 16);
        const __m512i lower = _mm512_unpacklo_epi16(a, b), upper = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int g = 0; g < kQueries; ++g) {
          int32_t pair;
          std::memcpy(&pair, weights + g * weight_stride + t, sizeof pair);
          const __m512i w = _mm512_set1_epi32(pair);
          sums[g][c] = _mm512_dpwssd_epi32(sums[g][c], lower, w);
          sums[g][c + 1] = _mm512_dpwssd_epi32(sums[g][c + 1], upper, w);
        }
      }
    }
    for (int g = 0; g < kQueries; ++g) {
      float* to = acc + g * acc_stride + begin;
      for (int c = 0; c < kVectors; c += 2) {  // pairs of quarters back in the order of dims
        const __m512i first = _mm512_permutex2var_epi32(sums[g][c], low, sums[g][c + 1]);
        const __m512i second = _mm512_permutex2var_epi32(sums[g][c], high, sums[g][c + 1]);
        store(to + c * 16, load(to + c * 16) + (F32)_mm512_cvtepi32_ps(first) * scales[g]);
        store(to + c * 16 + 16, load(to + c * 16 + 16) + (F32)_mm512_cvtepi32_ps(second) * scales[g]);
      }
    }
  }
}

template <int kWidth>
void add_rows(int num_queries, const int8_t* rows, int num_rows, const int16_t* weights, int weight_stride,
              const float* scales, float* acc, int acc_stride, Prefetcher& prefetcher) {
  const auto add = [&](auto add_for) {
    add_for(rows, num_rows, weights, weight_stride, scales, acc, acc_stride, prefetcher);
  };
  switch (num_queries) {
    case 1: return add(add_rows<kWidth, 1>);
    case 2: return add(add_rows<kWidth, 2>);
    case 3: return add(add_rows<kWidth, 3>);
    default: return add(add_rows<kWidth, 4>);
  }
}

#endif

}  // namespace sparseserve
