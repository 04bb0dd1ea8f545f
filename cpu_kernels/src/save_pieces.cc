// Saves blocks whose heads lie in different device slots (FlashD2H while decoding).
#include "pieces.h"

namespace sparseserve {
namespace {

ffi::Error save_pieces(ffi::ThreadPool threads, ffi::AnyBuffer host_pool, ffi::AnyBuffer device_pool, Ints slot_ids,
                       Ints block_ids, ffi::Result<ffi::AnyBuffer> out) {
  SPARSESERVE_CHECK(same_blocks(host_pool, device_pool), "both pools have blocks of one shape and dtype");
  SPARSESERVE_CHECK(out->untyped_data() == host_pool.untyped_data(), "the host pool is updated in place");
  SPARSESERVE_CHECK(rank(slot_ids) == 2 && dim(slot_ids, 0) == dim(block_ids, 0) &&
                        dim(slot_ids, 1) == dim(host_pool, 1),
                    "slot_ids is [num_saved, num_kv_heads], block_ids [num_saved]");
  const int64_t num_heads = dim(host_pool, 1);
  return copy_pieces(threads, slot_ids.element_count(), device_pool, *out, [&](int64_t i) {
    return Copy{block_ids.typed_data()[i / num_heads], slot_ids.typed_data()[i], i % num_heads};
  });
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeSavePieces, sparseserve::save_pieces,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Ret<xla::ffi::AnyBuffer>());
