// One float vector for every instruction set that the sources are compiled for: 16 lanes with AVX-512, 8 with AVX2,
// else 4 (SSE2 or NEON, through the compilers' vector extensions). Arithmetic is written with operators; with
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

// Reads T in steps: some vectors of float32, in an order of dimensions that is cheap to make.
template <class T>
struct Steps {
  static constexpr int kVectors = 1;
  static constexpr int kSize = kLanes;
  static void load(const T* p, F32 (&x)[1]) { x[0] = sparseserve::load(p); }
  // Where dimension d is found among the vectors.
  static int place(int d) { return d; }
};

// Of 32 bits that hold two bfloat16 the upper ones are a float32 as they are, the lower ones after a shift: so there is
// a vector of even and one of odd dimensions. (The dot product instruction of AVX512-bf16 has half the throughput of
// multiply-add on Intel's cores, and widening instructions occupy the one port for shuffles.)
template <>
struct Steps<Bf16> {
  static constexpr int kVectors = 2;
  static constexpr int kSize = 2 * kLanes;
  static void load(const Bf16* p, F32 (&x)[2]) {
    S32 both;
    std::memcpy(&both, p, sizeof both);
    x[0] = (F32)(both << 16);
    x[1] = (F32)(both & static_cast<int32_t>(0xffff0000u));
  }
  static int place(int d) { return d / kSize * kSize + d % 2 * kLanes + d % kSize / 2; }
};

// The first n < kSize elements, zeros after them; reads no further.
template <class T>
inline void load_first(const T* p, int n, F32 (&x)[Steps<T>::kVectors]) {
  T whole[Steps<T>::kSize] = {};
  std::memcpy(whole, p, n * sizeof(T));
  Steps<T>::load(whole, x);
}

inline void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

inline void store(Bf16* p, F32 v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(v[i]);
#endif
}

// The first n lanes; writes no further.
inline void store_first(float* p, F32 v, int n) {
  if (n >= kLanes) return store(p, v);
  std::memcpy(p, &v, n * sizeof(float));
}
inline void store_first(Bf16* p, F32 v, int n) {
  if (n >= kLanes) return store(p, v);
  for (int i = 0; i < n; ++i) p[i] = to_bf16(v[i]);
}

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

// Sums of many vectors at once, transposed: one tree of additions instead of a reduction for each, which would take
// four times more instructions. First four at a time: within each quarter of 128 bits the sums of a, b, c and d.
inline F32 sum_four(F32 a, F32 b, F32 c, F32 d) {
#if defined(__AVX512F__)
  const auto pairs = [](F32 x, F32 y) {
    return (__m512d)_mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y), _mm512_unpackhi_ps((__m512)x, (__m512)y));
  };
  const __m512d ab = pairs(a, b), cd = pairs(c, d);
  return (F32)_mm512_unpacklo_pd(ab, cd) + (F32)_mm512_unpackhi_pd(ab, cd);
#elif defined(__AVX2__)
  const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b);
  return (F32)_mm256_hadd_ps(ab, _mm256_hadd_ps((__m256)c, (__m256)d));
#elif defined(__SSE2__)
  const auto pairs = [](F32 x, F32 y) {
    return _mm_add_ps(_mm_unpacklo_ps((__m128)x, (__m128)y), _mm_unpackhi_ps((__m128)x, (__m128)y));
  };
  const __m128 ab = pairs(a, b), cd = pairs(c, d);
  return (F32)_mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
#else
  return F32{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)};
#endif
}

// Then lane 4 i + j is the sum of the j-th of the i-th four.
inline F32 sum_fours(const F32 (&fours)[kLanes / 4]) {
#if defined(__AVX512F__)
  const auto halve = [](F32 x, F32 y) {
    return (F32)_mm512_add_ps(_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88),
                              _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xdd));
  };
  return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
#elif defined(__AVX2__)
  const __m256 x = (__m256)fours[0], y = (__m256)fours[1];
  return (F32)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
#else
  return fours[0];
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

// Prefetches a range a little at a time: more lines at once than a core can wait for would stop it.
class Prefetcher {
 public:
  Prefetcher(const void* start, int64_t bytes)
      : next_(static_cast<const char*>(start)), end_(next_ + (start ? bytes : 0)) {}

  // The next `lines` cache lines, if any are left.
  void advance(int lines) {
    for (; lines > 0 && next_ < end_; --lines, next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  const char *next_, *end_;
};

}  // namespace sparseserve
