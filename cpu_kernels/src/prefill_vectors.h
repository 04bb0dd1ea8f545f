// Prefill attention with vector registers: any instruction set, float32 or (AVX512-bf16) bfloat16 products.
#pragma once

#include "prefill_panels.h"
#include "prefill_prompt.h"

namespace sparseserve::prefill {

// Weights of `keys` scores[kPanel], in place of the scores, and their sums added to sum[kPanel].
inline void weights(Float32, float* scores, int keys, const float* max_, float* sum, float factor) {
  for (int j = 0; j < kPanel; j += kLanes) {
    const F32 offset = load(max_ + j) * -factor;
    F32 total = load(sum + j);
    for (int i = 0; i < keys; ++i) {
      const F32 weight = exp2(load(scores + i * kPanel + j) * factor + offset);
      store(scores + i * kPanel + j, weight);
      total += weight;
    }
    store(sum + j, total);
  }
}

#if defined(__AVX512BF16__)
// The same as pairs of keys: row i of the result, weights of keys 2i and 2i + 1, overwrites scores that were read.
inline void weights(Bfloat16, float* scores, int keys, const float* max_, float* sum, float factor) {
  const WeightPairs pairs;
  const __m512 factors = _mm512_set1_ps(factor);
  __m512 offset[kPanel / kLanes], total[kPanel / kLanes];
  for (int j = 0; j < kPanel / kLanes; ++j) {
    offset[j] = (__m512)(load(max_ + j * kLanes) * -factor);
    total[j] = _mm512_loadu_ps(sum + j * kLanes);
  }
  for (int i = 0; i < keys; i += 2) {
    for (int j = 0; j < kPanel / kLanes; ++j) {
      const float* even = scores + i * kPanel + j * kLanes;
      const __m512i both = pairs.pair(even, even + kPanel, factors, offset[j], total[j]);
      _mm512_storeu_si512(scores + i / 2 * kPanel + j * kLanes, both);
    }
  }
  for (int j = 0; j < kPanel / kLanes; ++j) _mm512_storeu_ps(sum + j * kLanes, total[j]);
}
#endif

// How one worker attends. T: elements of the pool.
template <class Math, class T>
class Vectors {
 public:
  using Element = typename Math::Element;
  static constexpr int kPerElement = Math::kPerElement;
  static constexpr bool kQueriesAreLanes = true;
  static constexpr int kPartialSums = 1;

  // Elements of scratch memory (32 bits each).
  static int64_t scratch(int head_dim) { return 2 * kChunkKeys * head_dim + kStepKeys * kPanel; }

  Vectors(const Prompt<T>& prompt, float scale, uint32_t* memory)
      : prompt_(prompt),
        factor_(scale * kLog2E),
        k_(reinterpret_cast<Element*>(memory)),
        v_(k_ + kChunkKeys * prompt.head_dim),
        scores_(reinterpret_cast<float*>(v_ + kChunkKeys * prompt.head_dim)) {}

  // Packs the key tile of the prompt that begins at token `key`, the chunk beginning at `chunk`.
  void pack(int key, int chunk) {
    const int head_dim = prompt_.head_dim, width = head_dim / kPerElement;
    for (int i = key - chunk; i < key - chunk + kTile; i += kPerElement) {
      pack_row(chunk + i, k_ + i * width);
      pack_values(chunk + i, v_ + i / kPerElement * head_dim);
    }
  }

  void attend(const Panel* panels, int num_panels, int chunk) {
    for (int p = 0; p < num_panels; ++p) {
      const int end = std::min(chunk + kChunkKeys, panels[p].last() + 1);
      for (int key = chunk; key < end; key += kStepKeys) {
        if (panels[p].attends(key)) step(panels[p], key, std::min(kStepKeys, end - key), chunk);
      }
    }
  }

 private:
  void pack_row(int key, float* k) { prompt_.read(0, key, k); }
  void pack_values(int key, float* v) { prompt_.read(1, key, v); }
  void pack_row(int key, uint32_t* k) {
    for (int i = 0; i < 2; ++i) prompt_.read(0, key + i, reinterpret_cast<Bf16*>(k) + i * prompt_.head_dim);
  }
  void pack_values(int key, uint32_t* v) { prompt_.read_value_pairs(key, v); }

  void step(const Panel& panel, int key, int keys, int chunk) {
    const int head_dim = prompt_.head_dim, width = head_dim / kPerElement, begin = key - chunk;
    keys = round_up(keys, kPerElement);
    product<Math, false>({k_ + begin * width, width, 1}, panel.q, scores_, keys, width);
    if (key + keys - 1 > panel.first) mask_scores<kPanel>(scores_, keys, key, panel.first);
    raise_maxima<kPanel>(scores_, keys, panel.max, panel.sum, panel.out, head_dim, factor_, Math::kSlack);
    weights(Math{}, scores_, keys, panel.max, panel.sum, factor_);
    product<Math, true>({v_ + begin / kPerElement * head_dim, 1, head_dim}, scores_, panel.out, head_dim,
                        keys / kPerElement);
  }

  Prompt<T> prompt_;
  float factor_;
  Element *k_, *v_;
  float* scores_;
};

}  // namespace sparseserve::prefill
