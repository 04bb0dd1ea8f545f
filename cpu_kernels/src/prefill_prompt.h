// Keys and values of one prompt and KV head, token by token, wherever the block table says they lie.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ffi_op.h"

namespace sparseserve::prefill {

template <class T>
struct Prompt {
  const T* pool;
  PoolShape shape;
  const int32_t* table;
  int64_t head;
  int end;  // tokens that exist: from there on rows are zero, whatever the pool holds
  int head_dim;

  // The key (half 0) or value (half 1) of a token, or null.
  const T* row(int half, int token) const {
    if (token >= end) return nullptr;
    const int64_t id = std::clamp<int64_t>(table[token / shape.block_size], 0, shape.num_blocks - 1);
    return pool + shape.offset(id, head) + half * shape.half() + token % shape.block_size * head_dim;
  }

  // Copies a row, converted if the types differ.
  template <class Out>
  void read(int half, int token, Out* out) const {
    const T* from = row(half, token);
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
      const T* from = row(half, token);
      if constexpr (std::is_same_v<T, Out>) {
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
    const T *even = row(1, token), *odd = row(1, token + 1);
    if (even == nullptr) {
      std::memset(out, 0, head_dim * sizeof(uint32_t));
    } else if (odd == nullptr) {
      for (int d = 0; d < head_dim; ++d) out[d] = even[d].bits;
    } else {
      for (int d = 0; d < head_dim; ++d) out[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
    }
  }
};

}  // namespace sparseserve::prefill
