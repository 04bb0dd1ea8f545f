// Symmetric int8 of keys and values, step for step as in pallas_kernels/quantise.py. K and V of each (block, head) have a scale of their
// own, `[num_blocks, num_kv_heads, 2]`: a value is its integer times the scale.
#pragma once

#include <limits>

#include "ffi_op.h"

namespace sparseserve {

inline uint32_t magnitude_bits(Bf16 x) { return static_cast<uint32_t>(x.bits & 0x7fff) << 16; }
inline uint32_t magnitude_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// The scale of n values, whose largest magnitude becomes 127; denormal scales are zero. Bits of magnitudes are ordered as
// the magnitudes are, and the compiler may compare integers in any order.
template <class T>
float scale_of(const T* values, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = magnitude_bits(values[i]);
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const float scale = largest * (1.0f / 127.0f);
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// Rounds to nearest even, within the bounds.
inline int8_t to_int8(float x) {
  const float most = x < 127.0f ? x : 127.0f, bounded = most > -127.0f ? most : -127.0f;
  const float shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return static_cast<int8_t>(bits - 0x4b400000);
}

template <class T>
void quantise(const T* values, int64_t n, float scale, int8_t* out) {
  const float factor = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) out[i] = to_int8(to_float(values[i]) * factor);
}

// Brings n integers from one scale to another.
inline void requantise(int8_t* values, int64_t n, float from, float to) {
  const float factor = to == 0.0f ? 0.0f : from / to;
  for (int64_t i = 0; i < n; ++i) values[i] = to_int8(to_float(values[i]) * factor);
}

// The scales of a layer, or none of them: a float pool.
struct Scales {
  ffi::AnyBuffer buffer;

  bool fit(const ffi::AnyBuffer& pool) const {
    const bool quantised = pool.element_type() == ffi::DataType::S8;
    return buffer.element_type() == ffi::DataType::F32 && rank(buffer) == 3 && dim(buffer, 1) == dim(pool, 1) &&
           dim(buffer, 2) == 2 && dim(buffer, 0) == (quantised ? dim(pool, 0) : 0);
  }
  // Of K and V of one (block, head).
  float* of(int64_t id, int64_t head) const {
    return static_cast<float*>(buffer.untyped_data()) + (id * dim(buffer, 1) + head) * 2;
  }
};

}  // namespace sparseserve
