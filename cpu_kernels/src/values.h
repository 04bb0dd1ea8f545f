// Weighted sums of value rows: the second product of attention.
#pragma once

#include "simd.h"

namespace sparseserve {

// acc[g][d] += sum over tokens of weights[g][token] * values[token][d], for a run of dimensions that stays in registers.
// `place(d)` is where dimension d lies in an accumulator, whose memory holds whole steps.
template <class T>
struct Values {
  using Weight = float;
  static constexpr int kStep = kLanes;
  static constexpr int kSteps = kLanes == 16 ? 4 : 2;  // with 4 queries no more registers than there are
  static int place(int d) { return d; }

  // `rest`: dimensions of the last step if it is not whole (then kCount is 1), else 0.
  template <int kGroup, int kCount>
  static void add(const T* values, int stride, int num_tokens, int rest, const Weight* weights, int weight_stride,
                  float* acc, int acc_stride) {
    F32 sums[kGroup][kCount];
    for (int g = 0; g < kGroup; ++g) {
      for (int c = 0; c < kCount; ++c) sums[g][c] = load(acc + g * acc_stride + c * kLanes);
    }
    for (int t = 0; t < num_tokens; ++t) {
      const T* row = values + static_cast<int64_t>(t) * stride;
      F32 x[kCount];
      for (int c = 0; c < kCount; ++c) x[c] = rest ? load_first(row, rest) : load(row + c * kLanes);
      for (int g = 0; g < kGroup; ++g) {
        const F32 w = splat(weights[g * weight_stride + t]);
        for (int c = 0; c < kCount; ++c) sums[g][c] = sums[g][c] + w * x[c];
      }
    }
    for (int g = 0; g < kGroup; ++g) {
      for (int c = 0; c < kCount; ++c) store(acc + g * acc_stride + c * kLanes, sums[g][c]);
    }
  }
};

#if defined(__AVX512BF16__)
// Two tokens at a time: their rows interleaved, and one instruction multiplies with a pair of weights. Interleaving works
// within quarters of a register, so of 32 dimensions the first accumulator gets 0-3, 8-11, 16-19, 24-27.
template <>
struct Values<Bf16> {
  using Weight = Bf16;
  static constexpr int kStep = 32;
  static constexpr int kSteps = 2;
  static int place(int d) { return d / 32 * 32 + (d % 8 / 4) * 16 + d % 32 / 8 * 4 + d % 4; }

  static __m512i row(const Bf16* p, int rest) {
    return rest ? _mm512_maskz_loadu_epi16((1u << rest) - 1, p) : _mm512_loadu_si512(p);
  }

  template <int kGroup, int kCount>
  static void add(const Bf16* values, int stride, int num_tokens, int rest, const Weight* weights, int weight_stride,
                  float* acc, int acc_stride) {
    __m512 sums[kGroup][2 * kCount];
    for (int g = 0; g < kGroup; ++g) {
      for (int c = 0; c < 2 * kCount; ++c) sums[g][c] = _mm512_loadu_ps(acc + g * acc_stride + c * kLanes);
    }
    const auto pair = [&](const __m512i (&a)[kCount], const __m512i (&b)[kCount], int t) {
      for (int c = 0; c < kCount; ++c) {
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a[c], b[c]);
        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a[c], b[c]);
        for (int g = 0; g < kGroup; ++g) {
          int32_t both;
          std::memcpy(&both, weights + g * weight_stride + t, sizeof both);
          const __m512bh w = (__m512bh)_mm512_set1_epi32(both);
          sums[g][2 * c] = _mm512_dpbf16_ps(sums[g][2 * c], w, low);
          sums[g][2 * c + 1] = _mm512_dpbf16_ps(sums[g][2 * c + 1], w, high);
        }
      }
    };
    __m512i a[kCount], b[kCount];
    for (int t = 0; t + 1 < num_tokens; t += 2) {
      const Bf16* p = values + static_cast<int64_t>(t) * stride;
      for (int c = 0; c < kCount; ++c) a[c] = row(p + c * kStep, rest), b[c] = row(p + stride + c * kStep, rest);
      pair(a, b, t);
    }
    if (num_tokens % 2) {  // what follows the last token may be NaN
      const int t = num_tokens - 1;
      for (int c = 0; c < kCount; ++c) {
        a[c] = row(values + static_cast<int64_t>(t) * stride + c * kStep, rest), b[c] = _mm512_setzero_si512();
      }
      pair(a, b, t);
    }
    for (int g = 0; g < kGroup; ++g) {
      for (int c = 0; c < 2 * kCount; ++c) _mm512_storeu_ps(acc + g * acc_stride + c * kLanes, sums[g][c]);
    }
  }
};
#endif

// All dimensions of kGroup queries.
template <int kGroup, class T>
void add_values(const T* values, int width, int num_tokens, const typename Values<T>::Weight* weights,
                int weight_stride, float* acc, int acc_stride) {
  using V = Values<T>;
  int d = 0;
  for (; d + V::kSteps * V::kStep <= width; d += V::kSteps * V::kStep) {
    V::template add<kGroup, V::kSteps>(values + d, width, num_tokens, 0, weights, weight_stride, acc + d, acc_stride);
  }
  for (; d < width; d += V::kStep) {
    const int rest = width - d < V::kStep ? width - d : 0;
    V::template add<kGroup, 1>(values + d, width, num_tokens, rest, weights, weight_stride, acc + d, acc_stride);
  }
}

// All queries, up to four at a time.
template <class T>
void add_values(const T* values, int width, int num_tokens, int num_queries, const typename Values<T>::Weight* weights,
                int weight_stride, float* acc, int acc_stride) {
  for (int g = 0; g < num_queries; g += 4) {
    const auto* w = weights + g * weight_stride;
    float* sums = acc + g * acc_stride;
    switch (num_queries - g) {
      case 1: add_values<1>(values, width, num_tokens, w, weight_stride, sums, acc_stride); break;
      case 2: add_values<2>(values, width, num_tokens, w, weight_stride, sums, acc_stride); break;
      case 3: add_values<3>(values, width, num_tokens, w, weight_stride, sums, acc_stride); break;
      default: add_values<4>(values, width, num_tokens, w, weight_stride, sums, acc_stride); break;
    }
  }
}

}  // namespace sparseserve
