// Selections of the query heads of a group as one ascending list, and which of it each head chose.
#include <vector>

#include "ffi_op.h"
#include "parallel.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 8;  // groups

struct Sizes {
  int64_t group, num_selected, max_blocks, num_union;
};

void unite(const Sizes& sizes, const int32_t* selected, int32_t* ids, bool* mask) {
  static thread_local std::vector<uint8_t> chosen;  // [group, max_blocks]
  chosen.assign(sizes.group * sizes.max_blocks, 0);
  for (int64_t g = 0; g < sizes.group; ++g) {
    for (int64_t i = 0; i < sizes.num_selected; ++i) {
      const int64_t id = selected[g * sizes.num_selected + i];
      if (id >= 0 && id < sizes.max_blocks) chosen[g * sizes.max_blocks + id] = 1;
    }
  }
  std::fill(mask, mask + sizes.group * sizes.num_union, false);
  int64_t count = 0;
  for (int64_t id = 0; id < sizes.max_blocks && count < sizes.num_union; ++id) {
    bool any = false;
    for (int64_t g = 0; g < sizes.group; ++g) any |= chosen[g * sizes.max_blocks + id];
    if (!any) continue;
    for (int64_t g = 0; g < sizes.group; ++g) mask[g * sizes.num_union + count] = chosen[g * sizes.max_blocks + id];
    ids[count++] = static_cast<int32_t>(id);
  }
  std::fill(ids + count, ids + sizes.num_union, -1);
}

ffi::Error union_over_group(ffi::ThreadPool threads, Ints selected, ffi::Result<Ints> ids,
                            ffi::Result<ffi::Buffer<ffi::PRED>> mask, int32_t max_blocks) {
  SPARSESERVE_CHECK(rank(selected) == 3 && rank(*ids) == 3 && rank(*mask) == 4, "selected has three axes");
  const Sizes sizes{dim(*mask, 2), dim(selected, 2), max_blocks, dim(*ids, 2)};
  SPARSESERVE_CHECK(dim(selected, 1) == dim(*ids, 1) * sizes.group && dim(*mask, 3) == sizes.num_union,
                    "query heads are a multiple of KV heads");
  parallel_for(threads, dim(*ids, 0) * dim(*ids, 1), kGrain, [&](int64_t lane) {
    unite(sizes, selected.typed_data() + lane * sizes.group * sizes.num_selected,
          ids->typed_data() + lane * sizes.num_union, mask->typed_data() + lane * sizes.group * sizes.num_union);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeUnionOverGroup, sparseserve::union_over_group,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<sparseserve::Ints>()
                            .Ret<sparseserve::Ints>()
                            .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Attr<int32_t>("max_blocks"));
