// Weighted sums of value rows: the second product of attention.
#pragma once

#include "rows.h"

namespace sparseserve {

constexpr int kValueVectors = kLanes == 16 ? 4 : 2;  // of a row at a time: with kMaxQueries no more sums than registers

// acc[g][...] += sum over tokens of weights[g][token] * values[token][...], for kCount steps of dimensions. `rest`:
// dimensions of the last step if it is not whole (then kCount is 1), else 0.
template <int kQueries, int kCount, class T>
void add_steps(const T* values, int width, int num_tokens, int rest, const float* weights, int weight_stride,
               float* acc, int acc_stride, Prefetcher& prefetcher, int lines) {
  constexpr int kVectors = Steps<T>::kVectors;
  F32 sums[kQueries][kCount * kVectors];
  for (int g = 0; g < kQueries; ++g) {
    for (int c = 0; c < kCount * kVectors; ++c) sums[g][c] = load(acc + g * acc_stride + c * kLanes);
  }
  for (int t = 0; t < num_tokens; ++t) {
    const T* row = values + static_cast<int64_t>(t) * width;
    prefetcher.advance(lines);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      F32 x[kVectors];
      if (rest) {
        load_first(row, rest, x);
      } else {
        Steps<T>::load(row + c * Steps<T>::kSize, x);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kQueries; ++g) {
        const F32 w = splat(weights[g * weight_stride + t]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) sums[g][c * kVectors + i] += w * x[i];
      }
    }
  }
  for (int g = 0; g < kQueries; ++g) {
    for (int c = 0; c < kCount * kVectors; ++c) store(acc + g * acc_stride + c * kLanes, sums[g][c]);
  }
}

// All dimensions of up to kMaxQueries queries. Accumulators hold whole steps, in the order of Steps<T>::place. With
// every row that is read `lines` more cache lines are prefetched.
template <int kQueries, class T>
void add_values(const T* values, int width, int num_tokens, const float* weights, int weight_stride, float* acc,
                int acc_stride, Prefetcher& prefetcher, int lines) {
  constexpr int kSize = Steps<T>::kSize, kCount = kValueVectors / Steps<T>::kVectors;
  int d = 0;
  for (; d + kCount * kSize <= width; d += kCount * kSize) {
    add_steps<kQueries, kCount>(values + d, width, num_tokens, 0, weights, weight_stride, acc + d, acc_stride,
                                prefetcher, lines);
  }
  for (; d < width; d += kSize) {
    add_steps<kQueries, 1>(values + d, width, num_tokens, width - d < kSize ? width - d : 0, weights, weight_stride,
                           acc + d, acc_stride, prefetcher, lines);
  }
}

template <class T>
void add_values(int num_queries, const T* values, int width, int num_tokens, const float* weights, int weight_stride,
                float* acc, int acc_stride, Prefetcher& prefetcher, int lines) {
  const auto add = [&](auto add_for) {
    add_for(values, width, num_tokens, weights, weight_stride, acc, acc_stride, prefetcher, lines);
  };
  switch (num_queries) {
    case 1: return add(add_values<1, T>);
    case 2: return add(add_values<2, T>);
    case 3: return add(add_values<3, T>);
    default: return add(add_values<4, T>);
  }
}

}  // namespace sparseserve
