// What a layer does beside products and attention: RMS norm, rotary embedding, keys and values as KV blocks. Each reads
// its input once and writes its result once.
#include <cmath>

#include "ffi_op.h"
#include "parallel.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 16 * 1024;  // elements that one thread takes at least

int64_t rows_at_a_time(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

// --- norm ------------------------------------------------------------------------------------------------------------

template <class T>
void normalise(const float* x, const float* scale, int64_t n, float eps, T* out) {
  F32 sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int c = 0; c < 4; ++c) {
      const F32 v = load(x + i + c * kLanes);
      sums[c] += v * v;
    }
  }
  float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int64_t rest = i; rest < n; ++rest) sum += x[rest] * x[rest];
  const float factor = 1.0f / std::sqrt(sum / n + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * factor * load(scale + i));
  for (; i < n; ++i) out[i] = from_float<T>(x[i] * factor * scale[i]);
}

ffi::Error rms_norm(ffi::ThreadPool threads, Floats x, Floats scale, ffi::Result<ffi::AnyBuffer> out, float eps) {
  SPARSESERVE_CHECK(rank(x) == 2 && scale.element_count() == static_cast<size_t>(dim(x, 1)),
                    "rms_norm: x is [num_tokens, features], scale [features]");
  SPARSESERVE_CHECK(out->element_count() == x.element_count(), "rms_norm: the result is shaped as x");
  const int64_t n = dim(x, 1);
  const bool known = with_float_type(out->element_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* to = static_cast<T*>(out->untyped_data());
    parallel_for(threads, dim(x, 0), rows_at_a_time(n), [&](int64_t row) {
      normalise(x.typed_data() + row * n, scale.typed_data(), n, eps, to + row * n);
    });
  });
  SPARSESERVE_CHECK(known, "rms_norm: results are bfloat16 or float32");
  return ffi::Error::Success();
}

// --- rotary embedding ------------------------------------------------------------------------------------------------

// One head: [a, b] becomes [a cos - b sin, b cos + a sin].
template <class T>
void rotate(const float* x, const float* cos, const float* sin, int head_dim, T* out) {
  const int half = head_dim / 2;
  const float *a = x, *b = x + half;
  int d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    store(out + d, load(a + d) * load(cos + d) - load(b + d) * load(sin + d));
    store(out + half + d, load(b + d) * load(cos + half + d) + load(a + d) * load(sin + half + d));
  }
  for (; d < half; ++d) {
    out[d] = from_float<T>(a[d] * cos[d] - b[d] * sin[d]);
    out[half + d] = from_float<T>(b[d] * cos[half + d] + a[d] * sin[half + d]);
  }
}

template <class T>
void round_row(const float* x, int n, T* out) {
  int d = 0;
  for (; d + kLanes <= n; d += kLanes) store(out + d, load(x + d));
  for (; d < n; ++d) out[d] = from_float<T>(x[d]);
}

ffi::Error split_and_rotate(ffi::ThreadPool threads, Floats qkv, Floats cos, Floats sin, ffi::Result<ffi::AnyBuffer> q,
                            ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v) {
  SPARSESERVE_CHECK(rank(*q) == 3 && rank(*k) == 3 && same_shape(*k, *v) && rank(qkv) == 2,
                    "split_and_rotate: qkv is [num_tokens, width], results are [num_tokens, heads, head_dim]");
  const int64_t num_tokens = dim(*q, 0), q_heads = dim(*q, 1), kv_heads = dim(*k, 1);
  const int head_dim = static_cast<int>(dim(*q, 2));
  const int64_t width = (q_heads + 2 * kv_heads) * head_dim;
  SPARSESERVE_CHECK(dim(qkv, 0) == num_tokens && dim(qkv, 1) == width && dim(*k, 0) == num_tokens &&
                        dim(*k, 2) == head_dim,
                    "split_and_rotate: qkv is as wide as all heads");
  SPARSESERVE_CHECK(same_shape(cos, sin) && rank(cos) == 2 && dim(cos, 0) == num_tokens && dim(cos, 1) == head_dim &&
                        head_dim % 2 == 0,
                    "split_and_rotate: cos and sin are [num_tokens, head_dim], head_dim is even");
  SPARSESERVE_CHECK(k->element_type() == q->element_type() && v->element_type() == q->element_type(),
                    "split_and_rotate: results are of one type");
  const bool known = with_float_type(q->element_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* const outs[3] = {static_cast<T*>(q->untyped_data()), static_cast<T*>(k->untyped_data()),
                        static_cast<T*>(v->untyped_data())};
    parallel_for(threads, num_tokens, rows_at_a_time(width), [&](int64_t token) {
      const float* x = qkv.typed_data() + token * width;
      const float *c = cos.typed_data() + token * head_dim, *s = sin.typed_data() + token * head_dim;
      T* to = outs[0] + token * q_heads * head_dim;
      for (int64_t head = 0; head < q_heads; ++head, x += head_dim, to += head_dim) rotate(x, c, s, head_dim, to);
      to = outs[1] + token * kv_heads * head_dim;
      for (int64_t head = 0; head < kv_heads; ++head, x += head_dim, to += head_dim) rotate(x, c, s, head_dim, to);
      round_row(x, static_cast<int>(kv_heads) * head_dim, outs[2] + token * kv_heads * head_dim);
    });
  });
  SPARSESERVE_CHECK(known, "split_and_rotate: results are bfloat16 or float32");
  return ffi::Error::Success();
}

// --- blocks ----------------------------------------------------------------------------------------------------------

ffi::Error make_blocks(ffi::ThreadPool threads, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints block_tokens,
                       ffi::Result<ffi::AnyBuffer> blocks) {
  SPARSESERVE_CHECK(is_pool(*blocks) && rank(k) == 3 && same_shape(k, v) && k.element_type() == v.element_type() &&
                        blocks->element_type() == k.element_type(),
                    "make_blocks: k and v are [num_tokens, num_kv_heads, head_dim], all of one type");
  const PoolShape shape(*blocks);
  SPARSESERVE_CHECK(dim(k, 0) == shape.num_blocks * shape.block_size && dim(k, 1) == shape.num_heads &&
                        dim(k, 2) == shape.head_dim &&
                        block_tokens.element_count() == static_cast<size_t>(shape.num_blocks),
                    "make_blocks: tokens fill the blocks");
  const int64_t row = shape.head_dim * ffi::ByteWidth(k.element_type());  // bytes
  const char* const from[2] = {static_cast<const char*>(k.untyped_data()), static_cast<const char*>(v.untyped_data())};
  char* to = static_cast<char*>(blocks->untyped_data());
  parallel_for(threads, shape.num_blocks, rows_at_a_time(shape.block()), [&](int64_t block) {
    const int n = std::clamp(block_tokens.typed_data()[block], 0, shape.block_size);
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      for (int half = 0; half < 2; ++half) {
        char* rows = to + ((block * shape.num_heads + head) * 2 + half) * shape.block_size * row;
        for (int t = 0; t < n; ++t) {
          const int64_t token = block * shape.block_size + t;
          std::memcpy(rows + t * row, from[half] + (token * shape.num_heads + head) * row, row);
        }
        std::memset(rows + n * row, 0, (shape.block_size - n) * row);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeRmsNorm, sparseserve::rms_norm,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<sparseserve::Floats>()
                            .Arg<sparseserve::Floats>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Attr<float>("eps"));
SPARSESERVE_FFI_HANDLER(SparseServeSplitAndRotate, sparseserve::split_and_rotate,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<sparseserve::Floats>()
                            .Arg<sparseserve::Floats>()
                            .Arg<sparseserve::Floats>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Ret<xla::ffi::AnyBuffer>());
SPARSESERVE_FFI_HANDLER(SparseServeMakeBlocks, sparseserve::make_blocks,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Ret<xla::ffi::AnyBuffer>());
