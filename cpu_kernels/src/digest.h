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

template <class D>
inline void store_first(D* to, F32 v, int n) {
  for (int i = 0; i < n; ++i) to[i] = from_float<D>(v[i]);
}

// Writes the digest `[2, width]` of the first n of a block's keys; no key: zeros.
template <class T, class D>
void summarise(const T* keys, int width, int n, DigestMethod method, D* digest) {
  for (int d = 0; d < width; d += kLanes) {
    F32 centre = {}, radius = {};
    const int lanes = width - d < kLanes ? width - d : kLanes;
    if (n > 0 && lanes == kLanes) {
      summarise_lanes([&](int t) { return load(keys + d + static_cast<int64_t>(t) * width); }, n, method, centre,
                      radius);
    } else if (n > 0) {
      summarise_lanes([&](int t) { return load_first(keys + d + static_cast<int64_t>(t) * width, lanes); }, n, method,
                      centre, radius);
    }
    store_first(digest + d, centre, lanes);
    store_first(digest + width + d, radius, lanes);
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

  // Renews the digest of one (block, head); ids that do not exist are dropped.
  template <class T>
  void write(int64_t id, int64_t head, const T* keys, int n, const PoolShape& shape) const {
    if (id < 0 || id >= dim(buffer, 0)) return;
    const int64_t offset = (id * shape.num_heads + head) * 2 * shape.head_dim;
    with_float_type(buffer.element_type(), [&](auto* type) {
      auto* digest = static_cast<decltype(type)>(buffer.untyped_data()) + offset;
      summarise(keys, shape.head_dim, n, method, digest);
    });
  }
};

}  // namespace sparseserve
