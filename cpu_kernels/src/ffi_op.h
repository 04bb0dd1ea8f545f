// What every operation needs to be called by XLA: the handler macro, checks that name what is wrong, element types.
#pragma once

#include <cstdint>
#include <string>

#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace sparseserve {

namespace ffi = xla::ffi;

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

// Exports the handler `symbol` (the name that loader.py registers) of `function`; everything else is hidden, so that
// several libraries in one process never share code that was compiled for different instruction sets.
#define SPARSESERVE_FFI_HANDLER(symbol, function, ...)                                        \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, __VA_ARGS__)

// Returns from an operation with an error that says which condition did not hold.
#define SPARSESERVE_CHECK(condition, message)                                                \
  do {                                                                                       \
    if (!(condition)) return ffi::Error::InvalidArgument(std::string(message) + " (" #condition ")"); \
  } while (false)

// Sizes of a buffer, typed or not.
template <class Buffer>
int64_t dim(const Buffer& buffer, size_t axis) {
  return buffer.dimensions()[axis];
}
template <class Buffer>
size_t rank(const Buffer& buffer) {
  return buffer.dimensions().size();
}
template <class A, class B>
bool same_shape(const A& a, const B& b) {
  if (rank(a) != rank(b)) return false;
  for (size_t axis = 0; axis < rank(a); ++axis) {
    if (dim(a, axis) != dim(b, axis)) return false;
  }
  return true;
}

// bfloat16 pools are carried as their bits (pallas_kernels/storage.py).
inline bool is_bf16(ffi::DataType type) { return type == ffi::DataType::U16 || type == ffi::DataType::BF16; }

// Calls body with a null pointer of the element type; false: neither bfloat16 nor float32.
template <class Body>
bool with_float_type(ffi::DataType type, Body&& body) {
  if (is_bf16(type)) {
    body(static_cast<Bf16*>(nullptr));
  } else if (type == ffi::DataType::F32) {
    body(static_cast<float*>(nullptr));
  } else {
    return false;
  }
  return true;
}

// `n` values as float32, whatever they are.
inline void read_floats(const ffi::AnyBuffer& buffer, int64_t start, int n, float* out) {
  if (is_bf16(buffer.element_type())) {
    const Bf16* p = static_cast<const Bf16*>(buffer.untyped_data()) + start;
    for (int i = 0; i < n; ++i) out[i] = to_float(p[i]);
  } else {
    const float* p = static_cast<const float*>(buffer.untyped_data()) + start;
    for (int i = 0; i < n; ++i) out[i] = p[i];
  }
}

inline bool is_float(const ffi::AnyBuffer& buffer) {
  return is_bf16(buffer.element_type()) || buffer.element_type() == ffi::DataType::F32;
}

// Sizes of a pool `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, K at 0 and V at 1; strides in elements.
struct PoolShape {
  int64_t num_blocks, num_heads;
  int block_size, head_dim;

  explicit PoolShape(const ffi::AnyBuffer& pool)
      : num_blocks(dim(pool, 0)),
        num_heads(dim(pool, 1)),
        block_size(static_cast<int>(dim(pool, 3))),
        head_dim(static_cast<int>(dim(pool, 4))) {}

  int64_t half() const { return static_cast<int64_t>(block_size) * head_dim; }
  int64_t piece() const { return 2 * half(); }
  int64_t block() const { return num_heads * piece(); }
  int64_t offset(int64_t block_id, int64_t head) const { return (block_id * num_heads + head) * piece(); }
  bool holds(int64_t block_id) const { return block_id >= 0 && block_id < num_blocks; }
};

inline bool is_pool(const ffi::AnyBuffer& buffer) { return rank(buffer) == 5 && dim(buffer, 2) == 2; }

}  // namespace sparseserve
