// One call of the linear operation, and what happens to a sum before it is written.
#pragma once

#include <cstdint>

#include "simd.h"

namespace sparseserve::linear {

struct Call {
  const Bf16* x;  // [rows][in]
  int64_t rows;
  int in;
  const void* weight;  // [out][in], bfloat16 or int8
  int out;             // gated: rows [0, out / 2) are the gate, the rest is up
  const float *scales, *bias;  // [out], or null
  const float* residual;       // [rows][out], or null; not with `gated`
  bool gated;
  float* result;       // [rows][out]
  Bf16* gated_result;  // [rows][out / 2]

  int features() const { return gated ? out / 2 : out; }
};

inline F32 load_first(const float* p, int n) {
  F32 x[1];
  if (n >= kLanes) {
    x[0] = load(p);
  } else {
    sparseserve::load_first(p, n, x);
  }
  return x[0];
}

inline F32 reciprocal(F32 x) {
#if defined(__AVX512F__)
  // Division occupies the core for 16 cycles. One step of Newton's method takes 14 bits to all but the last.
  const F32 guess = (F32)_mm512_rcp14_ps((__m512)x);
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

inline F32 silu(F32 x) {
  // min returns its second argument if one is NaN. 2^126 is large enough: x / 2^126 is 0 for bfloat16.
  return x * reciprocal(exp2(min(splat(126.0f), x * -kLog2E)) + 1.0f);
}

// A sum of products for `n` (at most kLanes count) rows of the weight from `row` on, scaled and with the bias.
inline F32 scaled(const Call& call, F32 sum, int row, int n) {
  if (call.scales != nullptr) sum *= load_first(call.scales + row, n);
  if (call.bias != nullptr) sum += load_first(call.bias + row, n);
  return sum;
}

// What is written for `n` features of one row of x from `feature` on. `up`: the sums of the upper half, if gated.
inline F32 finished(const Call& call, int64_t row, int feature, int n, F32 sum, F32 up) {
  const F32 value = scaled(call, sum, feature, n);
  if (call.gated) return silu(value) * scaled(call, up, call.features() + feature, n);
  return call.residual == nullptr ? value : value + load_first(call.residual + row * call.out + feature, n);
}

inline void write(const Call& call, int64_t row, int feature, int n, F32 sum, F32 up) {
  const F32 value = finished(call, row, feature, n, sum, up);
  const int64_t at = row * call.features() + feature;
  if (call.gated) {
    store_first(call.gated_result + at, value, n);
  } else {
    store_first(call.result + at, value, n);
  }
}

}  // namespace sparseserve::linear
