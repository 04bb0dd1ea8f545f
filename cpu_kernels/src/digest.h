// Summaries (centre, radius) of the keys of a block: see pallas_kernels/reference.py, block_digests.
#pragma once

#include "ffi_op.h"

namespace sparseserve {

enum class DigestMethod : int32_t { kCuboidMean = 0, kQuest = 1, kMean = 2 };

// kLanes dimensions of n >= 1 keys that lie `stride` apart. `row(t)` loads the dimensions of key t.
template <class Row>
inline void summarise_lanes(Row&& row, int n, DigestMethod method, F32& centre, F32& radius) {
  const F32 count = splat(static_cast<float>(n));
  if (method == DigestMethod::kMean) {
    F32 sum = {};
    for (int t = 0; t < n; ++t) sum += row(t);
    centre = sum / count;
    radius = F32{};
    return;
  }
  F32 most = row(0), least = most;
  for (int t = 1; t < n; ++t) {
    const F32 key = row(t);
    most = max(most, key);
    least = min(least, key);
  }
  centre = (most + least) * 0.5f;
  if (method == DigestMethod::kQuest) {
    radius = (most - least) * 0.5f;
    return;
  }
  F32 sum = {};
  for (int t = 0; t < n; ++t) sum += abs(row(t) - centre);
  radius = sum / count;
}

// Writes the digest `[2, width]` of the first n of a block's keys; no key: zeros. Keys are what is stored times `scale`
// (1 unless the pool is int8).
template <class T, class D>
void summarise(const T* keys, int width, int n, float scale, DigestMethod method, D* digest) {
  constexpr int kVectors = Steps<T>::kVectors, kSize = Steps<T>::kSize;
  for (int d = 0; d < width; d += kSize) {
    const int dims = width - d < kSize ? width - d : kSize;
    float summary[2][kSize] = {};
    for (int c = 0; c < kVectors && n > 0; ++c) {
      F32 centre, radius;
      const auto row = [&](int t) {
        F32 x[kVectors];
        const T* key = keys + d + static_cast<int64_t>(t) * width;
        if (dims == kSize) {
          Steps<T>::load(key, x);
        } else {
          load_first(key, dims, x);
        }
        return x[c];
      };
      summarise_lanes(row, n, method, centre, radius);
      store(summary[0] + c * kLanes, centre * scale);
      store(summary[1] + c * kLanes, radius * scale);
    }
    for (int i = 0; i < dims; ++i) {
      digest[d + i] = from_float<D>(summary[0][Steps<T>::place(i)]);
      digest[width + d + i] = from_float<D>(summary[1][Steps<T>::place(i)]);
    }
  }
}

// The digests of a layer, `[num_digests, num_kv_heads, 2, head_dim]`, or none of them: a dense layer.
struct Digests {
  ffi::AnyBuffer buffer;
  DigestMethod method;

  bool none() const { return dim(buffer, 0) == 0; }
  bool fit(const PoolShape& shape) const {
    return rank(buffer) == 4 && dim(buffer, 1) == shape.num_heads && dim(buffer, 2) == 2 &&
           dim(buffer, 3) == shape.head_dim && is_float(buffer);
  }

  // Renews the digest of one (block, head); ids that do not exist are dropped. `scale`: see `summarise`.
  template <class T>
  void write(int64_t id, int64_t head, const T* keys, int n, const PoolShape& shape, float scale = 1.0f) const {
    if (id < 0 || id >= dim(buffer, 0)) return;
    const int64_t offset = (id * shape.num_heads + head) * 2 * shape.head_dim;
    with_float_type(buffer.element_type(), [&](auto* type) {
      auto* digest = static_cast<decltype(type)>(buffer.untyped_data()) + offset;
      summarise(keys, shape.head_dim, n, scale, method, digest);
    });
  }
};

}  // namespace sparseserve
