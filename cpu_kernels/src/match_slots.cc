// Finds the device slot of every selected block, or the least recently selected slot for it to move into.
#include <algorithm>
#include <vector>

#include "ffi_op.h"
#include "parallel.h"

namespace sparseserve {
namespace {

constexpr int64_t kGrain = 8;  // (sequence, head) pairs

struct Lane {
  const int32_t *selected, *resident, *last_selected;
  int64_t num_selected, num_slots, max_blocks, granted;
  int32_t* slots;
  bool* missed;
  int32_t* after;
};

// A slot to evict sorts by age, then by its number; empty ones come first.
struct Victim {
  int64_t age;
  int32_t slot;
  bool operator<(const Victim& other) const { return age != other.age ? age < other.age : slot < other.slot; }
};

// Marks hits and counts misses. `slot_of` is -1 for every block before and after; `wanted` marks slots that stay.
int64_t find_hits(const Lane& lane, std::vector<int32_t>& slot_of, std::vector<uint8_t>& wanted) {
  const auto known = [&](int32_t block) { return block >= 0 && block < lane.max_blocks; };
  for (int64_t slot = lane.granted - 1; slot >= 0; --slot) {
    if (known(lane.resident[slot])) slot_of[lane.resident[slot]] = static_cast<int32_t>(slot);
  }
  int64_t num_misses = 0;
  for (int64_t i = 0; i < lane.num_selected; ++i) {
    const int32_t block = lane.selected[i];
    const int32_t slot = known(block) ? slot_of[block] : -1;
    lane.missed[i] = block >= 0 && slot < 0;
    lane.slots[i] = slot < 0 ? 0 : slot;
    num_misses += lane.missed[i];
    if (slot >= 0) wanted[slot] = 1;
  }
  for (int64_t slot = 0; slot < lane.granted; ++slot) {
    if (known(lane.resident[slot])) slot_of[lane.resident[slot]] = -1;
  }
  return num_misses;
}

void match(const Lane& lane) {
  static thread_local std::vector<int32_t> slot_of;
  static thread_local std::vector<uint8_t> wanted;
  static thread_local std::vector<Victim> victims;
  if (slot_of.size() < static_cast<size_t>(lane.max_blocks)) slot_of.resize(lane.max_blocks, -1);
  wanted.assign(lane.num_slots, 0);
  int64_t num_misses = find_hits(lane, slot_of, wanted);
  std::memcpy(lane.after, lane.resident, lane.num_slots * sizeof(int32_t));
  if (num_misses == 0) return;
  victims.clear();
  for (int32_t slot = 0; slot < lane.granted; ++slot) {
    if (wanted[slot]) continue;
    const int32_t block = lane.resident[slot];
    const int64_t never = INT64_MIN;
    victims.push_back({block < 0 ? never : lane.last_selected[std::min<int64_t>(block, lane.max_blocks - 1)], slot});
  }
  num_misses = std::min<int64_t>(num_misses, victims.size());  // a grant holds at least what is selected
  std::partial_sort(victims.begin(), victims.begin() + num_misses, victims.end());
  auto victim = victims.begin();
  for (int64_t i = 0; i < lane.num_selected && victim != victims.begin() + num_misses; ++i) {
    if (!lane.missed[i]) continue;
    lane.slots[i] = victim->slot;
    lane.after[victim->slot] = lane.selected[i];
    ++victim;
  }
}

ffi::Error match_slots(ffi::ThreadPool threads, Ints selected, Ints resident, Ints last_selected, Ints num_slots,
                       ffi::Result<Ints> slots, ffi::Result<ffi::Buffer<ffi::PRED>> missed, ffi::Result<Ints> after) {
  SPARSESERVE_CHECK(rank(selected) == 3 && rank(resident) == 3 && rank(last_selected) == 3,
                    "selected, resident and last_selected have three axes");
  for (size_t axis = 0; axis < 2; ++axis) {
    SPARSESERVE_CHECK(dim(resident, axis) == dim(selected, axis) && dim(last_selected, axis) == dim(selected, axis),
                      "selected, resident and last_selected are [num_seqs, num_kv_heads, ...]");
  }
  SPARSESERVE_CHECK(dim(num_slots, 0) == dim(selected, 0), "num_slots is [num_seqs]");
  SPARSESERVE_CHECK(same_shape(*slots, selected) && same_shape(*missed, selected) && same_shape(*after, resident),
                    "results are shaped as selected and resident");
  const int64_t num_heads = dim(selected, 1), n = dim(selected, 2), columns = dim(resident, 2);
  const int64_t max_blocks = dim(last_selected, 2);
  parallel_for(threads, dim(selected, 0) * num_heads, kGrain, [&](int64_t lane) {
    const int64_t granted = std::clamp<int64_t>(num_slots.typed_data()[lane / num_heads], 0, columns);
    match(Lane{selected.typed_data() + lane * n, resident.typed_data() + lane * columns,
               last_selected.typed_data() + lane * max_blocks, n, columns, max_blocks, granted,
               slots->typed_data() + lane * n, missed->typed_data() + lane * n, after->typed_data() + lane * columns});
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeMatchSlots, sparseserve::match_slots,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Ret<sparseserve::Ints>()
                            .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Ret<sparseserve::Ints>());
