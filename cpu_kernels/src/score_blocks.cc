// Ranks of the blocks of every sequence by their digests: what select_blocks chooses by.
//
// A score is q . centre + |q| . radius, one dot product of [q, |q|] with a digest, which is contiguous. A lane is one
// KV head of one sequence; its blocks are scored kChunk at a time, the unit of work. Whoever finishes the last chunk of
// a lane turns scores into ranks: the mean of the softmax over the query group, or the scores of each query head.
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "ffi_op.h"
#include "group_tiles.h"
#include "parallel.h"
#include "rows.h"

namespace sparseserve {
namespace {

constexpr int64_t kChunk = 128;  // blocks: 32 KiB of digests at head_dim 64
constexpr float kInfinity = __builtin_inff();
constexpr int kAhead = 2;  // groups of kLanes digests that are prefetched

struct Args {
  ffi::AnyBuffer q;
  const void* digests;
  const int32_t *block_table, *num_blocks;
  int64_t num_digests, num_heads, max_blocks;
  int head_dim, group;
  float scale;
  bool per_query_head;
  int num_sink, num_newest;
  bool amx;
  float* out;

  // Blocks that get a score: all but the newest, whose digest may still be that of the block id's last owner.
  int64_t num_scored(int64_t lane) const {
    return std::clamp<int64_t>(num_blocks[lane / num_heads] - 1, 0, max_blocks);
  }
};

// [q, |q|] of a query of the lane.
void read_query(const Args& args, int64_t lane, int g, std::vector<float>& values) {
  values.resize(2 * args.head_dim);
  read_floats(args.q, (lane * args.group + g) * args.head_dim, args.head_dim, values.data());
  for (int d = 0; d < args.head_dim; ++d) values[args.head_dim + d] = values[d] < 0.0f ? -values[d] : values[d];
}

// The digests of some blocks of a lane, in whole vectors: the last one is repeated.
template <int kWidth, class T>
class Digests {
 public:
  Digests(const Args& args, int64_t lane, int64_t first, int64_t last) : width_(2 * args.head_dim) {
    const int32_t* table = args.block_table + lane / args.num_heads * args.max_blocks + first;
    const T* start = static_cast<const T*>(args.digests) + lane % args.num_heads * width();
    const int64_t stride = args.num_heads * width(), most = args.num_digests - 1, n = last - first;
    for (int64_t i = 0; i < n; ++i) rows_[i] = start + std::clamp<int64_t>(table[i], 0, most) * stride;
    end_ = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = n; i < end_; ++i) rows_[i] = rows_[n - 1];
    for (int64_t i = 0; i < kAhead * kLanes; ++i) prefetch(i);
  }

  int width() const { return kWidth ? kWidth : width_; }
  const T* operator[](int64_t i) const { return rows_[i]; }

  // What is used kAhead vectors after this one.
  void prefetch_after(int64_t i) const {
    for (int lane = 0; lane < kLanes; ++lane) prefetch(i + kAhead * kLanes + lane);
  }

 private:
  void prefetch(int64_t i) const {
    if (i >= end_) return;
    const char* row = reinterpret_cast<const char*>(rows_[i]);
    for (int line = 0; line < width() * static_cast<int>(sizeof(T)); line += 64) __builtin_prefetch(row + line, 0, 2);
  }

  int width_;
  int64_t end_;
  const T* rows_[kChunk];
};

#if defined(SPARSESERVE_AMX)
// `score` by tiles. Digests lie anywhere, so those of 16 blocks are brought together first.
template <int kWidth>
SPARSESERVE_TILES void score_by_tiles(const Args& args, int64_t lane, int64_t first, int64_t last, float* scores,
                                      int64_t stride) {
  constexpr int kRows = GroupTiles::kRows;
  static_assert(kRows == kLanes);
  const Digests<kWidth, Bf16> digests(args, lane, first, last);
  const int width = digests.width(), num_tiles = static_cast<int>((last - first + kRows - 1) / kRows);
  static thread_local std::vector<float> values;
  static thread_local std::vector<Line> queries, gathered, products;
  queries.assign(GroupTiles::packed_size(width), Line{});
  gathered.resize(2 * kRows * width * sizeof(Bf16) / sizeof(Line));
  products.resize(num_tiles * args.group);
  for (int g = 0; g < args.group; ++g) {
    read_query(args, lane, g, values);
    GroupTiles::pack(values.data(), g, width, queries.data());
  }
  const auto together = [&](int i) { return reinterpret_cast<Bf16*>(gathered.data()) + i % 2 * kRows * width; };
  GroupTiles::configure(args.group);
  for (int i = 0; i <= num_tiles; ++i) {
    if (i < num_tiles) {
      Bf16* to = together(i);
      for (int row = 0; row < kRows; ++row, to += width) {
        const Bf16* from = digests[i * kRows + row];
#pragma GCC unroll 8
        for (int d = 0; d < width; d += 32) _mm512_store_si512(to + d, _mm512_loadu_si512(from + d));
      }
      digests.prefetch_after(i * kRows);
    }
    // Those of the step before: their stores have had time to arrive where tiles are loaded from.
    if (i > 0) {
      GroupTiles::multiply(together(i - 1), width * sizeof(Bf16), width, queries.data(), args.group,
                           products[(i - 1) * args.group].values);
    }
  }
  amx::release();
  with_group(args.group, [&](auto group) {
    const GroupTransposition<group> transpose;
    for (int i = 0; i < num_tiles; ++i) {
      const int64_t block = first + i * kRows;
      const int count = static_cast<int>(std::min<int64_t>(last - block, kRows));
      F32 of_queries[group];
      transpose(products[i * group].values, of_queries);
      for (int g = 0; g < group; ++g) store_first(scores + g * stride + block, of_queries[g] * args.scale, count);
    }
  });
}
#endif

// Scores of blocks [first, last) for each query of the group, `stride` apart.
template <int kWidth, class T>
void score(const Args& args, int64_t lane, int64_t first, int64_t last, float* scores, int64_t stride) {
#if defined(SPARSESERVE_AMX)
  if constexpr (std::is_same_v<T, Bf16>) {
    if (args.amx) return score_by_tiles<kWidth>(args, lane, first, last, scores, stride);
  }
#endif
  const Digests<kWidth, T> digests(args, lane, first, last);
  const int width = digests.width(), stride_of_query = query_stride<T>(width);
  static thread_local std::vector<float> values, queries;
  queries.resize(args.group * stride_of_query);
  for (int g = 0; g < args.group; ++g) {
    read_query(args, lane, g, values);
    make_query<T>(values.data(), width, queries.data() + g * stride_of_query);
  }
  for (int64_t block = first; block < last; block += kLanes) {
    const auto row = [&](int i) { return digests[block - first + i]; };
    const int count = static_cast<int>(std::min<int64_t>(last - block, kLanes));
    digests.prefetch_after(block - first);
    for (int g = 0; g < args.group; g += kMaxQueries) {
      const int num_queries = std::min(args.group - g, kMaxQueries);
      F32 sums[kMaxQueries];
      dot_rows<kWidth, T>(num_queries, queries.data() + g * stride_of_query, width, row, sums);
      for (int i = 0; i < num_queries; ++i) {
        store_first(scores + (g + i) * stride + block, sums[i] * args.scale, count);
      }
    }
  }
}

// ranks[i] (+)= softmax(scores)[i] * weight
void add_softmax(const float* scores, int64_t n, float weight, bool first, float* ranks) {
  static thread_local std::vector<float> powers;
  powers.resize(n + kLanes);
  const int64_t whole = n / kLanes * kLanes;
  const int rest = static_cast<int>(n - whole);
  F32 tail[1];
  load_first(scores + whole, rest, tail);
  F32 maxima = first_lanes(tail[0], rest, splat(scores[0]));
  for (int64_t i = 0; i < whole; i += kLanes) maxima = max(maxima, load(scores + i));
  const float most = reduce_max(maxima);
  F32 sums = first_lanes(exp2((tail[0] - most) * kLog2E), rest, F32{});
  store(powers.data() + whole, sums);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 p = exp2((load(scores + i) - most) * kLog2E);
    store(powers.data() + i, p);
    sums += p;
  }
  const float factor = weight / reduce_add(sums);
  if (first) std::fill(ranks, ranks + n, 0.0f);
  for (int64_t i = 0; i < whole; i += kLanes) store(ranks + i, load(ranks + i) + load(powers.data() + i) * factor);
  for (int64_t i = whole; i < n; ++i) ranks[i] += powers[i] * factor;
}

// Sink and newest blocks rank +inf, blocks that do not exist -inf; what has no score and is not forced, zero.
void force(const Args& args, int64_t lane, float* ranks) {
  const int64_t end = std::clamp<int64_t>(args.num_blocks[lane / args.num_heads], 0, args.max_blocks);
  const int64_t newest = std::clamp<int64_t>(args.num_blocks[lane / args.num_heads] - args.num_newest, 0, end);
  std::fill(ranks + args.num_scored(lane), ranks + end, 0.0f);
  std::fill(ranks, ranks + std::min<int64_t>(args.num_sink, end), kInfinity);
  std::fill(ranks + newest, ranks + end, kInfinity);
  std::fill(ranks + end, ranks + args.max_blocks, -kInfinity);
}

// `scores` of the group, max_blocks apart, become the lane's ranks; per query head they are the result already.
void finish(const Args& args, int64_t lane, const float* scores) {
  const int64_t n = args.num_scored(lane);
  if (args.per_query_head) {
    for (int g = 0; g < args.group; ++g) force(args, lane, args.out + (lane * args.group + g) * args.max_blocks);
    return;
  }
  float* ranks = args.out + lane * args.max_blocks;
  for (int g = 0; g < args.group && n > 0; ++g) {
    add_softmax(scores + g * args.max_blocks, n, 1.0f / args.group, g == 0, ranks);
  }
  force(args, lane, ranks);
}

template <int kWidth, class T>
void run(ffi::ThreadPool& threads, const Args& args, int64_t num_lanes) {
  struct Task {
    int64_t lane, first, last;
  };
  std::vector<Task> tasks;
  const auto unfinished = std::make_unique<std::atomic<int64_t>[]>(num_lanes);
  for (int64_t lane = 0; lane < num_lanes; ++lane) {
    const int64_t n = args.num_scored(lane);
    for (int64_t first = 0; first < n; first += kChunk) tasks.push_back({lane, first, std::min(n, first + kChunk)});
    unfinished[lane] = (n + kChunk - 1) / kChunk;
    if (n == 0) finish(args, lane, nullptr);
  }
  const int64_t lane_scores = args.group * args.max_blocks;
  static thread_local std::vector<float> scratch;
  if (!args.per_query_head && scratch.size() < static_cast<size_t>(num_lanes * lane_scores)) {
    scratch.resize(num_lanes * lane_scores);
  }
  float* scores = args.per_query_head ? args.out : scratch.data();
  parallel_for(threads, tasks.size(), [&](int64_t index) {
    const Task& task = tasks[index];
    float* of_lane = scores + task.lane * lane_scores;
    score<kWidth, T>(args, task.lane, task.first, task.last, of_lane, args.max_blocks);
    if (unfinished[task.lane].fetch_sub(1) == 1) finish(args, task.lane, of_lane);
  });
}

ffi::Error score_blocks(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer digests, Ints block_table,
                        Ints num_blocks, ffi::Result<Floats> out, float scale, bool per_query_head, int32_t num_sink,
                        int32_t num_newest, bool allow_amx) {
  SPARSESERVE_CHECK(rank(digests) == 4 && dim(digests, 2) == 2 && dim(digests, 0) > 0 && dim(digests, 1) > 0,
                    "digests are [num_blocks, num_kv_heads, 2, head_dim]");
  SPARSESERVE_CHECK(rank(q) == 3 && dim(q, 2) == dim(digests, 3) && is_float(q),
                    "q is [num_seqs, num_q_heads, head_dim], bfloat16 or float32");
  SPARSESERVE_CHECK(dim(q, 1) % dim(digests, 1) == 0, "query heads are a multiple of KV heads");
  SPARSESERVE_CHECK(rank(block_table) == 2 && dim(block_table, 0) == dim(q, 0) && dim(num_blocks, 0) == dim(q, 0),
                    "block_table is [num_seqs, max_blocks], num_blocks [num_seqs]");
  const int64_t num_heads = dim(digests, 1), max_blocks = dim(block_table, 1), num_lanes = dim(q, 0) * num_heads;
  const int group = static_cast<int>(dim(q, 1) / num_heads), head_dim = static_cast<int>(dim(q, 2));
  SPARSESERVE_CHECK(static_cast<int64_t>(out->element_count()) == num_lanes * (per_query_head ? group : 1) * max_blocks,
                    "the result is [num_seqs, heads that select, max_blocks]");
#if defined(SPARSESERVE_AMX)
  const bool amx = allow_amx && GroupTiles::supports(2 * head_dim, group);
#else
  const bool amx = false;
#endif
  const Args args{q, digests.untyped_data(), block_table.typed_data(), num_blocks.typed_data(), dim(digests, 0),
                  num_heads, max_blocks, head_dim, group, scale, per_query_head, num_sink, num_newest,
                  amx, out->typed_data()};
  SPARSESERVE_CHECK(with_float_type(digests.element_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, Bf16>) {  // as in decode_attention.cc
      if (head_dim == 64) return run<128, T>(threads, args, num_lanes);
      if (head_dim == 128) return run<256, T>(threads, args, num_lanes);
    }
    run<0, T>(threads, args, num_lanes);
  }), "digests are bfloat16 (or their bits) or float32");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeScoreBlocks, sparseserve::score_blocks,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Ret<sparseserve::Floats>()
                            .Attr<float>("scale")
                            .Attr<bool>("per_query_head")
                            .Attr<int32_t>("num_sink_blocks")
                            .Attr<int32_t>("num_newest_blocks")
                            .Attr<bool>("allow_amx"));
