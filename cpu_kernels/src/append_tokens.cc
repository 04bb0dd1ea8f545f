// Appends one token a sequence (decode) to its newest block and renews that block's digest from its keys.
#include <vector>

#include "digest.h"
#include "parallel.h"
#include "quantise.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 16;  // (sequence, head) pairs, some tenths of a microsecond each

template <class T>
void write_row(const ffi::AnyBuffer& from, int64_t start, int width, T* to) {
  if (is_bf16(from.element_type()) && sizeof(T) == sizeof(Bf16)) {
    std::memcpy(to, static_cast<const Bf16*>(from.untyped_data()) + start, width * sizeof(T));
  } else if (is_bf16(from.element_type())) {
    const Bf16* p = static_cast<const Bf16*>(from.untyped_data()) + start;
    for (int d = 0; d < width; ++d) to[d] = from_float<T>(to_float(p[d]));
  } else {
    const float* p = static_cast<const float*>(from.untyped_data()) + start;
    for (int d = 0; d < width; ++d) to[d] = from_float<T>(p[d]);
  }
}

template <class T>
void append(ffi::ThreadPool& threads, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Ints& block_ids,
            const Ints& num_valid, const Ints& digest_ids, const PoolShape& shape, T* pool, const Digests& digests) {
  const int width = shape.head_dim;
  parallel_for(threads, dim(k, 0) * shape.num_heads, kGrain, [&](int64_t lane) {
    const int64_t seq = lane / shape.num_heads, head = lane % shape.num_heads;
    const int64_t id = block_ids.typed_data()[lane];
    const int n = std::min(num_valid.typed_data()[seq], shape.block_size);
    T* keys = nullptr;
    if (n > 0 && shape.holds(id)) {
      keys = pool + shape.offset(id, head);
      T* to = keys + static_cast<int64_t>(n - 1) * width;
      write_row(k, lane * width, width, to);
      write_row(v, lane * width, width, to + shape.half());
    }
    // Padding has no token: its digest, the null block's, is zero.
    if (!digests.none()) digests.write(digest_ids.typed_data()[seq], head, keys, keys ? n : 0, shape);
  });
}

// Writes a row behind `count` older ones. If it has a larger magnitude than these, they are brought to its scale.
void append_quantised_row(const float* row, int width, int count, int8_t* rows, float& scale) {
  const float older = count > 0 ? scale : 0.0f;
  const int64_t size = static_cast<int64_t>(count) * width;
  scale = std::max(older, scale_of(row, width));
  if (scale > older) requantise(rows, size, older, scale);
  quantise(row, width, scale, rows + size);
}

// The same of an int8 pool.
void append_quantised(ffi::ThreadPool& threads, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Ints& block_ids,
                      const Ints& num_valid, const Ints& digest_ids, const PoolShape& shape, int8_t* pool,
                      const Scales& scales, const Digests& digests) {
  const int width = shape.head_dim;
  parallel_for(threads, dim(k, 0) * shape.num_heads, kGrain, [&](int64_t lane) {
    const int64_t seq = lane / shape.num_heads, head = lane % shape.num_heads;
    const int64_t id = block_ids.typed_data()[lane];
    const int n = std::min(num_valid.typed_data()[seq], shape.block_size);
    const bool exists = n > 0 && shape.holds(id);
    int8_t* keys = exists ? pool + shape.offset(id, head) : nullptr;
    if (exists) {
      static thread_local std::vector<float> row;
      row.resize(width);
      read_floats(k, lane * width, width, row.data());
      append_quantised_row(row.data(), width, n - 1, keys, scales.of(id, head)[0]);
      read_floats(v, lane * width, width, row.data());
      append_quantised_row(row.data(), width, n - 1, keys + shape.half(), scales.of(id, head)[1]);
    }
    if (digests.none()) return;
    digests.write(digest_ids.typed_data()[seq], head, keys, exists ? n : 0, shape,
                  exists ? *scales.of(id, head) : 0.0f);
  });
}

ffi::Error append_tokens(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::AnyBuffer digests,
                         ffi::AnyBuffer kv_scales, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints block_ids, Ints num_valid,
                         Ints digest_ids, ffi::Result<ffi::AnyBuffer> new_pool,
                         ffi::Result<ffi::AnyBuffer> new_digests, ffi::Result<ffi::AnyBuffer> new_scales,
                         int32_t method) {
  SPARSESERVE_CHECK(is_pool(pool), "pool is [num_blocks, num_kv_heads, 2, block_size, head_dim]");
  const PoolShape shape(pool);
  const Digests renewed{*new_digests, static_cast<DigestMethod>(method)};
  SPARSESERVE_CHECK(new_pool->untyped_data() == pool.untyped_data(), "the pool is updated in place");
  SPARSESERVE_CHECK(renewed.none() || new_digests->untyped_data() == digests.untyped_data(),
                    "digests are updated in place");
  SPARSESERVE_CHECK(renewed.fit(shape), "digests are [num_digests, num_kv_heads, 2, head_dim], bfloat16 or float32");
  SPARSESERVE_CHECK(rank(k) == 3 && dim(k, 1) == shape.num_heads && dim(k, 2) == shape.head_dim && is_float(k) &&
                        same_shape(k, v) && is_float(v),
                    "k and v are [num_seqs, num_kv_heads, head_dim], bfloat16 or float32");
  SPARSESERVE_CHECK(rank(block_ids) == 2 && dim(block_ids, 0) == dim(k, 0) && dim(block_ids, 1) == shape.num_heads,
                    "block_ids is [num_seqs, num_kv_heads]");
  SPARSESERVE_CHECK(dim(num_valid, 0) == dim(k, 0) && dim(digest_ids, 0) == dim(k, 0),
                    "num_valid and digest_ids are [num_seqs]");
  const Scales scales{*new_scales};
  SPARSESERVE_CHECK(scales.fit(pool), "kv_scales is [num_blocks, num_kv_heads, 2], for an int8 pool only");
  if (pool.element_type() == ffi::DataType::S8) {
    SPARSESERVE_CHECK(new_scales->untyped_data() == kv_scales.untyped_data(), "scales are updated in place");
    append_quantised(threads, k, v, block_ids, num_valid, digest_ids, shape,
                     static_cast<int8_t*>(new_pool->untyped_data()), scales, renewed);
    return ffi::Error::Success();
  }
  SPARSESERVE_CHECK(with_float_type(pool.element_type(), [&](auto* type) {
    auto* data = static_cast<decltype(type)>(new_pool->untyped_data());
    append(threads, k, v, block_ids, num_valid, digest_ids, shape, data, renewed);
  }), "the pool is bfloat16 (or its bits), float32 or int8");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeAppendTokens, sparseserve::append_tokens,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Ret<xla::ffi::AnyBuffer>()
                            .Attr<int32_t>("method"));
