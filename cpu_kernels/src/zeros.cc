// A zeroed array for a KV pool, in huge pages where the operating system has them.
//
// Blocks are read in an order that no page table walk can foresee; with pages of 4 KiB every block costs several. Linux
// gives huge pages to memory that asks for them before it is touched first, which is here.
#include "ffi_op.h"
#include "parallel.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sparseserve {
namespace {

constexpr int64_t kHugePage = 2 << 20;

void ask_for_huge_pages(char* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t mask = kHugePage - 1, first = (reinterpret_cast<uintptr_t>(start) + mask) & ~mask;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) & ~mask;
  // Advice: where it is not taken, pages stay small.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

ffi::Error zeros(ffi::ThreadPool threads, ffi::Result<ffi::AnyBuffer> out) {
  char* start = static_cast<char*>(out->untyped_data());
  const int64_t bytes = out->size_bytes();
  ask_for_huge_pages(start, bytes);
  parallel_for(threads, (bytes + kHugePage - 1) / kHugePage, [&](int64_t page) {
    std::memset(start + page * kHugePage, 0, std::min(kHugePage, bytes - page * kHugePage));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeZeros, sparseserve::zeros,
                        xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Ret<xla::ffi::AnyBuffer>());
