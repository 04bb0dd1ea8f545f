// One float vector for every instruction set that the sources are compiled for: 16 lanes with AVX-512, 8 with AVX2, else
// 4 (SSE2 or NEON, through the compilers' vector extensions). Arithmetic is written with operators; with
// -ffp-contract=fast a * b + c becomes one instruction where there is one. Nothing here is specific to an operation.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparseserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t S32 __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// --- elements --------------------------------------------------------------------------------------------------------

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest even, as XLA does; NaN stays NaN.
inline Bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return Bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Bf16 from_float<Bf16>(float x) {
  return to_bf16(x);
}

// --- vectors ---------------------------------------------------------------------------------------------------------

inline F32 splat(float x) { return x - F32{}; }

inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline F32 load(const Bf16* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (F32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#elif defined(__SSE2__)
  return (F32)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  S32 bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].bits) << 16);
  return (F32)bits;
#endif
}

inline F32 load(const int8_t* p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  F32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

// The first n < kLanes elements, zeros after them; reads no further.
template <class T>
inline F32 load_first(const T* p, int n) {
  T whole[kLanes] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return load(whole);
}

inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

// Like the instruction: of a NaN and a number the second argument is returned.
inline F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F32)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (F32)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

inline F32 min(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F32)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (F32)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}

inline F32 abs(F32 v) { return (F32)((S32)v & 0x7fffffff); }

inline S32 lane_index() {
  S32 index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// `v` in the first n lanes, `other` in the rest.
inline F32 first_lanes(F32 v, int n, F32 other) { return lane_index() < n ? v : other; }

inline float reduce_add(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

inline float reduce_max(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// Lane i of the result is the sum over the lanes of rows[i]: a tree that sums and transposes at once, three instructions
// for each of its kLanes - 1 additions, where as many separate reductions would take four times more.
inline F32 sum_rows(const F32 (&rows)[kLanes]) {
#if defined(__AVX512F__)
  __m512 pairs[8], quads[4];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)rows[2 * i], b = (__m512)rows[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halve = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (F32)halve(halve(quads[0], quads[1]), halve(quads[2], quads[3]));
#elif defined(__AVX2__)
  __m256 quads[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 a = _mm256_hadd_ps((__m256)rows[4 * i], (__m256)rows[4 * i + 1]);
    quads[i] = _mm256_hadd_ps(a, _mm256_hadd_ps((__m256)rows[4 * i + 2], (__m256)rows[4 * i + 3]));
  }
  const __m256 low = _mm256_permute2f128_ps(quads[0], quads[1], 0x20);
  return (F32)_mm256_add_ps(low, _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#elif defined(__SSE2__)
  const __m128 a = _mm_add_ps(_mm_unpacklo_ps((__m128)rows[0], (__m128)rows[1]),
                              _mm_unpackhi_ps((__m128)rows[0], (__m128)rows[1]));
  const __m128 b = _mm_add_ps(_mm_unpacklo_ps((__m128)rows[2], (__m128)rows[3]),
                              _mm_unpackhi_ps((__m128)rows[2], (__m128)rows[3]));
  return (F32)_mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
#else
  F32 sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = reduce_add(rows[i]);
  return sums;
#endif
}

// 2^x to 1e-7 of the value: x = n + r with |r| <= 1/2, a polynomial for 2^r (least maximal relative error, 2e-9) and n
// added to the exponent. Below 2^-126 zero, NaN stays NaN; x must not exceed 127.
inline F32 exp2(F32 x) {
  const F32 clamped = max(splat(-126.0f), x);
  const F32 shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const F32 shifted = clamped + shifter;
  const F32 r = clamped - (shifted - shifter);
  F32 p = splat(1.5353361e-4f);
  p = p * r + 1.3398874e-3f;
  p = p * r + 9.6184373e-3f;
  p = p * r + 5.5503324e-2f;
  p = p * r + 2.4022648e-1f;
  p = p * r + 6.9314720e-1f;
  p = p * r + 1.0f;
  const F32 result = (F32)((S32)p + ((S32)shifted << 23));
  return x < splat(-126.0f) ? F32{} : result;
}

constexpr float kLog2E = 1.44269504f;

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace sparseserve
