// Decode attention of one chunk by AMX tiles: bfloat16 keys and values, read where they lie.
//
// All scores of the chunk come first, then one softmax, then all values: nothing is rescaled in between. Values are an
// operand as they lie, too. Such an operand is rows of pairs that share a column, and a row of values pairs dimension
// 2 c with 2 c + 1; so the weight w of a token stands in two rows of the other operand, as the pair (w, 0) and as
// (0, w): the first makes the sums of even dimensions, the second those of odd ones, and no value has to be moved. (An
// infinite or NaN value therefore spoils its neighbour, too.)
//
// The exactness is that of prefill: weights are rounded to bfloat16, and summed as rounded.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "group_tiles.h"

namespace sparseserve {

#if defined(SPARSESERVE_AMX)

class DecodeAmx {
 public:
  static constexpr int kRows = GroupTiles::kRows;

  // 16 tokens of a block, of which the first `count` exist.
  struct Tokens {
    const Bf16 *keys, *values;
    int count;
    const bool* mask;  // null, or [group], `mask_stride` apart: whether the query attends to them
  };

  static bool supports(int head_dim, int block_size, int group) {
    return block_size % kRows == 0 && GroupTiles::supports(head_dim, group);
  }

  // queries: `[group, head_dim]`.
  void set_queries(const float* queries, int group, int head_dim) {
    group_ = group;
    head_dim_ = head_dim;
    queries_.assign(GroupTiles::packed_size(head_dim), Line{});
    for (int g = 0; g < group; ++g) GroupTiles::pack(queries + g * head_dim, g, head_dim, queries_.data());
  }

  // Maximum, sum, and from element `header` on, sums of values as Steps<Bf16> orders them, of each query in states
  // (`stride` apart, zeros before, the least maximum set). `next`: tokens that will be attended to after these.
  SPARSESERVE_TILES void attend(const std::vector<Tokens>& tokens, const std::vector<Tokens>& next, float factor,
                                int64_t mask_stride, float* states, int stride, int header) {
    const int num_tiles = static_cast<int>(tokens.size());
    products_.resize(num_tiles * group_);
    scores_.resize(num_tiles * group_);
    weights_.resize(num_tiles * group_ * 2);
    GroupTiles::configure(group_);
    for (int i = 0; i < num_tiles; ++i) {
      GroupTiles::multiply(tokens[i].keys, head_dim_ * sizeof(Bf16), head_dim_, queries_.data(), group_,
                           products_[i * group_].values);
      prefetch(tokens, next, i);
    }
    with_group(group_, [&](auto group) { softmax<group>(tokens, factor, mask_stride, states, stride); });
    for (int d = 0; d < head_dim_; d += kMostSteps * 32) {
      add_values(tokens, next, d, std::min(kMostSteps, (head_dim_ - d) / 32), states + header + d, stride);
    }
    amx::release();
  }

 private:
  static constexpr int kMostSteps = 4;  // of 32 dimensions that have tiles for their sums

  // Prefetches what is used kAhead tiles after the i-th: keys of these tokens, their values, then keys of the next.
  void prefetch(const std::vector<Tokens>& tokens, const std::vector<Tokens>& next, int i) const {
    constexpr int kAhead = 8;
    const size_t tile = i + kAhead, n = tokens.size();
    const Bf16* start = nullptr;
    if (tile < n) {
      start = tokens[tile].keys;
    } else if (tile < 2 * n) {
      start = tokens[tile - n].values;
    } else if (tile - 2 * n < next.size()) {
      start = next[tile - 2 * n].keys;
    } else {
      return;
    }
    for (int k = 0; k < kRows * head_dim_; k += 32) __builtin_prefetch(start + k, 0, 2);
  }

  // 2^x to 1e-5 of the value, for weights of 8 bits. NaN stays NaN, and -inf gives zero.
  static F32 power(F32 x) {
    const __m512 part = _mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    F32 p = splat(1.3534170e-2f);
    p = p * (F32)part + 5.2011460e-2f;
    p = p * (F32)part + 2.4144276e-1f;
    p = p * (F32)part + 6.9300383e-1f;
    p = p * (F32)part + 1.0000026f;
    return (F32)_mm512_scalef_ps((__m512)p, (__m512)x);
  }

  // Products become weights, as pairs: tile i of weights has rows (w, 0) of each query, then rows (0, w).
  template <int kGroup>
  void softmax(const std::vector<Tokens>& tokens, float factor, int64_t mask_stride, float* states, int stride) {
    const int num_tiles = static_cast<int>(tokens.size());
    const GroupTransposition<kGroup> transpose;
    const F32 masked = splat(-__builtin_inff());
    F32 most[kGroup], sums[kGroup] = {};
    for (int g = 0; g < kGroup; ++g) most[g] = masked;
    for (int i = 0; i < num_tiles; ++i) {
      F32 scores[kGroup];
      transpose(products_[i * kGroup].values, scores);
      for (int g = 0; g < kGroup; ++g) {
        const bool off = tokens[i].mask && !tokens[i].mask[g * mask_stride];
        scores[g] = first_lanes(scores[g] * factor, off ? 0 : tokens[i].count, masked);
        most[g] = max(most[g], scores[g]);
        store(scores_[i * kGroup + g].values, scores[g]);
      }
    }
    F32 maxima[kGroup];
    for (int g = 0; g < kGroup; ++g) {
      const float found = reduce_max(most[g]);
      if (found > states[g * stride]) states[g * stride] = found;
      maxima[g] = splat(states[g * stride]);
    }
    for (int i = 0; i < num_tiles; ++i) {
      for (int g = 0; g < kGroup; ++g) {
        const F32 weight = power(load(scores_[i * kGroup + g].values) - maxima[g]);
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weight));
        const __m512i high = _mm512_slli_epi32(low, 16);
        sums[g] += (F32)high;
        _mm512_store_si512(weights_[2 * i * kGroup + g].values, low);
        _mm512_store_si512(weights_[(2 * i + 1) * kGroup + g].values, high);
      }
    }
    for (int g = 0; g < kGroup; ++g) states[g * stride + 1] = reduce_add(sums[g]);
  }

  // Sums of values for `steps` times 32 dimensions from d on.
  SPARSESERVE_TILES void add_values(const std::vector<Tokens>& tokens, const std::vector<Tokens>& next, int d,
                                    int steps, float* sums, int stride) {
    const int num_tiles = static_cast<int>(tokens.size());
    const int64_t row_bytes = head_dim_ * sizeof(Bf16);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int i = 0; i < num_tiles; ++i) {
      const Bf16* values = (tokens[i].count < kRows ? whole(tokens[i]) : tokens[i].values) + d;
      SPARSESERVE_MEMORY_BARRIER();
      _tile_loadd(3, weights_.data() + i * 2 * group_, 64);
      _tile_loadd(2, values, row_bytes);
      _tile_dpbf16ps(4, 3, 2);
      if (steps > 1) {
        _tile_loadd(2, values + 32, row_bytes);
        _tile_dpbf16ps(5, 3, 2);
      }
      if (steps > 2) {
        _tile_loadd(2, values + 64, row_bytes);
        _tile_dpbf16ps(6, 3, 2);
      }
      if (steps > 3) {
        _tile_loadd(2, values + 96, row_bytes);
        _tile_dpbf16ps(7, 3, 2);
      }
      if (d == 0) prefetch(tokens, next, num_tiles + i);
    }
    float out[kMostSteps][2 * GroupTiles::kMostQueries][16];
    _tile_stored(4, out[0], 64);
    _tile_stored(5, out[1], 64);
    _tile_stored(6, out[2], 64);
    _tile_stored(7, out[3], 64);
    SPARSESERVE_MEMORY_BARRIER();
    for (int g = 0; g < group_; ++g) {
      for (int step = 0; step < steps; ++step) {
        store(sums + g * stride + step * 32, load(out[step][g]));
        store(sums + g * stride + step * 32 + 16, load(out[step][group_ + g]));
      }
    }
  }

  // Values of tokens that exist, then zeros: zero times what lies there might be NaN.
  const Bf16* whole(const Tokens& tokens) {
    whole_.assign(kRows * head_dim_ * sizeof(Bf16) / sizeof(Line), Line{});
    std::memcpy(whole_.data(), tokens.values, tokens.count * head_dim_ * sizeof(Bf16));
    return reinterpret_cast<const Bf16*>(whole_.data());
  }

  int group_ = 0, head_dim_ = 0;
  std::vector<Line> queries_, whole_, products_, scores_, weights_;
};

#endif

}  // namespace sparseserve
