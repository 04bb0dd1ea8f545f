// What prefill attention and the selection of its key tiles ask of the arguments that they share.
#pragma once

#include <string>

#include "ffi_op.h"
#include "prefill_panels.h"

namespace sparseserve::prefill {

inline bool is_int8(const ffi::AnyBuffer& pool) { return pool.element_type() == ffi::DataType::S8; }

// Queries in tiles, the pool that they attend to, and where the tiles belong. Errors begin with `name`.
inline ffi::Error check_prompts(const std::string& name, const ffi::AnyBuffer& q, const ffi::AnyBuffer& pool,
                                const Ints& tables, const Ints& tile_prompt, const Ints& tile_start,
                                const Ints& tile_tokens, const Floats& kv_scales) {
  SPARSESERVE_CHECK(rank(q) == 3 && is_pool(pool), name + ": wrong ranks");
  const PoolShape shape(pool);
  const int64_t num_tiles = dim(tile_start, 0);
  SPARSESERVE_CHECK(dim(q, 0) == num_tiles * kTile, name + ": queries are not tiles of 128 tokens");
  SPARSESERVE_CHECK(dim(q, 2) == shape.head_dim && dim(q, 1) % shape.num_heads == 0, name + ": wrong heads");
  SPARSESERVE_CHECK(is_float(pool) || is_int8(pool), name + ": pools are bfloat16, float32 or int8");
  SPARSESERVE_CHECK(is_float(q) && is_bf16(q.element_type()) == (is_int8(pool) || is_bf16(pool.element_type())),
                    name + ": q is not as the pool, or not bfloat16 for an int8 pool");
  const int64_t num_scales = kv_scales.element_count();
  SPARSESERVE_CHECK(num_scales == (is_int8(pool) ? shape.num_blocks * shape.num_heads * 2 : 0),
                    name + ": kv_scales is [num_blocks, num_kv_heads, 2], for an int8 pool only");
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t start = tile_start.typed_data()[i], tokens = tile_tokens.typed_data()[i];
    const int64_t prompt = tile_prompt.typed_data()[i];
    if (tokens == 0) continue;
    SPARSESERVE_CHECK(prompt >= 0 && prompt < dim(tables, 0), name + ": tile of a prompt that is not there");
    SPARSESERVE_CHECK(start >= 0 && tokens > 0 && tokens <= kTile &&
                          start + tokens <= dim(tables, 1) * shape.block_size,
                      name + ": tile past its block table");
  }
  return ffi::Error::Success();
}

}  // namespace sparseserve::prefill
