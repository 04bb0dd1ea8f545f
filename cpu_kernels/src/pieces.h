// Copies between pools of the same layout. On the CPU both tiers are the same memory, so a transfer is a memcpy.
#pragma once

#include <atomic>

#include "ffi_op.h"
#include "parallel.h"

namespace sparseserve {

// Pools that blocks can be copied between.
inline bool same_blocks(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  if (!is_pool(a) || !is_pool(b) || a.element_type() != b.element_type()) return false;
  for (size_t axis = 1; axis < 5; ++axis) {
    if (dim(a, axis) != dim(b, axis)) return false;
  }
  return true;
}

struct Copy {
  int64_t to, from, head;  // block ids, and the KV head of both
};

constexpr int64_t kPiecesAtOnce = 8;

// Copies (block, head) pieces; `copy_of(i)` is the i-th. Block 0 is the null block, where padding goes: nothing is
// written there. An id outside its pool is an error.
template <class CopyOf>
ffi::Error copy_pieces(ffi::ThreadPool& threads, int64_t num_pieces, const ffi::AnyBuffer& from_pool,
                       const ffi::AnyBuffer& to_pool, CopyOf&& copy_of) {
  const PoolShape from(from_pool), to(to_pool);
  const int64_t bytes = from.piece() * ffi::ByteWidth(from_pool.element_type());
  const char* source = static_cast<const char*>(from_pool.untyped_data());
  char* target = static_cast<char*>(to_pool.untyped_data());
  std::atomic<bool> outside{false};
  parallel_for(threads, num_pieces, kPiecesAtOnce, [&](int64_t i) {
    const Copy copy = copy_of(i);
    if (copy.to == 0) return;
    if (!to.holds(copy.to) || !from.holds(copy.from)) {
      outside = true;
      return;
    }
    std::memcpy(target + (copy.to * to.num_heads + copy.head) * bytes,
                source + (copy.from * from.num_heads + copy.head) * bytes, bytes);
  });
  if (outside) return ffi::Error::InvalidArgument("a block id lies outside its pool");
  return ffi::Error::Success();
}

}  // namespace sparseserve
