// Writes whole blocks (prefill) into the pool and renews their digests.
#include "digest.h"
#include "parallel.h"
#include "quantise.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 4;  // blocks

template <class T>
void append(ffi::ThreadPool& threads, const T* blocks, const Ints& block_ids, const Ints& num_valid,
            const Ints& digest_ids, const PoolShape& shape, T* pool, const Digests& digests) {
  parallel_for(threads, block_ids.element_count(), kGrain, [&](int64_t index) {
    const int64_t id = block_ids.typed_data()[index];
    const T* block = blocks + index * shape.block();
    // The null block, where padding points, is never read: nothing to write.
    if (id != 0 && shape.holds(id)) std::memcpy(pool + shape.offset(id, 0), block, shape.block() * sizeof(T));
    if (digests.none()) return;
    const int n = std::min(num_valid.typed_data()[index], shape.block_size);
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      digests.write(digest_ids.typed_data()[index], head, block + head * shape.piece(), n, shape);
    }
  });
}

// The same of an int8 pool. Scales are those of the tokens that exist; the rest of a block becomes zero.
template <class T>
void append_quantised(ffi::ThreadPool& threads, const T* blocks, const Ints& block_ids, const Ints& num_valid,
                      const Ints& digest_ids, const PoolShape& shape, int8_t* pool, const Scales& scales,
                      const Digests& digests) {
  parallel_for(threads, block_ids.element_count(), kGrain, [&](int64_t index) {
    const int64_t id = block_ids.typed_data()[index];
    const bool exists = id != 0 && shape.holds(id);
    const int n = exists ? std::clamp(num_valid.typed_data()[index], 0, shape.block_size) : 0;
    const int64_t size = static_cast<int64_t>(n) * shape.head_dim;
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      const T* piece = blocks + index * shape.block() + head * shape.piece();
      int8_t* to = exists ? pool + shape.offset(id, head) : nullptr;
      for (int half = 0; half < 2 && exists; ++half) {
        float& scale = scales.of(id, head)[half];
        scale = scale_of(piece + half * shape.half(), size);
        quantise(piece + half * shape.half(), size, scale, to + half * shape.half());
        std::memset(to + half * shape.half() + size, 0, shape.half() - size);
      }
      if (digests.none()) continue;
      digests.write(digest_ids.typed_data()[index], head, to, n, shape, exists ? *scales.of(id, head) : 0.0f);
    }
  });
}

ffi::Error append_blocks(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::AnyBuffer digests,
                         ffi::AnyBuffer kv_scales, ffi::AnyBuffer blocks, Ints block_ids, Ints num_valid,
                         Ints digest_ids, ffi::Result<ffi::AnyBuffer> new_pool,
                         ffi::Result<ffi::AnyBuffer> new_digests, ffi::Result<ffi::AnyBuffer> new_scales,
                         int32_t method) {
  SPARSESERVE_CHECK(is_pool(pool) && is_pool(blocks), "pools are [num_blocks, num_kv_heads, 2, block_size, head_dim]");
  const PoolShape shape(pool);
  const Digests renewed{*new_digests, static_cast<DigestMethod>(method)};
  SPARSESERVE_CHECK(new_pool->untyped_data() == pool.untyped_data(), "the pool is updated in place");
  SPARSESERVE_CHECK(renewed.none() || new_digests->untyped_data() == digests.untyped_data(),
                    "digests are updated in place");
  SPARSESERVE_CHECK(renewed.fit(shape), "digests are [num_digests, num_kv_heads, 2, head_dim], bfloat16 or float32");
  const Scales scales{*new_scales};
  const bool quantised = pool.element_type() == ffi::DataType::S8;
  SPARSESERVE_CHECK(scales.fit(pool), "kv_scales is [num_blocks, num_kv_heads, 2], for an int8 pool only");
  SPARSESERVE_CHECK(!quantised || new_scales->untyped_data() == kv_scales.untyped_data(),
                    "scales are updated in place");
  SPARSESERVE_CHECK((quantised || blocks.element_type() == pool.element_type()) &&
                        PoolShape(blocks).block() == shape.block() && PoolShape(blocks).piece() == shape.piece() &&
                        dim(blocks, 4) == shape.head_dim,
                    "blocks are shaped and stored as the pool's, or floats for an int8 pool");
  SPARSESERVE_CHECK(dim(blocks, 0) == dim(block_ids, 0) && dim(blocks, 0) == dim(num_valid, 0) &&
                        dim(blocks, 0) == dim(digest_ids, 0),
                    "block_ids, num_valid and digest_ids are [num_new]");
  SPARSESERVE_CHECK(with_float_type(blocks.element_type(), [&](auto* type) {
    using Data = decltype(type);
    if (quantised) {
      return append_quantised(threads, static_cast<Data>(blocks.untyped_data()), block_ids, num_valid, digest_ids,
                              shape, static_cast<int8_t*>(new_pool->untyped_data()), scales, renewed);
    }
    append(threads, static_cast<Data>(blocks.untyped_data()), block_ids, num_valid, digest_ids, shape,
           static_cast<Data>(new_pool->untyped_data()), renewed);
  }), "blocks are bfloat16 (or its bits) or float32");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeAppendBlocks, sparseserve::append_blocks,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
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
