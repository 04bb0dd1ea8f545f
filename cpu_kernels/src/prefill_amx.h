// Prefill attention with AMX tiles (Sapphire Rapids and later): bfloat16 products 16 x 16 x 32 in one instruction.
//
// With AMX the products take less time than softmax, so what counts is the vector work of a score. Here the rows of a tile
// are queries and its columns keys: then neighbouring keys are neighbouring lanes, two vectors of scores become one of
// bfloat16 weights by packing, and all of the exponential but its argument is done on 16-bit integers, 32 at a time.
// Scores of the next keys are computed while those of the current ones become weights, interleaved by hand, since a core
// looks only some hundred instructions ahead.
#pragma once

#include <cmath>
#include <vector>

#include "amx.h"
#include "prefill_panels.h"
#include "prefill_prompt.h"

namespace sparseserve::prefill {

#define SPARSESERVE_INLINE_TILES SPARSESERVE_TILES inline __attribute__((always_inline))

// Weights as bfloat16 from scores: 2^x as 16-bit integers.
//
// The bits of a bfloat16 are 128 times (127 + its logarithm), were mantissas exponential: w = round(128 (127 + x)) has the
// right exponent, and a table of the upper six bits of the mantissa says what to take from it. w is off by half a unit of
// the last place, and so is the table: 0.3 % each, as much as rounding to bfloat16 may be. Below 2^-127 saturation to
// zero gives zero, also for -inf.
struct Weights {
  // Of (logarithms of) weights, where a running maximum has been passed: 2^8 is harmless, and hardly ever reached.
  static constexpr int kMost = 128 * (127 + 8);

  __m512 factor;
  __m512i table, most = _mm512_setzero_si512();

  SPARSESERVE_TILES explicit Weights(float scale_log2) : factor(_mm512_set1_ps(128.0f * scale_log2)) {
    alignas(64) uint8_t excess[64];
    for (int i = 0; i < 64; ++i) {
      const float part = (2 * i + 0.5f) / 128.0f;
      excess[i] = static_cast<uint8_t>(std::lround(128.0f * (1.0f + part - std::exp2(part))));
    }
    table = _mm512_load_si512(excess);
  }

  // What a row's scores times `factor` are added to. Without a maximum yet, so much that any score passes it, and that the
  // sum can still be converted to an integer.
  static float offset(float max_, float scale_log2) {
    return std::min(128.0f * (127.0f - max_ * scale_log2), 0x1p30f);
  }

  // 32 scores of one query. Of every four pairs of neighbouring keys in the result, two are of the first half of the keys
  // and two of the second: see `Amx::pair_row`.
  SPARSESERVE_INLINE_TILES __m512i of(const float* scores, __m512 offset) {
    const __m512i low = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(scores), factor, offset));
    const __m512i high = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(scores + 16), factor, offset));
    const __m512i w = _mm512_packus_epi32(low, high);
    most = _mm512_max_epu16(most, w);
    return _mm512_sub_epi16(w, _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(w, 1), table));
  }

  SPARSESERVE_INLINE_TILES bool passed() const {
    return _mm512_cmpgt_epu16_mask(most, _mm512_set1_epi16(static_cast<int16_t>(kMost))) != 0;
  }
};

// How one worker attends. kSteps: head_dim / 32, or 0 = any.
//
// Packed memory, in tiles of 16 rows of 16 pairs: keys `[16 keys][head_dim / 32]` tiles, transposed, a row of a tile being
// two dims of 16 keys; values `[32 keys][head_dim / 16]` tiles, a row being two keys in 16 dims.
template <int kSteps>
class Amx {
 public:
  using Element = uint32_t;
  static constexpr int kPerElement = 2;
  static constexpr bool kQueriesAreLanes = false;
  static constexpr int kPartialSums = 16;

  // Runs of 16 keys lie in one block, and dims are whole tiles.
  static bool supports(int head_dim, int block_size) {
    return head_dim % 32 == 0 && block_size % 16 == 0 && amx::available();
  }

  // Elements of scratch memory (32 bits each).
  static int64_t scratch(int head_dim) {
    return kChunkKeys * head_dim + 2 * kScores + 2 * kMostBlocks * kWeights + kRows;
  }

  Amx(const Prompt<Bf16>& prompt, float scale, uint32_t* memory)
      : prompt_(prompt), any_steps_(prompt.head_dim / 32), scale_log2_(scale * kLog2E) {
    k_ = memory;
    v_ = k_ + kChunkKeys * head_dim() / 2;
    scores_ = reinterpret_cast<float*>(v_ + kChunkKeys * head_dim() / 2);
    weights_ = reinterpret_cast<uint32_t*>(scores_ + 2 * kScores);
    offsets_ = reinterpret_cast<float*>(weights_ + 2 * kMostBlocks * kWeights);
  }

  // Packs the key tile of the prompt that begins at token `key`, the chunk beginning at `chunk`.
  void pack(int key, int chunk) {
    for (int i = 0; i < kTile; i += 16) {
      pack_keys(key + i, key - chunk + i);
      pack_values(key + i, key - chunk + i / 32 * 32, i / 16 % 2);
    }
  }

  SPARSESERVE_TILES void attend(const Panel* panels, int num_panels, int chunk) {
    jobs_.clear();
    for (int p = 0; p < num_panels; ++p) add_jobs(panels[p], chunk);
    if (jobs_.empty()) return;
    amx::configure();
    score_buffer_ = weight_buffer_ = 0;
    pending_ = {jobs_[0], nullptr, 0, 0, steps(), 0};
    for (int step = 0; step < num_score_steps(); ++step) score(jobs_[0], 0, step, scores_);
    for (size_t j = 0; j < jobs_.size(); ++j) run(jobs_[j], j + 1 < jobs_.size() ? &jobs_[j + 1] : nullptr);
    finish();
    amx::release();
  }

 private:
  static constexpr int kRows = 32;                   // queries of a job
  static constexpr int kMostBlocks = kTile / 32;     // of 32 keys
  static constexpr int kScores = kRows * 32;         // of a block
  static constexpr int kWeights = kRows * 16;        // of a block, in pairs

  // A key tile with half a panel.
  struct Job {
    const uint32_t* q;
    float *out, *max, *sum;
    const uint32_t *k, *v;
    int blocks;      // of 32 keys
    int key, query;  // positions of the first of each
  };

  // Weights whose values have not been added: a chain of products over all blocks for each 32 dims of the result, and the
  // sums of weights block by block.
  struct Pending {
    Job job;
    const uint32_t* weights;
    int first, last;  // blocks
    int chain, summed;
    bool is_whole() const { return first == 0 && last == kMostBlocks; }
  };

  int steps() const { return kSteps ? kSteps : any_steps_; }
  int head_dim() const { return 32 * steps(); }

  // Where the values of keys 2 i and 2 i + 1 of 32 belong: weights come out of `Weights::of` in this order.
  static int pair_row(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

  // 16 tokens' keys or values: as they are, or int8 that becomes bfloat16 as it is read.
  struct Rows {
    const Bf16* values;
    const int8_t* quantised;
    float scale;
    int count;  // tokens that exist
  };

  Rows rows(int half, int token) const {
    const int count = prompt_.end - token;
    if (count <= 0 || prompt_.scales == nullptr) return {prompt_.template row<Bf16>(half, token), nullptr, 1.0f, count};
    return {nullptr, prompt_.template row<int8_t>(half, token), prompt_.scale(half, token), count};
  }

  // Row `i`, 32 dims from `d` on; zeros where there is none.
  __m512i load_row(const Rows& rows, int i, int d) const {
    if (i >= rows.count) return _mm512_setzero_si512();
    const int64_t place = static_cast<int64_t>(i) * head_dim() + d;
    if (rows.quantised == nullptr) return _mm512_loadu_si512(rows.values + place);
    const F32 low = sparseserve::load(rows.quantised + place) * rows.scale;
    const F32 high = sparseserve::load(rows.quantised + place + 16) * rows.scale;
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }

  void pack_keys(int key, int begin) {
    const Rows from = rows(0, key);
    for (int d = 0; d < head_dim(); d += 32) {
      S32 square[16];
      for (int i = 0; i < 16; ++i) square[i] = (S32)load_row(from, i, d);
      transpose(square);
      uint32_t* to = k_ + begin * head_dim() / 2 + d * 8;
      for (int i = 0; i < 16; ++i) std::memcpy(to + i * 16, &square[i], 64);
    }
  }

  // `half`: whether these are the second 16 keys of 32.
  void pack_values(int key, int begin, int half) {
    const Rows from = rows(1, key);
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = i / 2 + i % 2 * 32;
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < head_dim(); d += 32) {
      uint32_t* to = v_ + begin * head_dim() / 2 + d * 16;
      for (int i = 0; i < 8; ++i) {
        const __m512i even = load_row(from, 2 * i, d), odd = load_row(from, 2 * i + 1, d);
        uint32_t* row = to + pair_row(8 * half + i) * 16;
        _mm512_storeu_si512(row, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_storeu_si512(row + 256, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  void add_jobs(const Panel& panel, int chunk) {
    const int end = std::min(chunk + kChunkKeys, panel.last() + 1);
    for (int key = chunk; key < end; key += kTile) {
      if (!panel.attends(key)) continue;
      for (int row = 0; row < panel.count; row += kRows) {
        const int last = std::min(panel.last(), panel.first + row + kRows - 1);
        const int keys = std::min(kTile, last + 1 - key);
        if (keys <= 0) continue;
        const int packed = (key - chunk) * head_dim() / 2;
        jobs_.push_back({panel.q + row * head_dim() / 2, panel.out + row * head_dim(), panel.max + row,
                         panel.sum + row * kPartialSums, k_ + packed, v_ + packed, (keys + 31) / 32, key,
                         panel.first + row});
      }
    }
  }

  // Instructions in steps that fit between two rows of weights: the tile unit is busy for 16 cycles with each.

  // Scores of 32 keys: four products for every 32 dims, four stores.
  int num_score_steps() const { return 4 * steps() + 4; }
  SPARSESERVE_INLINE_TILES void score(const Job& job, int block, int step, float* to) const {
    if (step >= 4 * steps()) return store_tile(step - 4 * steps(), to, 32);
    const int dims = step / 4;
    const uint32_t* k = job.k + block * 16 * head_dim() + dims * 256;
    const uint32_t* q = job.q + dims * 16;
    if (dims == 0) zero(step);
    multiply(step % 4, q, q + 8 * head_dim(), head_dim() * 2, k, k + 8 * head_dim());
  }

  // A chain of the pending products: four for every block, four stores.
  int num_value_steps() const { return 4 * (pending_.last - pending_.first) + 4; }
  SPARSESERVE_INLINE_TILES void add_values(int chain, int step, int num_blocks) const {
    const Pending& p = pending_;
    float* out = p.job.out + chain * 32;
    if (step >= 4 * num_blocks) return store_tile(step - 4 * num_blocks, out, head_dim());
    const int block = p.first + step / 4;
    const uint32_t* weights = p.weights + block * kWeights;
    const uint32_t* v = p.job.v + block * 16 * head_dim() + chain * 512;
    if (step < 4) load(step, out, head_dim());
    multiply(step % 4, weights, weights + 256, 64, v, v + 256);
  }

  // Adds the weights of a pending block and query to its sum.
  SPARSESERVE_INLINE_TILES void add_sum(int block, int row) const {
    float* sum = pending_.job.sum + row * kPartialSums;
    const __m512i pairs = _mm512_loadu_si512(pending_.weights + block * kWeights + row * 16);
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    _mm512_storeu_ps(sum, _mm512_dpbf16_ps(_mm512_loadu_ps(sum), (__m512bh)pairs, ones));
  }

  // What is left of the pending work.
  SPARSESERVE_TILES void finish() {
    Pending& p = pending_;
    SPARSESERVE_MEMORY_BARRIER();
    for (; p.chain < steps(); ++p.chain) {
      for (int step = 0; step < num_value_steps(); ++step) add_values(p.chain, step, p.last - p.first);
    }
    SPARSESERVE_MEMORY_BARRIER();
    for (; p.summed < p.last; ++p.summed) {
      for (int row = 0; row < kRows; ++row) add_sum(p.summed, row);
    }
  }

  // Tile 2 i + j of the results, of rows 16 i and columns 16 j, is made of the operands in tiles 4 + i and 6 + j, which are
  // loaded for the first product that needs them.
  SPARSESERVE_INLINE_TILES static void multiply(int tile, const uint32_t* upper, const uint32_t* lower, int stride,
                                                const uint32_t* left, const uint32_t* right) {
    SPARSESERVE_MEMORY_BARRIER();
    switch (tile) {
      case 0:
        _tile_loadd(4, upper, stride);
        _tile_loadd(6, left, 64);
        _tile_dpbf16ps(0, 4, 6);
        break;
      case 1:
        _tile_loadd(7, right, 64);
        _tile_dpbf16ps(1, 4, 7);
        break;
      case 2:
        _tile_loadd(5, lower, stride);
        _tile_dpbf16ps(2, 5, 6);
        break;
      default: _tile_dpbf16ps(3, 5, 7);
    }
  }

  SPARSESERVE_INLINE_TILES static void zero(int tile) {
    switch (tile) {
      case 0: _tile_zero(0); break;
      case 1: _tile_zero(1); break;
      case 2: _tile_zero(2); break;
      default: _tile_zero(3);
    }
  }

  SPARSESERVE_INLINE_TILES static void load(int tile, const float* from, int stride) {
    from += tile / 2 * 16 * stride + tile % 2 * 16;
    SPARSESERVE_MEMORY_BARRIER();
    switch (tile) {
      case 0: _tile_loadd(0, from, stride * 4); break;
      case 1: _tile_loadd(1, from, stride * 4); break;
      case 2: _tile_loadd(2, from, stride * 4); break;
      default: _tile_loadd(3, from, stride * 4);
    }
  }

  SPARSESERVE_INLINE_TILES static void store_tile(int tile, float* to, int stride) {
    to += tile / 2 * 16 * stride + tile % 2 * 16;
    switch (tile) {
      case 0: _tile_stored(0, to, stride * 4); break;
      case 1: _tile_stored(1, to, stride * 4); break;
      case 2: _tile_stored(2, to, stride * 4); break;
      default: _tile_stored(3, to, stride * 4);
    }
    SPARSESERVE_MEMORY_BARRIER();
  }

  // Scores of keys that a query must not see become -inf.
  static void mask(float* scores, int key, int query) {
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < 32; i += 16) {
        const int seen = std::clamp(query + row + 1 - key - i, 0, 16);
        const __mmask16 hidden = static_cast<__mmask16>(0xffffu << seen);
        _mm512_mask_storeu_ps(scores + row * 32 + i, hidden, _mm512_set1_ps(-__builtin_inff()));
      }
    }
  }

  // Takes the maxima of these scores as well, and scales sums and results down.
  static void raise_maxima(const Job& job, const float* scores, float scale_log2, int head_dim) {
    for (int row = 0; row < kRows; ++row) {
      const float old = job.max[row];
      const float found = _mm512_reduce_max_ps(
          _mm512_max_ps(_mm512_loadu_ps(scores + row * 32), _mm512_loadu_ps(scores + row * 32 + 16)));
      if (!(found > old)) continue;
      job.max[row] = found;
      const __m512 shrink = _mm512_set1_ps(std::exp2((old - found) * scale_log2));
      float* sum = job.sum + row * kPartialSums;
      _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), shrink));
      for (int d = 0; d < head_dim; d += 16) {
        float* out = job.out + row * head_dim + d;
        _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), shrink));
      }
    }
  }

  // Weights of a block from its scores. Meanwhile, if wanted, the scores of block `next_block` of `next`, and of the
  // pending work, which is that of a whole job, chain and sums `block`. Returns whether a maximum has been passed by too
  // much.
  template <bool kScore, bool kValues>
  SPARSESERVE_TILES bool weigh(uint32_t* to, int block, const Job* next, int next_block) {
    Weights weights(table_);
    const float* scores = scores_ + score_buffer_ * kScores;
    float* next_scores = scores_ + (1 - score_buffer_) * kScores;
    const int num_scores = kScore ? num_score_steps() : 0;
    const bool chain = kValues && block < steps();
    const int num_steps = num_scores + (kValues ? 4 * kMostBlocks + 4 : 0);
#pragma GCC unroll 32
    for (int row = 0; row < kRows; ++row) {
      for (int step = row * num_steps / kRows; step < (row + 1) * num_steps / kRows; ++step) {
        if (step < num_scores) {
          score(*next, next_block, step, next_scores);
        } else if (chain) {
          add_values(block, step - num_scores, kMostBlocks);
        }
      }
      _mm512_storeu_si512(to + row * 16, weights.of(scores + row * 32, _mm512_set1_ps(offsets_[row])));
      if (kValues) add_sum(block, row);
    }
    if (chain) ++pending_.chain;
    if (kValues) ++pending_.summed;
    return weights.passed();
  }

  bool weigh(uint32_t* to, int block, const Job* next, int next_block) {
    const bool values = pending_.is_whole() && pending_.summed == block;
    if (next != nullptr) {
      return values ? weigh<true, true>(to, block, next, next_block) : weigh<true, false>(to, block, next, next_block);
    }
    return values ? weigh<false, true>(to, block, next, next_block) : weigh<false, false>(to, block, next, next_block);
  }

  void set_offsets(const Job& job) {
    for (int row = 0; row < kRows; ++row) offsets_[row] = Weights::offset(job.max[row], scale_log2_);
  }

  SPARSESERVE_TILES void run(const Job& job, const Job* next) {
    uint32_t* weights = weights_ + weight_buffer_ * kMostBlocks * kWeights;
    if (!pending_.is_whole()) finish();
    set_offsets(job);
    int first = 0;  // block whose values are not yet pending
    for (int block = 0; block < job.blocks; ++block) {
      float* scores = scores_ + score_buffer_ * kScores;
      const int key = job.key + 32 * block;
      if (key + 31 > job.query) mask(scores, key, job.query);
      const bool last = block + 1 == job.blocks;
      if (weigh(weights + block * kWeights, block, last ? next : &job, last ? 0 : block + 1)) {
        finish();  // what was weighed with the old maxima comes before they change
        if (first < block) pending_ = {job, weights, first, block, 0, first};
        finish();
        first = block;
        raise_maxima(job, scores, scale_log2_, head_dim());
        set_offsets(job);
        weigh(weights + block * kWeights, block, nullptr, 0);
      }
      score_buffer_ = 1 - score_buffer_;
    }
    finish();
    pending_ = {job, weights, first, job.blocks, 0, first};
    weight_buffer_ = 1 - weight_buffer_;
  }

  Prompt<Bf16> prompt_;
  int any_steps_;
  float scale_log2_;
  Weights table_{scale_log2_};
  uint32_t *k_, *v_, *weights_;  // weights of two jobs in turn
  float *scores_, *offsets_;             // scores of two blocks in turn
  int score_buffer_ = 0, weight_buffer_ = 0;
  Pending pending_{{}, nullptr, 0, 0, 0, 0};
  std::vector<Job> jobs_;
};

}  // namespace sparseserve::prefill
