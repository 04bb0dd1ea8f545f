// Transposition of matrices of 32-bit elements (float32, or pairs of bfloat16).
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace sparseserve {

template <bool kHigh>
inline S32 interleave(S32 a, S32 b) {
  S32 index;
  for (int i = 0; i < kLanes; ++i) index[i] = i / 2 + (kHigh ? kLanes / 2 : 0) + (i % 2 ? kLanes : 0);
#if defined(__clang__)
  S32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = index[i] < kLanes ? a[index[i]] : b[index[i] - kLanes];
  return out;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// kLanes x kLanes elements of 32 bits. Interleaving row i with row i + kLanes / 2 moves one bit of the row number into
// the column number; after log2(kLanes) rounds they have changed places.
inline void transpose(S32 (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    S32 next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<false>(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave<true>(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// out[column][row] = in[row][column]; rows and columns are multiples of kLanes, strides in elements.
inline void transpose(const void* in, int64_t in_stride, int rows, int columns, void* out, int64_t out_stride) {
  const auto* from = static_cast<const int32_t*>(in);
  auto* to = static_cast<int32_t*>(out);
  for (int row = 0; row < rows; row += kLanes) {
    for (int column = 0; column < columns; column += kLanes) {
      S32 square[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(&square[i], from + (row + i) * in_stride + column, sizeof(S32));
      transpose(square);
      for (int i = 0; i < kLanes; ++i) std::memcpy(to + (column + i) * out_stride + row, &square[i], sizeof(S32));
    }
  }
}

}  // namespace sparseserve
