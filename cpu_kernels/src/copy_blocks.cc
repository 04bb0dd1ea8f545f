// Whole blocks from one pool to another: loading a resumed request's blocks, saving those of a prefill (FlashD2H).
#include "pieces.h"

namespace sparseserve {
namespace {

// `from_ids` may be empty: then the i-th block of `from` is copied.
ffi::Error copy_blocks(ffi::ThreadPool threads, ffi::AnyBuffer to, ffi::AnyBuffer from, Ints to_ids, Ints from_ids,
                       ffi::Result<ffi::AnyBuffer> out) {
  SPARSESERVE_CHECK(same_blocks(to, from), "both pools have blocks of one shape and dtype");
  SPARSESERVE_CHECK(out->untyped_data() == to.untyped_data(), "the pool is updated in place");
  const int64_t count = to_ids.element_count(), num_from = from_ids.element_count(), num_heads = dim(to, 1);
  SPARSESERVE_CHECK(num_from == count || (num_from == 0 && dim(from, 0) == count), "as many blocks come as go");
  return copy_pieces(threads, count * num_heads, from, *out, [&](int64_t i) {
    const int64_t index = i / num_heads;
    return Copy{to_ids.typed_data()[index], num_from ? from_ids.typed_data()[index] : index, i % num_heads};
  });
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeCopyBlocks, sparseserve::copy_blocks,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Ret<xla::ffi::AnyBuffer>());
