// Key tiles that sparse prefill needs (XAttention, arXiv 2503.16428): pallas_kernels/select_key_tiles.py.
//
// Queries and keys count in groups of 8 tokens; a tile of 128 tokens is 16 groups. A unit of work is a run of tiles of one
// prompt with one KV head. Its queries are the lanes of panels as in prefill attention: 16 lanes, the groups of one tile
// and query head, make a "column". Keys are packed one chunk at a time, a group a row, so that the product of the 16 rows
// of one key tile with one column is all that the two have to do with each other. Of it only the maximum and the sum of
// weights by query group are kept; softmax over all keys follows from these at the end.

#include <algorithm>
#include <vector>

#include "amx.h"
#include "ffi_op.h"
#include "parallel.h"
#include "prefill_checks.h"
#include "prefill_panels.h"
#include "prefill_prompt.h"
#if defined(SPARSESERVE_AMX)
#include "select_amx.h"
#endif

namespace sparseserve::prefill {
namespace {

constexpr int kStride = 8;  // select_key_tiles.STRIDE
constexpr int kGroups = kTile / kStride;
constexpr int kRows = 2 * kGroups;                   // of keys that go into one product
constexpr int kColumnsOfPanel = kPanel / kGroups;
constexpr int kColumnsOfUnit = 32;                   // queries that share packed keys: at head_dim 64 512 KiB
constexpr int64_t kChunkElements = 64 * 1024;        // of packed keys, 256 KiB: both stay in the L2 cache
constexpr int kUnitsPerThread = 4;

struct Call {
  const void* q;
  const void* pool;
  PoolShape shape;
  const int32_t *tables, *tile_prompt, *tile_start, *tile_tokens;
  const float* kv_scales;  // of an int8 pool; null = none
  bool* out;  // [num_tiles][num_q_heads][num_key_tiles]
  int num_tiles, num_q_heads, num_key_tiles, max_blocks;
  float scale, threshold;
  int dense_tokens;
  bool allow_amx;

  int group() const { return num_q_heads / static_cast<int>(shape.num_heads); }
  int end(int tile) const { return tile_start[tile] + tile_tokens[tile]; }
  bool exists(int tile) const { return tile_tokens[tile] > 0; }
  int causal_tiles(int tile) const { return exists(tile) ? (end(tile) + kTile - 1) / kTile : 0; }
  // Whether this key tile (of the causal ones) is kept whatever its share: attention sinks, and the queries' own tokens.
  bool forced(int tile, int key_tile) const { return key_tile == 0 || (key_tile + 1) * kTile > tile_start[tile]; }
  // Whether all causal key tiles are kept, so that there is nothing to select.
  bool keeps_all(int tile) const {
    return threshold >= 1.0f || end(tile) <= dense_tokens || tile_start[tile] < 2 * kTile;
  }
  bool* kept(int tile, int head) const {
    return out + (static_cast<int64_t>(tile) * num_q_heads + head) * num_key_tiles;
  }
};

struct Unit {
  int tile, num_tiles, head;
};

// --- from shares to key tiles ----------------------------------------------------------------------------------------

// Marks the largest shares until together with the forced ones they reach the threshold; ties go to the lower index.
// `shares` of all causal key tiles, which add up to 1.
void keep_largest(const Call& call, int tile, const float* shares, bool* kept) {
  const int count = call.causal_tiles(tile);
  thread_local std::vector<std::pair<float, int>> rest;  // share, -index
  rest.clear();
  float sum = 0.0f;
  for (int j = 0; j < count; ++j) {
    kept[j] = call.forced(tile, j);
    if (kept[j]) {
      sum += shares[j];
    } else {
      rest.emplace_back(shares[j], -j);
    }
  }
  std::make_heap(rest.begin(), rest.end());
  for (auto end = rest.end(); sum < call.threshold && end != rest.begin(); --end) {
    std::pop_heap(rest.begin(), end);
    kept[-(end - 1)->second] = true;
    sum += (end - 1)->first;
  }
}

// --- one unit --------------------------------------------------------------------------------------------------------

// out[kRows][kPanel] = a[kRows][n] * b[n][kPanel], by vector registers; `Amx` of select_amx.h does the same.
template <class Math>
struct ByVectors {
  using Element = typename Math::Element;
  static constexpr int kPerElement = Math::kPerElement;
  static void begin() {}
  static void end() {}
  static void multiply(const Element* a, const Element* b, float* out, int n) {
    product<Math, false>({a, n, 1}, b, out, kRows, n);
  }
};

template <class T, class Product>
class UnitRunner {
 public:
  using Element = typename Product::Element;
  using Value = std::conditional_t<Product::kPerElement == 2, Bf16, float>;

  UnitRunner(const Call& call, const Unit& unit)
      : call_(call),
        unit_(unit),
        head_dim_(call.shape.head_dim),
        width_(kStride * head_dim_ / Product::kPerElement),
        factor_(call.scale / kStride * kLog2E) {}

  void run() {
    for (int i = 0; i < unit_.num_tiles; ++i) {
      for (int g = 0; g < call_.group(); ++g) add_column(unit_.tile + i, unit_.head * call_.group() + g);
    }
    if (columns_.empty()) return;
    const int num_panels = (static_cast<int>(columns_.size()) + kColumnsOfPanel - 1) / kColumnsOfPanel;
    lanes_ = num_panels * kPanel;
    const int end = call_.end(columns_.back().tile);
    const int most = std::max<int>(2, kChunkElements / (kGroups * width_) / 2 * 2);  // key tiles of a chunk
    allocate(num_panels, most * kGroups, (end + kTile - 1) / kTile);
    for (int p = 0; p < num_panels; ++p) read_queries(p);
    const int32_t* table = call_.tables + static_cast<int64_t>(call_.tile_prompt[unit_.tile]) * call_.max_blocks;
    const Prompt<T> prompt{call_.pool, call_.shape, table, unit_.head, end, head_dim_, call_.kv_scales};
    Product::begin();
    for (int first = 0; first * kTile < end; first += most) {
      const int last = std::min(first + most, (end + kTile - 1) / kTile);
      read_keys(prompt, first, last);
      for (int p = 0; p < num_panels; ++p) {
        const int needed = std::min(last, call_.causal_tiles(last_column(p).tile));
        for (int j = first; j < needed; j += 2) add_key_tiles(p, j, keys_ + (j - first) * kGroups * width_);
      }
    }
    Product::end();
    for (size_t c = 0; c < columns_.size(); ++c) finish(c);
  }

 private:
  struct Column {
    int tile, head;
  };

  void allocate(int64_t num_panels, int64_t num_rows, int64_t num_key_tiles) {
    const int64_t panel = kPanel * int64_t{width_}, results = num_key_tiles * lanes_;
    uint32_t* memory = scratch((num_panels + 1) * panel + num_rows * width_ + 2 * results);
    queries_ = reinterpret_cast<Element*>(memory);
    rows_ = reinterpret_cast<Value*>(memory + num_panels * panel);
    keys_ = reinterpret_cast<Element*>(memory + (num_panels + 1) * panel);
    max_ = reinterpret_cast<float*>(keys_ + num_rows * width_);
    sum_ = max_ + results;
  }

  void add_column(int tile, int head) {
    const int causal = call_.causal_tiles(tile);
    bool* kept = call_.kept(tile, head);
    const bool all = call_.keeps_all(tile);
    std::fill(kept, kept + call_.num_key_tiles, false);
    if (all) std::fill(kept, kept + causal, true);
    if (!all && call_.exists(tile)) columns_.push_back({tile, head});
  }

  const Column& last_column(int panel) const {
    return columns_[std::min<size_t>(columns_.size(), (panel + 1) * kColumnsOfPanel) - 1];
  }

  // The queries of a group one after the other, the last one first; zeros where there is none.
  void read_queries(int panel) {
    std::fill(rows_, rows_ + static_cast<int64_t>(kPanel) * kStride * head_dim_, Value{});
    const T* from = static_cast<const T*>(call_.q);
    for (int c = 0; c < kColumnsOfPanel; ++c) {
      const size_t index = panel * kColumnsOfPanel + c;
      if (index >= columns_.size()) break;
      const auto [tile, head] = columns_[index];
      for (int i = 0; i < call_.tile_tokens[tile]; ++i) {
        const int row = c * kGroups + i / kStride, place = kStride - 1 - i % kStride;
        const int64_t token = static_cast<int64_t>(tile) * kTile + i;
        const T* query = from + (token * call_.num_q_heads + head) * head_dim_;
        Value* to = rows_ + (static_cast<int64_t>(row) * kStride + place) * head_dim_;
        if constexpr (std::is_same_v<T, Value>) {
          std::memcpy(to, query, head_dim_ * sizeof(Value));
        } else {
          for (int d = 0; d < head_dim_; ++d) to[d] = to_float(query[d]);
        }
      }
    }
    transpose(rows_, width_, kPanel, width_, queries_ + static_cast<int64_t>(panel) * width_ * kPanel,
              kPanel);
  }

  // Rows of key tiles [first, last), and zeros that fill up the last product.
  void read_keys(const Prompt<T>& prompt, int first, int last) {
    prompt.read(0, first * kTile, round_up(last - first, 2) * kTile, reinterpret_cast<Value*>(keys_));
  }

  // Two key tiles with all columns of a panel.
  void add_key_tiles(int panel, int key_tile, const Element* keys) {
    alignas(64) float scores[kRows * kPanel];
    Product::multiply(keys, queries_ + static_cast<int64_t>(panel) * width_ * kPanel, scores, width_);
    for (int i = 0; i < 2; ++i) {
      for (int c = 0; c < kColumnsOfPanel; ++c) {
        const size_t column = panel * kColumnsOfPanel + c;
        if (column < columns_.size()) {
          add_weights(columns_[column].tile, key_tile + i, scores + i * kGroups * kPanel + c * kGroups,
                      static_cast<int64_t>(key_tile + i) * lanes_ + column * kGroups);
        }
      }
    }
  }

  // The maximum and the sum of weights of a key tile, for all query groups of a column, go to index `to`.
  void add_weights(int tile, int key_tile, float* scores, int64_t to) {
    if (key_tile >= call_.causal_tiles(tile)) return;
    const int key = key_tile * kGroups, query = call_.tile_start[tile] / kStride;
    for (int lane = 0; lane < kGroups; lane += kLanes) {
      F32 most = splat(kNoMax);
      for (int i = 0; i < kGroups; ++i) {
        float* row = scores + i * kPanel + lane;
        if (key + i > query + lane) {
          const S32 seen = lane_index() + (query + lane) >= key + i;
          store(row, seen ? load(row) : splat(kNoMax));
        }
        most = max(load(row), most);
      }
      F32 sum{};
      for (int i = 0; i < kGroups; ++i) sum += exp2((load(scores + i * kPanel + lane) - most) * factor_);
      store(max_ + to + lane, most);
      store(sum_ + to + lane, sum);
    }
  }

  // Softmax over all key groups, the mean over query groups, and what to keep.
  void finish(size_t column) {
    const auto [tile, head] = columns_[column];
    const int count = call_.causal_tiles(tile);
    const int groups = (call_.tile_tokens[tile] + kStride - 1) / kStride;
    shares_.assign(count, 0.0f);
    for (int lane = 0; lane < groups; lane += kLanes) {
      const float* maxima = max_ + column * kGroups + lane;
      float* sums = sum_ + column * kGroups + lane;
      F32 most = splat(kNoMax), total{};
      for (int j = 0; j < count; ++j) most = max(load(maxima + static_cast<int64_t>(j) * lanes_), most);
      for (int j = 0; j < count; ++j) {
        float* sum = sums + static_cast<int64_t>(j) * lanes_;
        store(sum, load(sum) * exp2((load(maxima + static_cast<int64_t>(j) * lanes_) - most) * factor_));
        total += load(sum);
      }
      const F32 part = first_lanes(1.0f / total, groups - lane, F32{});
      for (int j = 0; j < count; ++j) shares_[j] += reduce_add(load(sums + static_cast<int64_t>(j) * lanes_) * part);
    }
    for (float& share : shares_) share /= groups;
    keep_largest(call_, tile, shares_.data(), call_.kept(tile, head));
  }

  const Call& call_;
  const Unit& unit_;
  const int head_dim_, width_;
  const float factor_;
  int64_t lanes_ = 0;
  std::vector<Column> columns_;
  Element *queries_ = nullptr, *keys_ = nullptr;  // [panels][width][kPanel], [key tiles of a chunk * kGroups][width]
  Value* rows_ = nullptr;                         // [kPanel][kStride * head_dim], for transposition
  float *max_ = nullptr, *sum_ = nullptr;         // [key tiles][lanes]
  std::vector<float> shares_;                     // [key tiles]
};

// Runs of tiles that follow each other in one prompt; the last ones, which see the most keys, come first.
std::vector<Unit> make_units(const Call& call, int num_threads) {
  const int heads = static_cast<int>(call.shape.num_heads);
  const int enough = std::max(1, call.num_tiles * heads / (kUnitsPerThread * num_threads));
  const int most = std::min(enough, std::max(1, kColumnsOfUnit / call.group()));
  std::vector<Unit> units;
  for (int tile = 0; tile < call.num_tiles;) {
    int count = 1;
    while (count < most && tile + count < call.num_tiles &&
           call.tile_prompt[tile + count] == call.tile_prompt[tile] &&
           call.tile_start[tile + count] == call.end(tile + count - 1)) {
      ++count;
    }
    for (int head = 0; head < heads; ++head) units.push_back({tile, count, head});
    tile += count;
  }
  std::stable_sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) {
    return call.tile_start[a.tile] * a.num_tiles > call.tile_start[b.tile] * b.num_tiles;
  });
  return units;
}

template <class T, class Product>
void run_units(const Call& call, ffi::ThreadPool& pool) {
  const std::vector<Unit> units = make_units(call, static_cast<int>(pool.num_threads()));
  parallel_for(pool, units.size(), [&](int64_t i) { UnitRunner<T, Product>(call, units[i]).run(); });
}

void run(const Call& call, Bf16*, ffi::ThreadPool& pool) {
#if defined(SPARSESERVE_AMX)
  if (call.allow_amx && call.shape.head_dim % 32 == 0 && amx::available()) return run_units<Bf16, ByAmx>(call, pool);
#endif
#if defined(__AVX512BF16__)
  // See prefill_attention.cc.
  if (!__builtin_cpu_is("intel")) return run_units<Bf16, ByVectors<Bfloat16>>(call, pool);
#endif
  run_units<Bf16, ByVectors<Float32>>(call, pool);
}

void run(const Call& call, float*, ffi::ThreadPool& pool) { run_units<float, ByVectors<Float32>>(call, pool); }

// --- XLA -------------------------------------------------------------------------------------------------------------

ffi::Error select_key_tiles(ffi::ThreadPool pool_of_threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, Ints tables,
                            Ints tile_prompt, Ints tile_start, Ints tile_tokens, Floats kv_scales,
                            ffi::ResultBuffer<ffi::PRED> out, float scale, float threshold, int32_t dense_tokens,
                            bool allow_amx) {
  const ffi::Error error =
      check_prompts("select_key_tiles", q, pool, tables, tile_prompt, tile_start, tile_tokens, kv_scales);
  if (error.failure()) return error;
  SPARSESERVE_CHECK(rank(*out) == 3, "select_key_tiles: wrong ranks");
  const PoolShape shape(pool);
  const int num_tiles = static_cast<int>(dim(tile_start, 0));
  SPARSESERVE_CHECK(shape.head_dim % 4 == 0, "select_key_tiles: head_dim must be a multiple of 4");
  const Call call{q.untyped_data(), pool.untyped_data(), shape, tables.typed_data(), tile_prompt.typed_data(),
                  tile_start.typed_data(), tile_tokens.typed_data(), is_int8(pool) ? kv_scales.typed_data() : nullptr,
                  out->typed_data(), num_tiles,
                  static_cast<int>(dim(q, 1)), static_cast<int>(dim(*out, 2)), static_cast<int>(dim(tables, 1)), scale,
                  threshold, dense_tokens, allow_amx};
  for (int i = 0; i < num_tiles; ++i) {
    if (!call.exists(i)) continue;
    SPARSESERVE_CHECK(call.causal_tiles(i) <= call.num_key_tiles, "select_key_tiles: tile past its block table");
    SPARSESERVE_CHECK(call.tile_start[i] % kStride == 0, "select_key_tiles: tile does not start on a group of 8 tokens");
  }
  with_float_type(q.element_type(), [&](auto* type) { run(call, type, pool_of_threads); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve::prefill

SPARSESERVE_FFI_HANDLER(SparseServeSelectKeyTiles, sparseserve::prefill::select_key_tiles,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Floats>()
                            .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Attr<float>("scale")
                            .Attr<float>("threshold")
                            .Attr<int32_t>("dense_tokens")
                            .Attr<bool>("allow_amx"));
