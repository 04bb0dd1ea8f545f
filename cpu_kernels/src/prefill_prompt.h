// Keys and values of one prompt and KV head, token by token, wherever the block table says they lie.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ffi_op.h"

namespace sparseserve::prefill {

template <class T>
struct Prompt {
  const void* pool;  // of T, or of int8 with `scales`: its rows are converted to T as they are read
  PoolShape shape;
  const int32_t* table;
  int64_t head;
  int end;  // tokens that exist: from there on rows are zero, whatever the pool holds
  int head_dim;
  const float* scales = nullptr;  // [num_blocks, num_kv_heads, 2]

  int64_t block(int token) const {
    return std::clamp<int64_t>(table[token / shape.block_size], 0, shape.num_blocks - 1);
  }

  // The key (half 0) or value (half 1) of a token, or null.
  template <class Stored>
  const Stored* row(int half, int token) const {
    if (token >= end) return nullptr;
    return static_cast<const Stored*>(pool) + shape.offset(block(token), head) + half * shape.half() +
           token % shape.block_size * head_dim;
  }

  // Copies a row, converted if the types differ.
  template <class Out>
  void read(int half, int token, Out* out) const {
    if (scales != nullptr) return read_int8(half, token, out);
    const T* from = row<T>(half, token);
    if (from == nullptr) {
      std::memset(out, 0, head_dim * sizeof(Out));
    } else if constexpr (std::is_same_v<T, Out>) {
      std::memcpy(out, from, head_dim * sizeof(Out));
    } else {
      for (int d = 0; d < head_dim; ++d) out[d] = to_float(from[d]);
    }
  }

  // Rows of `count` tokens, block by block.
  template <class Out>
  void read(int half, int token, int count, Out* out) const {
    while (count > 0) {
      const int run = std::min(count, shape.block_size - token % shape.block_size);
      const int64_t size = static_cast<int64_t>(std::clamp(end - token, 0, run)) * head_dim;
      const T* from = scales == nullptr ? row<T>(half, token) : nullptr;
      if (scales != nullptr) {
        for (int i = 0; i * head_dim < size; ++i) read_int8(half, token + i, out + static_cast<int64_t>(i) * head_dim);
      } else if constexpr (std::is_same_v<T, Out>) {
        if (size > 0) std::memcpy(out, from, size * sizeof(Out));
      } else {
        for (int64_t i = 0; i < size; ++i) out[i] = to_float(from[i]);
      }
      std::fill(out + size, out + static_cast<int64_t>(run) * head_dim, Out{});
      out += static_cast<int64_t>(run) * head_dim;
      token += run;
      count -= run;
    }
  }

  // The values of tokens `token` and `token + 1` as pairs, the first in the lower half.
  void read_value_pairs(int token, uint32_t* out) const {
    if (scales != nullptr) return read_int8_pairs(token, out);
    const T *even = row<T>(1, token), *odd = row<T>(1, token + 1);
    if (even == nullptr) {
      std::memset(out, 0, head_dim * sizeof(uint32_t));
    } else if (odd == nullptr) {
      for (int d = 0; d < head_dim; ++d) out[d] = even[d].bits;
    } else {
      for (int d = 0; d < head_dim; ++d) out[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
    }
  }

  // What the int8 values of a token's key or value are multiplied by.
  float scale(int half, int token) const { return scales[(block(token) * shape.num_heads + head) * 2 + half]; }

 private:
  template <class Out>
  void read_int8(int half, int token, Out* out) const {
    const int8_t* from = row<int8_t>(half, token);
    if (from == nullptr) {
      std::memset(out, 0, head_dim * sizeof(Out));
    } else {
      const float by = scale(half, token);
      for (int d = 0; d < head_dim; ++d) out[d] = from_float<Out>(to_float(from[d]) * by);
    }
  }

  void read_int8_pairs(int token, uint32_t* out) const {
    const int8_t *even = row<int8_t>(1, token), *odd = row<int8_t>(1, token + 1);
    if (even == nullptr) {
      std::memset(out, 0, head_dim * sizeof(uint32_t));
      return;
    }
    const float by = scale(1, token);
    for (int d = 0; d < head_dim; ++d) out[d] = to_bf16(to_float(even[d]) * by).bits;
    if (odd == nullptr) return;
    const float odd_by = scale(1, token + 1);
    for (int d = 0; d < head_dim; ++d) out[d] |= static_cast<uint32_t>(to_bf16(to_float(odd[d]) * odd_by).bits) << 16;
  }
};

}  // namespace sparseserve::prefill
