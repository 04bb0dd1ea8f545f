// Key tiles that sparse prefill needs: pallas_kernels/select_key_tiles.py.
//
// Every 16th query stands for its neighbours, with its whole attention. A unit of work is a run of tiles of one prompt
// with one KV head. Its sampled queries are the lanes of panels as in prefill attention; the eight of one tile and query
// head make a "column". Keys are read one chunk at a time, and of their scores only the maximum and the sum of weights by
// query and key tile are kept; softmax over all keys follows from these at the end.

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

constexpr int kStride = 16;  // select_key_tiles.STRIDE
constexpr int kSamples = kTile / kStride;
constexpr int kRows = 32;                            // keys that go into one product
constexpr int kColumnsOfPanel = kPanel / kSamples;
constexpr int kColumnsOfUnit = 64;                   // that share keys: queries of 64 KiB at head_dim 64
constexpr int64_t kChunkElements = 64 * 1024;        // of keys, 256 KiB: they stay in the L2 cache for all panels
constexpr int kUnitsPerThread = 2;

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

// 2^x to 3e-6 of the value for x <= 0, never zero: what sums of many weights need, in two thirds of the time of `exp2`.
inline F32 exp2_of_weight(F32 x) {
  const F32 clamped = max(splat(-126.0f), x);
  const F32 shifter = splat(12582912.0f);  // see `exp2`
  const F32 shifted = clamped + shifter;
  const F32 r = clamped - (shifted - shifter);
  F32 p = splat(9.5701014e-3f);
  p = p * r + 5.5917860e-2f;
  p = p * r + 2.4024745e-1f;
  p = p * r + 6.9312182e-1f;
  p = p * r + 9.9999926e-1f;
  return (F32)((S32)p + ((S32)shifted << 23));
}

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
        width_(head_dim_ / Product::kPerElement),
        factor_(call.scale * kLog2E) {}

  void run() {
    for (int i = 0; i < unit_.num_tiles; ++i) {
      for (int g = 0; g < call_.group(); ++g) add_column(unit_.tile + i, unit_.head * call_.group() + g);
    }
    if (columns_.empty()) return;
    const int num_panels = (static_cast<int>(columns_.size()) + kColumnsOfPanel - 1) / kColumnsOfPanel;
    lanes_ = num_panels * kPanel;
    const int end = call_.end(columns_.back().tile), num_key_tiles = (end + kTile - 1) / kTile;
    const int most = std::max<int>(1, kChunkElements / (kTile * width_));  // key tiles of a chunk
    allocate(num_panels, most * kTile, num_key_tiles);
    for (int p = 0; p < num_panels; ++p) read_queries(p);
    const int32_t* table = call_.tables + static_cast<int64_t>(call_.tile_prompt[unit_.tile]) * call_.max_blocks;
    const Prompt<T> prompt{call_.pool, call_.shape, table, unit_.head, end, head_dim_, call_.kv_scales};
    Product::begin();
    for (int first = 0; first < num_key_tiles; first += most) {
      const int last = std::min(first + most, num_key_tiles);
      prompt.read(0, first * kTile, (last - first) * kTile, reinterpret_cast<Value*>(keys_));
      for (int p = 0; p < num_panels; ++p) {
        const int needed = std::min(last, key_tiles_of(p));
        for (int j = first; j < needed; ++j) add_key_tile(p, j, keys_ + (j - first) * kTile * width_);
      }
    }
    Product::end();
    for (int p = 0; p < num_panels; ++p) finish(p);
  }

 private:
  struct Column {
    int tile, head;
  };

  void allocate(int64_t num_panels, int64_t num_keys, int64_t num_key_tiles) {
    const int64_t panel = kPanel * int64_t{width_}, results = num_key_tiles * lanes_;
    uint32_t* memory = scratch((num_panels + 1) * panel + num_keys * width_ + 2 * results + lanes_);
    queries_ = reinterpret_cast<Element*>(memory);
    rows_ = reinterpret_cast<Value*>(memory + num_panels * panel);
    keys_ = reinterpret_cast<Element*>(memory + (num_panels + 1) * panel);
    max_ = reinterpret_cast<float*>(keys_ + num_keys * width_);
    sum_ = max_ + results;
    positions_ = reinterpret_cast<int32_t*>(sum_ + results);
  }

  void add_column(int tile, int head) {
    const int causal = call_.causal_tiles(tile);
    bool* kept = call_.kept(tile, head);
    const bool all = call_.keeps_all(tile);
    std::fill(kept, kept + call_.num_key_tiles, false);
    if (all) std::fill(kept, kept + causal, true);
    if (!all && call_.exists(tile)) columns_.push_back({tile, head});
  }

  // Columns of a panel: [first, last).
  std::pair<int, int> columns_of(int panel) const {
    return {panel * kColumnsOfPanel, std::min<int>(columns_.size(), (panel + 1) * kColumnsOfPanel)};
  }
  // Key tiles that any query of a panel sees: those of its last tile.
  int key_tiles_of(int panel) const { return call_.causal_tiles(columns_[columns_of(panel).second - 1].tile); }

  int num_samples(int tile) const { return (call_.tile_tokens[tile] + kStride - 1) / kStride; }
  // The token of a tile that a sample is: the last of a run of kStride, or the tile's last.
  int token_of(int tile, int sample) const { return std::min((sample + 1) * kStride, call_.tile_tokens[tile]) - 1; }

  // The sampled queries of a panel, transposed, and their positions; zeros at -1 where there is none.
  void read_queries(int panel) {
    std::fill(rows_, rows_ + static_cast<int64_t>(kPanel) * head_dim_, Value{});
    int32_t* positions = positions_ + static_cast<int64_t>(panel) * kPanel;
    std::fill(positions, positions + kPanel, -1);
    const T* from = static_cast<const T*>(call_.q);
    const auto [first, last] = columns_of(panel);
    for (int c = first; c < last; ++c) {
      const auto [tile, head] = columns_[c];
      for (int i = 0; i < num_samples(tile); ++i) {
        const int lane = (c - first) * kSamples + i, token = token_of(tile, i);
        positions[lane] = call_.tile_start[tile] + token;
        const T* query = from + ((static_cast<int64_t>(tile) * kTile + token) * call_.num_q_heads + head) * head_dim_;
        Value* to = rows_ + static_cast<int64_t>(lane) * head_dim_;
        if constexpr (std::is_same_v<T, Value>) {
          std::memcpy(to, query, head_dim_ * sizeof(Value));
        } else {
          for (int d = 0; d < head_dim_; ++d) to[d] = to_float(query[d]);
        }
      }
    }
    transpose(rows_, width_, kPanel, width_, queries_ + static_cast<int64_t>(panel) * width_ * kPanel, kPanel);
  }

  // The maxima and the sums of weights of one key tile, for all queries of a panel.
  void add_key_tile(int panel, int key_tile, const Element* keys) {
    alignas(64) float scores[kRows * kPanel];
    const int64_t to = static_cast<int64_t>(key_tile) * lanes_ + static_cast<int64_t>(panel) * kPanel;
    std::fill(max_ + to, max_ + to + kPanel, kNoMax);
    std::fill(sum_ + to, sum_ + to + kPanel, 0.0f);
    // All queries of later tiles see all keys of this one.
    const bool all_seen = (key_tile + 1) * kTile <= call_.tile_start[columns_[columns_of(panel).first].tile];
    for (int row = 0; row < kTile; row += kRows, keys += kRows * width_) {
      Product::multiply(keys, queries_ + static_cast<int64_t>(panel) * width_ * kPanel, scores, width_);
      if (!all_seen) hide(positions_ + static_cast<int64_t>(panel) * kPanel, key_tile * kTile + row, scores);
      for (int lane = 0; lane < kPanel; lane += kLanes) add_weights(scores + lane, max_ + to + lane, sum_ + to + lane);
    }
  }

  // Scores of keys that come after a query.
  static void hide(const int32_t* positions, int key, float* scores) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      S32 position;
      std::memcpy(&position, positions + lane, sizeof position);
      for (int i = 0; i < kRows; ++i) {
        float* row = scores + i * kPanel + lane;
        const S32 seen = position >= key + i;
        store(row, seen ? load(row) : splat(kNoMax));
      }
    }
  }

  // Takes kRows more keys into the maximum and the sum of a vector of queries.
  void add_weights(const float* scores, float* max_, float* sum_) const {
    const F32 before = load(max_);
    F32 most = before;
    for (int i = 0; i < kRows; ++i) most = max(load(scores + i * kPanel), most);
    const F32 offset = most * factor_;
    F32 sum = load(sum_) * exp2((before - most) * factor_);
    for (int i = 0; i < kRows; ++i) sum += exp2_of_weight(load(scores + i * kPanel) * factor_ - offset);
    store(max_, most);
    store(sum_, sum);
  }

  // Softmax over all keys, the mean over the queries of a tile, and what to keep.
  void finish(int panel) {
    const int count = key_tiles_of(panel);
    for (int64_t lane = static_cast<int64_t>(panel) * kPanel; lane < (panel + 1) * kPanel; lane += kLanes) {
      F32 most = splat(kNoMax), total{};
      for (int j = 0; j < count; ++j) most = max(load(max_ + j * lanes_ + lane), most);
      for (int j = 0; j < count; ++j) {
        float* sum = sum_ + j * lanes_ + lane;
        store(sum, load(sum) * exp2((load(max_ + j * lanes_ + lane) - most) * factor_));
        total += load(sum);
      }
      for (int j = 0; j < count; ++j) store(sum_ + j * lanes_ + lane, load(sum_ + j * lanes_ + lane) / total);
    }
    const auto [first, last] = columns_of(panel);
    for (int c = first; c < last; ++c) {
      const auto [tile, head] = columns_[c];
      shares_.assign(call_.causal_tiles(tile), 0.0f);
      for (size_t j = 0; j < shares_.size(); ++j) {
        const float* of_queries = sum_ + j * lanes_ + c * kSamples;
        for (int i = 0; i < num_samples(tile); ++i) shares_[j] += of_queries[i];
        shares_[j] /= num_samples(tile);
      }
      keep_largest(call_, tile, shares_.data(), call_.kept(tile, head));
    }
  }

  const Call& call_;
  const Unit& unit_;
  const int head_dim_, width_;
  const float factor_;
  int64_t lanes_ = 0;
  std::vector<Column> columns_;
  Element *queries_ = nullptr, *keys_ = nullptr;  // [panels][width][kPanel], [keys of a chunk][width]
  Value* rows_ = nullptr;                         // [kPanel][head_dim], for transposition
  float *max_ = nullptr, *sum_ = nullptr;         // [key tiles][lanes]
  int32_t* positions_ = nullptr;                  // [lanes], of queries in their prompt
  std::vector<float> shares_;                     // [key tiles]
};

// Runs of tiles that follow each other in one prompt; the last ones, which see the most keys, come first.
std::vector<Unit> make_units(const Call& call, int num_threads) {
  const int heads = static_cast<int>(call.shape.num_heads);
  const int enough = std::max(1, call.num_tiles * heads / (kUnitsPerThread * num_threads));
  // Whole panels, if there are so many.
  const int whole = std::max(enough / kColumnsOfPanel * kColumnsOfPanel, std::min(enough, kColumnsOfPanel));
  const int most = std::min(whole, std::max(1, kColumnsOfUnit / call.group()));
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
