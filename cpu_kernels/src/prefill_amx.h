// Prefill attention with AMX tiles (Sapphire Rapids and later): bfloat16 products 16 x 16 x 32 in one instruction.
//
// With AMX the products take less time than the exponentials, and they run beside each other: the tile unit works through
// the products of one step (the values of the last job, the scores of the next) while the vector units turn the scores of
// the current one into weights. The two kinds of instructions are interleaved by hand, a few at a time, since a core
// looks only some hundred instructions ahead.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "prefill_panels.h"
#include "prefill_prompt.h"

namespace sparseserve::prefill {

#define SPARSESERVE_TILES __attribute__((target("amx-tile,amx-bf16")))

// GCC's tile loads do not say that they read memory.
#define SPARSESERVE_MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

// How one worker attends. Layouts of packed memory, in pairs (uint32_t): keys `[token][head_dim / 2]` as they are in the
// pool; values `[32 tokens][head_dim][16 pairs of tokens]`, transposed.
class Amx {
 public:
  using Element = uint32_t;
  static constexpr int kPerElement = 2;

  // This processor has AMX, the operating system lets us use it, and head_dim is whole tiles.
  static bool supports(int head_dim) {
    static const bool available = has_amx() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return available && head_dim % 32 == 0;
  }

  // All tiles are 16 rows of 64 bytes.
  SPARSESERVE_TILES static void configure() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    SPARSESERVE_MEMORY_BARRIER();
    _tile_loadconfig(&config);
    SPARSESERVE_MEMORY_BARRIER();
  }

  static int64_t scratch(int head_dim) { return kChunkKeys * head_dim + 2 * (kScores + kWeights) + 32 * head_dim; }

  Amx(const Prompt<Bf16>& prompt, float scale, uint32_t* memory)
      : prompt_(prompt), head_dim_(prompt.head_dim), factor_(scale * kLog2E) {
    k_ = memory;
    v_ = k_ + kChunkKeys * head_dim_ / 2;
    rows_ = v_ + kChunkKeys * head_dim_ / 2;
    for (int i = 0; i < 2; ++i) {
      scores_[i] = reinterpret_cast<float*>(rows_ + 16 * head_dim_ + i * (kScores + kWeights));
      weights_[i] = reinterpret_cast<uint32_t*>(scores_[i] + kScores);
    }
  }

  void pack(int key, int chunk) {
    for (int begin = key - chunk; begin < key - chunk + kTile; begin += 32) {
      for (int i = 0; i < 32; ++i) {
        prompt_.read(0, chunk + begin + i, reinterpret_cast<Bf16*>(k_ + (begin + i) * head_dim_ / 2));
      }
      for (int i = 0; i < 16; ++i) prompt_.read_value_pairs(chunk + begin + 2 * i, rows_ + i * head_dim_);
      transpose(rows_, head_dim_, 16, head_dim_, v_ + begin / 2 * head_dim_, 16);
    }
  }

  SPARSESERVE_TILES void attend(const Panel* panels, int num_panels, int chunk) {
    jobs_.clear();
    for (int p = 0; p < num_panels; ++p) add_jobs(panels[p], chunk);
    if (jobs_.empty()) return;
    configure();
    const size_t n = jobs_.size();
    for (int i = 0; i < num_score_parts(jobs_[0]); ++i) score_part(jobs_[0], 0, i);
    for (size_t j = 0; j < n; ++j) {
      step(j > 0 ? &jobs_[j - 1] : nullptr, jobs_[j], j + 1 < n ? &jobs_[j + 1] : nullptr, j % 2);
    }
    for (int i = 0; i < num_value_parts(jobs_[n - 1]); ++i) value_part(jobs_[n - 1], (n - 1) % 2, i);
    _tile_release();
  }

 private:
  static constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static constexpr int kLanesOfJob = 32;
  static constexpr int kScores = kStepKeys * kLanesOfJob, kWeights = kScores / 2;

  // Some keys with half a panel.
  struct Job {
    const uint32_t* q;
    float *out, *max, *sum;
    const uint32_t *k, *v;
    int keys;   // a multiple of 32
    int key, query;  // positions of the first of each
  };

  static bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d >> 22 & 1) && (d >> 24 & 1);  // amx-bf16, amx-tile
  }

  void add_jobs(const Panel& panel, int chunk) {
    const int end = std::min(chunk + kChunkKeys, panel.last() + 1);
    for (int key = chunk; key < end; key += kStepKeys) {
      if (!panel.attends(key)) continue;
      for (int lane = 0; lane < panel.count; lane += kLanesOfJob) {
        const int last = std::min(panel.last(), panel.first + lane + kLanesOfJob - 1);
        const int keys = std::min({kStepKeys, end - key, last + 1 - key});
        if (keys <= 0) continue;
        const int begin = key - chunk;
        jobs_.push_back({panel.q + lane, panel.out + lane, panel.max + lane, panel.sum + lane,
                         k_ + begin * head_dim_ / 2, v_ + begin / 2 * head_dim_, round_up(keys, 32), key,
                         panel.first + lane});
      }
    }
  }

  // Products come in parts of four tile multiplications.
  int num_score_parts(const Job& job) const { return job.keys / 32 * (head_dim_ / 32); }
  int num_value_parts(const Job& job) const { return job.keys / 32 * (head_dim_ / 32); }

  // Scores of 32 keys, `head_dim / 32` parts one after the other.
  SPARSESERVE_TILES inline __attribute__((always_inline)) void score_part(const Job& job, int buffer, int part) {
    const int steps = head_dim_ / 32, keys = part / steps * 32, step = part % steps;
    const uint32_t* k = job.k + keys * head_dim_ / 2 + step * 16;
    const uint32_t* q = job.q + step * 16 * kPanel;
    if (step == 0) zero();
    SPARSESERVE_MEMORY_BARRIER();
    _tile_loadd(4, k, head_dim_ * 2);
    _tile_loadd(5, k + 8 * head_dim_, head_dim_ * 2);
    _tile_loadd(6, q, kPanel * 4);
    _tile_loadd(7, q + 16, kPanel * 4);
    multiply();
    if (step == steps - 1) store_tiles(scores_[buffer] + keys * kLanesOfJob, kLanesOfJob);
  }

  // Results of 32 dims, `keys / 32` parts one after the other.
  SPARSESERVE_TILES inline __attribute__((always_inline)) void value_part(const Job& job, int buffer, int part) {
    const int steps = job.keys / 32, dims = part / steps * 32, step = part % steps;
    const uint32_t* v = job.v + step * 16 * head_dim_ + dims * 16;
    const uint32_t* weights = weights_[buffer] + step * 16 * kLanesOfJob;
    float* out = job.out + dims * kPanel;
    SPARSESERVE_MEMORY_BARRIER();
    if (step == 0) {
      _tile_loadd(0, out, kPanel * 4);
      _tile_loadd(1, out + 16, kPanel * 4);
      _tile_loadd(2, out + 16 * kPanel, kPanel * 4);
      _tile_loadd(3, out + 16 * kPanel + 16, kPanel * 4);
    }
    _tile_loadd(4, v, 64);
    _tile_loadd(5, v + 16 * 16, 64);
    _tile_loadd(6, weights, kLanesOfJob * 4);
    _tile_loadd(7, weights + 16, kLanesOfJob * 4);
    multiply();
    if (step == steps - 1) store_tiles(out, kPanel);
  }

  SPARSESERVE_TILES static inline __attribute__((always_inline)) void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  SPARSESERVE_TILES static inline __attribute__((always_inline)) void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  SPARSESERVE_TILES static inline __attribute__((always_inline)) void store_tiles(float* to, int stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + 16, stride * 4);
    _tile_stored(2, to + 16 * stride, stride * 4);
    _tile_stored(3, to + 16 * stride + 16, stride * 4);
  }

  // Weights of one job, interleaved with the values of the one before and the scores of the one after.
  SPARSESERVE_TILES void step(const Job* before, const Job& job, const Job* after, int buffer) {
    int value_parts = before != nullptr ? num_value_parts(*before) : 0, score_parts = after ? num_score_parts(*after) : 0;
    int value = 0, score = 0;
    if (before != nullptr && before->out == job.out) {  // its results may be scaled now: they must be complete
      while (value < value_parts) value_part(*before, !buffer, value++);
    }
    float* scores = scores_[buffer];
    if (job.key + job.keys - 1 > job.query) mask_scores<kLanesOfJob>(scores, job.keys, job.key, job.query);
    raise_maxima<kLanesOfJob>(scores, job.keys, job.max, job.sum, job.out, head_dim_, factor_, 8.0f);

    const WeightPairs pairs;
    const __m512 factor = _mm512_set1_ps(factor_);
    const __m512 offset0 = _mm512_mul_ps(_mm512_loadu_ps(job.max), _mm512_set1_ps(-factor_));
    const __m512 offset1 = _mm512_mul_ps(_mm512_loadu_ps(job.max + 16), _mm512_set1_ps(-factor_));
    __m512 sum0 = _mm512_loadu_ps(job.sum), sum1 = _mm512_loadu_ps(job.sum + 16);
    uint32_t* weights = weights_[buffer];
    const int rounds = job.keys / kRoundKeys;
    const int per_round = (value_parts - value + score_parts + rounds - 1) / rounds;
    for (int round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < kRoundKeys; i += 2) {
        const float* row = scores + (round * kRoundKeys + i) * kLanesOfJob;
        uint32_t* to = weights + (round * kRoundKeys + i) / 2 * kLanesOfJob;
        _mm512_storeu_si512(to, pairs.pair(row, row + kLanesOfJob, factor, offset0, sum0));
        _mm512_storeu_si512(to + 16, pairs.pair(row + 16, row + 16 + kLanesOfJob, factor, offset1, sum1));
      }
      for (int i = 0; i < per_round; ++i) {
        if (value < value_parts) {
          value_part(*before, !buffer, value++);
        } else if (score < score_parts) {
          score_part(*after, !buffer, score++);
        }
      }
    }
    _mm512_storeu_ps(job.sum, sum0);
    _mm512_storeu_ps(job.sum + 16, sum1);
  }

  static constexpr int kRoundKeys = 8;

  Prompt<Bf16> prompt_;
  int head_dim_;
  float factor_;
  uint32_t *k_, *v_, *rows_;
  float* scores_[2];
  uint32_t* weights_[2];
  std::vector<Job> jobs_;
};

}  // namespace sparseserve::prefill
