// Causal flash attention of packed prompts over the paged pool: pallas_kernels/reference.py, prefill_attention.
//
// A unit of work is a run of tiles of one prompt with one KV head. Its queries are cut into panels of 64 tokens of one
// query head; keys and values are packed for the products once for all panels of the unit. Units differ in length
// (causality, tile_mask), so threads take them one by one, the longest first.

#include <vector>

#include "amx.h"
#include "ffi_op.h"
#include "parallel.h"
#include "prefill_checks.h"
#include "prefill_panels.h"
#include "prefill_prompt.h"
#include "prefill_vectors.h"
#if defined(SPARSESERVE_AMX)
#include "prefill_amx.h"
#endif

namespace sparseserve::prefill {
namespace {

// Lanes of a unit, if there are tiles enough: packing costs less the more queries share it, while results of this many
// (256 KiB at head_dim 64) still fit the L2 cache.
constexpr int kUnitLanes = 2048;
constexpr int kUnitsPerThread = 6;

struct Call {
  const void* q;
  const void* pool;
  PoolShape shape;
  const int32_t *tables, *tile_prompt, *tile_start, *tile_tokens;
  const bool* tile_mask;  // null = none
  const float* kv_scales;  // of an int8 pool; null = none
  float* out;
  int num_tiles, num_q_heads, num_key_tiles, max_blocks;
  float scale;
  bool allow_amx;

  int group() const { return num_q_heads / static_cast<int>(shape.num_heads); }
  const bool* kept(int tile, int head) const {
    return tile_mask + (static_cast<int64_t>(tile) * num_q_heads + head) * num_key_tiles;
  }
};

struct Unit {
  int tile, num_tiles, head;
  int64_t cost;
};

// --- units -----------------------------------------------------------------------------------------------------------

bool continues(const Call& call, int tile) {
  return call.tile_prompt[tile] == call.tile_prompt[tile - 1] && call.tile_tokens[tile - 1] == kTile &&
         call.tile_start[tile] == call.tile_start[tile - 1] + kTile;
}

// Key tiles that the queries of `tile` look at, summed over the query heads of `head`.
int64_t cost_of(const Call& call, int tile, int head) {
  if (call.tile_tokens[tile] == 0) return 0;
  const int key_tiles = (call.tile_start[tile] + call.tile_tokens[tile] + kTile - 1) / kTile, group = call.group();
  if (call.tile_mask == nullptr) return static_cast<int64_t>(key_tiles) * group;
  int64_t cost = 0;
  for (int i = 0; i < group; ++i) {
    const bool* kept = call.kept(tile, head * group + i);
    cost += std::count(kept, kept + std::min(key_tiles, call.num_key_tiles), true);
  }
  return cost;
}

std::vector<Unit> make_units(const Call& call, int num_threads) {
  const int heads = static_cast<int>(call.shape.num_heads);
  const int enough = std::max(1, call.num_tiles * heads / (kUnitsPerThread * num_threads));
  const int most = std::min(enough, std::max(1, kUnitLanes / (kTile * call.group())));
  std::vector<Unit> units;
  for (int tile = 0; tile < call.num_tiles;) {
    int count = 1;
    while (count < most && tile + count < call.num_tiles && continues(call, tile + count)) ++count;
    for (int head = 0; head < heads; ++head) {
      Unit unit{tile, count, head, 0};
      for (int i = 0; i < count; ++i) unit.cost += cost_of(call, tile + i, head);
      units.push_back(unit);
    }
    tile += count;
  }
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  return units;
}

// --- one unit --------------------------------------------------------------------------------------------------------

template <class T, class Worker>
class UnitRunner {
 public:
  UnitRunner(const Call& call, const Unit& unit)
      : call_(call),
        unit_(unit),
        head_dim_(call.shape.head_dim),
        padded_dim_(round_up(head_dim_, 2 * kLanes)),
        width_(padded_dim_ / Worker::kPerElement) {}

  void run() {
    const int most_panels = unit_.num_tiles * call_.group() * (kTile / kPanel);
    const int64_t panel_size = static_cast<int64_t>(width_ + padded_dim_ + 1 + Worker::kPartialSums) * kPanel;
    uint32_t* memory = scratch(most_panels * panel_size + kPanel * padded_dim_ + Worker::scratch(head_dim_));
    rows_ = memory + most_panels * panel_size;
    for (int i = 0; i < unit_.num_tiles; ++i) add_panels(unit_.tile + i, memory, panel_size);
    if (!panels_.empty()) attend(rows_ + kPanel * padded_dim_);
    size_t next = 0;
    for (int i = 0; i < unit_.num_tiles; ++i) next = write(unit_.tile + i, next);
  }

 private:
  void add_panels(int tile, uint32_t* memory, int64_t panel_size) {
    for (int g = 0; g < call_.group(); ++g) {
      for (int token = 0; token < call_.tile_tokens[tile]; token += kPanel) {
        uint32_t* q = memory + panels_.size() * panel_size;
        float* out = reinterpret_cast<float*>(q + width_ * kPanel);
        float* max_ = out + padded_dim_ * kPanel;
        const int head = unit_.head * call_.group() + g, count = std::min(kPanel, call_.tile_tokens[tile] - token);
        read_queries(tile * kTile + token, head, count, q);
        std::fill(out, max_, 0.0f);
        std::fill(max_, max_ + kPanel, kNoMax);
        std::fill(max_ + kPanel, max_ + (1 + Worker::kPartialSums) * kPanel, 0.0f);
        const bool* kept = call_.tile_mask == nullptr ? nullptr : call_.kept(tile, head);
        panels_.push_back(
            {q, out, max_, max_ + kPanel, call_.tile_start[tile] + token, count, kept, call_.num_key_tiles});
      }
    }
  }

  int64_t offset(int token, int head) const {
    return (static_cast<int64_t>(token) * call_.num_q_heads + head) * head_dim_;
  }

  // Queries with zeros after the last one, which may be NaN, and after the last dim.
  void read_queries(int token, int head, int count, uint32_t* q) {
    using Value = std::conditional_t<Worker::kPerElement == 2, Bf16, float>;
    const T* from = static_cast<const T*>(call_.q);
    Value* rows = reinterpret_cast<Value*>(Worker::kQueriesAreLanes ? rows_ : q);
    std::memset(rows, 0, kPanel * padded_dim_ * sizeof(Value));
    for (int i = 0; i < count; ++i) {
      const T* row = from + offset(token + i, head);
      if constexpr (std::is_same_v<T, Value>) {
        std::memcpy(rows + i * padded_dim_, row, head_dim_ * sizeof(Value));
      } else {
        for (int d = 0; d < head_dim_; ++d) rows[i * padded_dim_ + d] = to_float(row[d]);
      }
    }
    if (Worker::kQueriesAreLanes) transpose(rows, width_, kPanel, width_, q, kPanel);
  }

  void attend(uint32_t* memory) {
    int end = 0;
    for (const Panel& panel : panels_) end = std::max(end, panel.last() + 1);
    const int32_t* table = call_.tables + static_cast<int64_t>(call_.tile_prompt[unit_.tile]) * call_.max_blocks;
    Worker worker({call_.pool, call_.shape, table, unit_.head, end, head_dim_, call_.kv_scales}, call_.scale, memory);
    for (int chunk = 0; chunk < end; chunk += kChunkKeys) {
      bool any = false;
      for (int key = chunk; key < std::min(end, chunk + kChunkKeys); key += kTile) {
        if (std::none_of(panels_.begin(), panels_.end(), [&](const Panel& panel) { return panel.attends(key); })) continue;
        worker.pack(key, chunk);
        any = true;
      }
      if (any) worker.attend(panels_.data(), static_cast<int>(panels_.size()), chunk);
    }
  }

  // Writes a tile's rows, zeros where there is no token; `next` is its first panel. Returns the next tile's.
  size_t write(int tile, size_t next) {
    for (int g = 0; g < call_.group(); ++g) {
      const int head = unit_.head * call_.group() + g;
      for (int token = 0; token < kTile; token += kPanel) {
        const bool exists = token < call_.tile_tokens[tile];
        write_panel(exists ? &panels_[next] : nullptr, tile * kTile + token, head);
        next += exists;
      }
    }
    return next;
  }

  void write_panel(const Panel* panel, int token, int head) {
    const float* rows = reinterpret_cast<const float*>(rows_);
    if (panel != nullptr && Worker::kQueriesAreLanes) {
      transpose(panel->out, kPanel, padded_dim_, kPanel, rows_, padded_dim_);
    } else if (panel != nullptr) {
      rows = panel->out;
    }
    for (int i = 0; i < kPanel; ++i) {
      float* to = call_.out + offset(token + i, head);
      float sum = 0.0f;
      if (panel != nullptr && i < panel->count) {
        for (int j = 0; j < Worker::kPartialSums; ++j) sum += panel->sum[i * Worker::kPartialSums + j];
      }
      const bool some = sum != 0.0f;
      const float inverse = some ? 1.0f / sum : 0.0f;
      const float* row = rows + i * padded_dim_;
      for (int d = 0; d < head_dim_; ++d) to[d] = some ? row[d] * inverse : 0.0f;
    }
  }

  const Call& call_;
  const Unit& unit_;
  const int head_dim_, padded_dim_, width_;
  uint32_t* rows_ = nullptr;  // [kPanel][padded_dim_], for transposition
  std::vector<Panel> panels_;
};

template <class T, class Worker>
void run_units(const Call& call, ffi::ThreadPool& pool) {
  const std::vector<Unit> units = make_units(call, static_cast<int>(pool.num_threads()));
  parallel_for(pool, units.size(), [&](int64_t i) { UnitRunner<T, Worker>(call, units[i]).run(); });
}

void run(const Call& call, Bf16*, ffi::ThreadPool& pool) {
#if defined(SPARSESERVE_AMX)
  if (call.allow_amx && Amx<0>::supports(call.shape.head_dim, call.shape.block_size)) {
    switch (call.shape.head_dim) {
      case 64: return run_units<Bf16, Amx<2>>(call, pool);
      case 128: return run_units<Bf16, Amx<4>>(call, pool);
      default: return run_units<Bf16, Amx<0>>(call, pool);
    }
  }
#endif
#if defined(__AVX512BF16__)
  // Intel's cores take two cycles for a vector of bfloat16 products, which in float32 take one; AMD's do not.
  if (!__builtin_cpu_is("intel")) return run_units<Bf16, Vectors<Bfloat16, Bf16>>(call, pool);
#endif
  run_units<Bf16, Vectors<Float32, Bf16>>(call, pool);
}

void run(const Call& call, float*, ffi::ThreadPool& pool) { run_units<float, Vectors<Float32, float>>(call, pool); }

// --- XLA -------------------------------------------------------------------------------------------------------------

ffi::Error prefill_attention(ffi::ThreadPool pool_of_threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, Ints tables,
                             Ints tile_prompt, Ints tile_start, Ints tile_tokens, ffi::Buffer<ffi::PRED> tile_mask,
                             Floats kv_scales, ffi::ResultBuffer<ffi::F32> out, float scale, bool allow_amx) {
  const ffi::Error error =
      check_prompts("prefill_attention", q, pool, tables, tile_prompt, tile_start, tile_tokens, kv_scales);
  if (error.failure()) return error;
  SPARSESERVE_CHECK(rank(tile_mask) == 3, "prefill_attention: wrong ranks");
  const PoolShape shape(pool);
  const int num_tiles = static_cast<int>(dim(tile_start, 0));
  SPARSESERVE_CHECK(shape.head_dim % 2 == 0, "prefill_attention: head_dim must be even");
  Call call{q.untyped_data(), pool.untyped_data(), shape, tables.typed_data(), tile_prompt.typed_data(),
            tile_start.typed_data(), tile_tokens.typed_data(),
            // One without key tiles stands for none.
            dim(tile_mask, 2) == 0 ? nullptr : tile_mask.typed_data(), is_int8(pool) ? kv_scales.typed_data() : nullptr,
            out->typed_data(), num_tiles, static_cast<int>(dim(q, 1)), static_cast<int>(dim(tile_mask, 2)),
            static_cast<int>(dim(tables, 1)), scale, allow_amx};
  with_float_type(q.element_type(), [&](auto* type) { run(call, type, pool_of_threads); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve::prefill

SPARSESERVE_FFI_HANDLER(SparseServePrefillAttention, sparseserve::prefill::prefill_attention,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Arg<sparseserve::Floats>()
                            .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                            .Attr<float>("scale")
                            .Attr<bool>("allow_amx"));
