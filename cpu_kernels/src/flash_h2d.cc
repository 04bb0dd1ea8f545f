// FlashH2D: the pieces that a layer misses, from the host pool into device slots.
#include <vector>

#include "pieces.h"

namespace sparseserve {
namespace {

// Listed first, then copied in even shares: often a few sequences miss most.
std::vector<int64_t> entries_missing(const ffi::Buffer<ffi::PRED>& missing) {
  std::vector<int64_t> entries;
  const bool* flags = missing.typed_data();
  const int64_t count = missing.element_count();
  for (int64_t i = 0; i < count; ++i) {
    if (flags[i]) entries.push_back(i);
  }
  return entries;
}

ffi::Error flash_h2d(ffi::ThreadPool threads, ffi::AnyBuffer device_pool, ffi::AnyBuffer host_pool, Ints slot_ids,
                     Ints block_ids, ffi::Buffer<ffi::PRED> missing, ffi::Result<ffi::AnyBuffer> out) {
  SPARSESERVE_CHECK(same_blocks(device_pool, host_pool), "both pools have blocks of one shape and dtype");
  SPARSESERVE_CHECK(out->untyped_data() == device_pool.untyped_data(), "the device pool is updated in place");
  SPARSESERVE_CHECK(rank(slot_ids) == 3 && dim(slot_ids, 1) == dim(device_pool, 1) && same_shape(slot_ids, block_ids) &&
                        same_shape(slot_ids, missing),
                    "slot_ids, block_ids and missing are [num_seqs, num_kv_heads, num_selected]");
  const std::vector<int64_t> entries = entries_missing(missing);
  return copy_pieces(threads, entries.size(), host_pool, *out, [&](int64_t index) {
    const int64_t entry = entries[index];
    return Copy{slot_ids.typed_data()[entry], block_ids.typed_data()[entry],
                entry / dim(slot_ids, 2) % dim(slot_ids, 1)};
  });
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeFlashH2D, sparseserve::flash_h2d,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Ret<xla::ffi::AnyBuffer>());
