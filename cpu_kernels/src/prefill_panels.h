// Prefill attention as every instruction set does it: what a panel of queries is, how queries, keys and values are laid
// out for the products, and the online softmax (Milakov and Gimelshein, arXiv 1805.02867).
//
// Scores are computed transposed, S^T = K Q^T, so that the lanes of a vector are queries of one head: the maximum and the
// sum over keys are plain vector operations, and no score ever crosses lanes. Values follow as O^T += V^T P^T. Both are
// products of rows of broadcast elements (keys, values) with rows of lanes (queries, weights):
//
//   float32    an element is a float
//   bfloat16   an element is a pair of bfloat16, 32 bits: two neighbouring dims (S) or two neighbouring keys (O)
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"
#include "transpose.h"

namespace sparseserve::prefill {

constexpr int kTile = 128;       // reference.PREFILL_TILE: query tokens of a tile, and tokens of a key tile of tile_mask
constexpr int kPanel = 64;       // queries of a panel: consecutive tokens of one query head
constexpr int kStepKeys = 64;    // keys of one step of the online softmax; divides kTile
constexpr int kChunkKeys = 512;  // keys packed at a time: they stay in the L2 cache while all panels of a unit use them
constexpr float kNoMax = -1e30f;

static_assert(kTile % kPanel == 0 && kTile % kStepKeys == 0 && kChunkKeys % kTile == 0);

// A panel's queries and its running result, in the scratch memory of a unit.
struct Panel {
  const uint32_t* q;  // [elements of a row][kPanel]; where rows are queries (AMX) [kPanel][elements of a row]
  float* out;         // [head_dim][kPanel] or [kPanel][head_dim], not yet divided by sum
  float* max;         // [kPanel], of unscaled scores
  float* sum;         // [kPanel], or [kPanel][16] that are to be added up
  int first;          // position of the first query in its prompt
  int count;          // queries that exist, 1 .. kPanel
  const bool* kept;   // [num_kept] key tiles to attend to, or null = all
  int num_kept;
  int last() const { return first + count - 1; }
  bool attends(int key) const { return kept == nullptr || (key / kTile < num_kept && kept[key / kTile]); }
};

// --- memory ----------------------------------------------------------------------------------------------------------

// Memory of a worker, kept from call to call: fresh pages cost more than a short prompt's attention.
inline uint32_t* scratch(int64_t elements) {
  constexpr int64_t kAlign = 64 / sizeof(uint32_t);
  thread_local std::vector<uint32_t> memory;
  if (static_cast<int64_t>(memory.size()) < elements + kAlign) memory.resize(elements + kAlign);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

// --- products --------------------------------------------------------------------------------------------------------

struct Float32 {
  using Element = float;
  static constexpr int kPerElement = 1;
  static constexpr float kSlack = 0.0f;  // of running maxima: see raise_maxima
  static F32 add_product(F32 sum, const float* broadcast, F32 lanes) { return sum + splat(*broadcast) * lanes; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  using Element = uint32_t;
  static constexpr int kPerElement = 2;
  static constexpr float kSlack = 8.0f;
  static F32 add_product(F32 sum, const uint32_t* broadcast, F32 lanes) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*broadcast), (__m512bh)lanes);
  }
};
#endif

// Registers of results: kRows x kColumns accumulators, kColumns of lanes, and one of a broadcast element where it is no
// operand in memory. 32 registers with AVX-512 and NEON, else 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumns = 4, kMaxRows = 6;
#else
constexpr int kColumns = 2, kMaxRows = 6;
#endif

// Elements of a matrix whose rows are broadcast: element (i, n) is at data[i * row + n * step].
template <class Element>
struct Broadcast {
  const Element* data;
  int64_t row, step;
};

// out[kRows][kPanel] (+)= a[kRows][n] * b[n][kPanel], for one run of kColumns vectors of lanes.
template <class Math, int kRows, bool kAdd>
inline void product_rows(Broadcast<typename Math::Element> a, const float* b, float* out, int n) {
  F32 sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) sums[i][j] = kAdd ? load(out + i * kPanel + j * kLanes) : F32{};
  }
  for (int step = 0; step < n; ++step) {
    F32 lanes[kColumns];
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) lanes[j] = load(b + step * kPanel + j * kLanes);
    const auto* element = a.data + step * a.step;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) sums[i][j] = Math::add_product(sums[i][j], element + i * a.row, lanes[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) store(out + i * kPanel + j * kLanes, sums[i][j]);
  }
}

// out[rows][kPanel] (+)= a[rows][n] * b[n][kPanel]
template <class Math, bool kAdd>
inline void product(Broadcast<typename Math::Element> a, const void* lanes, float* out, int rows, int n) {
  constexpr int kWidth = kColumns * kLanes;
  static_assert(kPanel % kWidth == 0);
  // Strips of lanes outside: one strip of `b` stays in the L1 cache while all rows use it.
  for (int column = 0; column < kPanel; column += kWidth) {
    const float* b = static_cast<const float*>(lanes) + column;
    auto rest = a;
    float* to = out + column;
    for (int left = rows; left > 0;) {
      // Runs of kMaxRows and of one less are enough for most numbers of rows, so that no run is short.
      const bool whole = left % kMaxRows == 0 || left % (kMaxRows - 1) != 0;
      const int take = std::min(left, whole ? kMaxRows : kMaxRows - 1);
      switch (take) {
        case kMaxRows: product_rows<Math, kMaxRows, kAdd>(rest, b, to, n); break;
        case kMaxRows - 1: product_rows<Math, kMaxRows - 1, kAdd>(rest, b, to, n); break;
        case kMaxRows - 2: product_rows<Math, kMaxRows - 2, kAdd>(rest, b, to, n); break;
        case 3: product_rows<Math, 3, kAdd>(rest, b, to, n); break;
        case 2: product_rows<Math, 2, kAdd>(rest, b, to, n); break;
        default: product_rows<Math, 1, kAdd>(rest, b, to, n); break;
      }
      rest.data += take * a.row;
      to += take * kPanel;
      left -= take;
    }
  }
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// Scores of keys that a query must not see become -inf. `key` and `query` are positions; scores[keys][kStride].
template <int kWidth>
inline void mask_scores(float* scores, int keys, int key, int query) {
  for (int i = 0; i < keys; ++i) {
    for (int j = 0; j < kWidth; j += kLanes) {
      const S32 seen = lane_index() + (query + j) >= key + i;
      store(scores + i * kWidth + j, seen ? load(scores + i * kWidth + j) : splat(-__builtin_inff()));
    }
  }
}

// Where the running maxima of `kWidth` queries have grown by more than `slack` (in units of log2 of a weight), takes the
// new ones and scales sums and results down. With slack, weights may exceed 1 (by 2^slack), and after the first steps
// hardly ever anything is left to do. scores[keys][kWidth]; `out` has rows of kPanel.
template <int kWidth>
inline void raise_maxima(const float* scores, int keys, float* max_, float* sum, float* out, int head_dim, float factor,
                         float slack) {
  constexpr int kVectors = kWidth / kLanes;
  F32 found[kVectors];
  for (int j = 0; j < kVectors; ++j) found[j] = splat(kNoMax);
  for (int i = 0; i < keys; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) found[j] = max(load(scores + i * kWidth + j * kLanes), found[j]);
  }
  for (int j = 0; j < kVectors; ++j) {
    const F32 old = load(max_ + j * kLanes);
    if (reduce_max(found[j] - old) * factor <= slack) continue;
    const F32 raised = max(found[j], old);
    const F32 shrink = exp2((old - raised) * factor);
    store(max_ + j * kLanes, raised);
    store(sum + j * kLanes, load(sum + j * kLanes) * shrink);
    for (int d = 0; d < head_dim; ++d) {
      float* row = out + d * kPanel + j * kLanes;
      store(row, load(row) * shrink);
    }
  }
}

#if defined(__AVX512BF16__)
// Two keys' weights of 16 queries as pairs of bfloat16, and their sum added to `sum`.
//
// 2^x = 2^r * 2^n with n = floor(x), r in [0, 1). The polynomial for 2^r errs by 8e-5 of the value (of degree 3, least
// maximal relative error), a 25th of what rounding to bfloat16 may; half a unit of bfloat16 in [1, 2) is part of its
// constant, so that cutting off the lower 16 bits rounds. The sum is that of the rounded weights, as in the reference.
struct WeightPairs {
  __m512 c0 = _mm512_set1_ps(0.999925196f + 0.00390625f), c1 = _mm512_set1_ps(0.695833564f),
         c2 = _mm512_set1_ps(0.226067156f), c3 = _mm512_set1_ps(0.0780245215f);
  __m512i ones = _mm512_set1_epi32(0x3f803f80);

  inline __m512 power(__m512 x) const {
    const __m512 r = _mm512_reduce_ps(x, 0x01);
    const __m512 p = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(c3, r, c2), r, c1), r, c0);
    return _mm512_scalef_ps(p, x);
  }

  inline __m512i pair(const float* even, const float* odd, __m512 factor, __m512 offset, __m512& sum) const {
    const __m512 a = power(_mm512_fmadd_ps(_mm512_loadu_ps(even), factor, offset));
    const __m512 b = power(_mm512_fmadd_ps(_mm512_loadu_ps(odd), factor, offset));
    const __m512i both = _mm512_mask_blend_epi16(0x55555555, (__m512i)b, _mm512_srli_epi32((__m512i)a, 16));
    sum = _mm512_dpbf16_ps(sum, (__m512bh)both, (__m512bh)ones);
    return both;
  }
};
#endif

}  // namespace sparseserve::prefill
