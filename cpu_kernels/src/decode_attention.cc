// Decode attention: one query token a sequence over blocks of the paged pool, read where they lie.
//
// A lane is one KV head of one sequence. Its blocks are taken kChunkTokens at a time: a chunk has an online softmax of
// its own (Milakov and Gimelshein, arXiv 1805.02867), and the chunks of a lane are merged in order by whichever thread
// finishes the last of them (flash-decoding). Chunks are the unit of work, so two threads share even one sequence
// evenly, and a result does not depend on the number of threads or on what else is in the batch, to the last bit.
//
// With AMX a chunk is done by decode_amx.h. Else per block: scores of kLanes keys at a time with the transposing sums
// of simd.h, softmax in base 2, and weighted sums of values. The next block is prefetched row by row meanwhile. What
// bounds it is memory: a piece is read once for all query heads of its group.
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "decode_amx.h"
#include "ffi_op.h"
#include "int8_rows.h"
#include "parallel.h"
#include "rows.h"
#include "values.h"

namespace sparseserve {
namespace {

constexpr int kChunkTokens = 256;
constexpr float kNoKeys = -1e30f;  // maximum of no scores: finite, so that differences are
constexpr float kMasked = -__builtin_inff();
constexpr int kHeader = 16;  // of a query's state: maximum and sum; its accumulator comes a cache line later

struct Args {
  ffi::AnyBuffer q;
  const void* pool;
  PoolShape shape;
  const int32_t *block_ids, *num_valid;
  const bool* mask;          // null: none
  const float* kv_scales;    // null: none
  int64_t num_lanes, num_blocks;  // blocks a lane may name
  int group;
  float factor;  // scale * log2(e)
  bool amx;
  float* out;
};

struct Task {
  int64_t lane;
  int64_t first, last;  // blocks
};

// Scratch of one thread.
struct Workspace {
  std::vector<float> values, queries, scores;  // scores, then weights: `[group, token_stride]`
  std::vector<int16_t> int_queries, int_weights;  // for products in integers, and their scales
  std::vector<float> query_scales, weight_scales;
};

// Of a query's state.
template <class T>
int state_stride(const Args& args) {
  return kHeader + round_up(args.shape.head_dim, Steps<T>::kSize);
}
inline int token_stride(const Args& args) { return round_up(args.shape.block_size, 16); }

template <int kWidth, class T>
void prepare(const Args& args, int64_t lane, Workspace& work) {
  const int width = args.shape.head_dim, stride = query_stride<T>(width);
  work.values.resize(width);
  work.queries.resize(args.group * stride);
  work.scores.resize(args.group * token_stride(args));
  for (int g = 0; g < args.group; ++g) {
    read_floats(args.q, (lane * args.group + g) * width, width, work.values.data());
    make_query<T>(work.values.data(), width, work.queries.data() + g * stride);
  }
  if constexpr (kIntegerRows<kWidth, T>) {
    work.int_queries.resize(args.group * width);
    work.int_weights.resize(args.group * token_stride(args));
    work.query_scales.resize(args.group);
    work.weight_scales.resize(args.group);
    for (int g = 0; g < args.group; ++g) {
      const float* query = work.queries.data() + g * stride;
      work.query_scales[g] = to_int16(query, width, width, work.int_queries.data() + g * width);
    }
  }
}

// Scores of the first n keys times `factor`; the rest of the last vector is masked.
template <int kWidth, class T>
void score_keys(const Args& args, const T* keys, int n, float factor, Workspace& work, Prefetcher& prefetcher) {
  const int width = kWidth ? kWidth : args.shape.head_dim;
  for (int t = 0; t < n; t += kLanes) {
    const int last = n - 1 - t;  // rows past it are not read
    const T* base = keys + static_cast<int64_t>(t) * width;
    const auto row = [&](int i) {
      if (i % 4 == 0) prefetcher.advance((4 * width * sizeof(T) + 63) / 64);
      return base + (i < last ? i : last) * width;
    };
    for (int g = 0; g < args.group; g += kMaxQueries) {
      const int num_queries = std::min(args.group - g, kMaxQueries);
      F32 sums[kMaxQueries];
      if constexpr (kIntegerRows<kWidth, T>) {
        dot_rows<kWidth>(num_queries, work.int_queries.data() + g * width, row, sums);
        for (int i = 0; i < num_queries; ++i) sums[i] *= work.query_scales[g + i];
      } else {
        dot_rows<kWidth, T>(num_queries, work.queries.data() + g * query_stride<T>(width), width, row, sums);
      }
      for (int i = 0; i < num_queries; ++i) {
        const F32 s = first_lanes(sums[i] * factor, last + 1, splat(kMasked));
        store(work.scores.data() + (g + i) * token_stride(args) + t, s);
      }
    }
  }
}

// Online softmax of one query: n scores become weights, and its state is brought up to the new maximum.
void update(float* state, int width, float* scores, int n, float value_scale) {
  F32 most = load(scores);
  for (int t = kLanes; t < n; t += kLanes) most = max(most, load(scores + t));
  const float new_max = reduce_max(most);
  if (new_max > state[0]) {
    const F32 alpha = exp2(splat(state[0] - new_max));
    state[0] = new_max;
    state[1] *= alpha[0];
    for (int d = 0; d < width; d += kLanes) store(state + kHeader + d, load(state + kHeader + d) * alpha);
  }
  F32 sum = {};
  for (int t = 0; t < n; t += kLanes) {
    const F32 p = exp2(load(scores + t) - state[0]);
    sum += p;
    store(scores + t, p * value_scale);
  }
  state[1] += reduce_add(sum);
}

// Adds the values of a block, whose first n tokens have weights.
template <int kWidth, class T>
void add_block(const Args& args, const T* values, int n, Workspace& work, float* states, Prefetcher& prefetcher) {
  const int width = kWidth ? kWidth : args.shape.head_dim, stride = state_stride<T>(args), tokens = token_stride(args);
  for (int g = 0; g < args.group; g += kMaxQueries) {
    const int num_queries = std::min(args.group - g, kMaxQueries);
    const float* weights = work.scores.data() + g * tokens;
    float* acc = states + g * stride + kHeader;
    if constexpr (kIntegerRows<kWidth, T>) {
      int16_t* integers = work.int_weights.data() + g * tokens;
      float* scales = work.weight_scales.data() + g;
      for (int i = 0; i < num_queries; ++i) {
        scales[i] = to_int16(weights + i * tokens, n, tokens, integers + i * tokens);
      }
      add_rows<kWidth>(num_queries, values, n, integers, tokens, scales, acc, stride, prefetcher);
    } else {
      add_values(num_queries, values, width, n, weights, tokens, acc, stride, prefetcher,
                 (width * sizeof(T) + 63) / 64);
    }
  }
}

template <int kWidth, class T>
void attend_block(const Args& args, const Task& task, int64_t index, const T* next, Workspace& work, float* states) {
  const PoolShape& shape = args.shape;
  const int64_t entry = task.lane * args.num_blocks + index, head = task.lane % shape.num_heads;
  const int n = std::min(args.num_valid[entry], shape.block_size);
  const int64_t id = std::clamp<int64_t>(args.block_ids[entry], 0, shape.num_blocks - 1);
  const T* keys = static_cast<const T*>(args.pool) + shape.offset(id, head);
  const float* scales = args.kv_scales ? args.kv_scales + (id * shape.num_heads + head) * 2 : nullptr;
  const int stride = state_stride<T>(args), tokens = token_stride(args);
  Prefetcher prefetcher(next, shape.piece() * sizeof(T));
  score_keys<kWidth>(args, keys, n, scales ? args.factor * scales[0] : args.factor, work, prefetcher);
  for (int g = 0; g < args.group; ++g) {
    float* scores = work.scores.data() + g * tokens;
    const bool off = args.mask && !args.mask[(task.lane * args.group + g) * args.num_blocks + index];
    if (off) std::fill(scores, scores + round_up(n, kLanes), kMasked);
    update(states + g * stride, stride - kHeader, scores, n, scales ? scales[1] : 1.0f);
  }
  add_block<kWidth>(args, keys + shape.half(), n, work, states, prefetcher);
}

// The keys of the next block with tokens, or null.
template <class T>
const T* next_keys(const Args& args, const Task& task, int64_t index) {
  const int64_t entry = task.lane * args.num_blocks + index + 1;
  if (index + 1 >= args.num_blocks || args.num_valid[entry] <= 0) return nullptr;
  const int64_t id = std::clamp<int64_t>(args.block_ids[entry], 0, args.shape.num_blocks - 1);
  return static_cast<const T*>(args.pool) + args.shape.offset(id, task.lane % args.shape.num_heads);
}

#if defined(SPARSESERVE_AMX)
// The tokens of a task's blocks, 16 at a time.
void list_tokens(const Args& args, const Task& task, std::vector<DecodeAmx::Tokens>& tokens) {
  const PoolShape& shape = args.shape;
  tokens.clear();
  for (int64_t index = task.first; index < task.last; ++index) {
    const int64_t entry = task.lane * args.num_blocks + index;
    const int n = std::min(args.num_valid[entry], shape.block_size);
    const int64_t id = std::clamp<int64_t>(args.block_ids[entry], 0, shape.num_blocks - 1);
    const Bf16* keys = static_cast<const Bf16*>(args.pool) + shape.offset(id, task.lane % shape.num_heads);
    const bool* mask = args.mask ? args.mask + task.lane * args.group * args.num_blocks + index : nullptr;
    for (int t = 0; t < n; t += DecodeAmx::kRows) {
      const Bf16* rows = keys + t * shape.head_dim;
      tokens.push_back({rows, rows + shape.half(), std::min(n - t, DecodeAmx::kRows), mask});
    }
  }
}

void attend_by_tiles(const Args& args, const Task& task, const Task* next, float* states) {
  static thread_local DecodeAmx amx;
  static thread_local std::vector<float> queries;
  static thread_local std::vector<DecodeAmx::Tokens> tokens, next_tokens;
  const int width = args.shape.head_dim;
  queries.resize(args.group * width);
  read_floats(args.q, task.lane * args.group * width, args.group * width, queries.data());
  amx.set_queries(queries.data(), args.group, width);
  list_tokens(args, task, tokens);
  next_tokens.clear();
  if (next) list_tokens(args, *next, next_tokens);
  amx.attend(tokens, next_tokens, args.factor, args.num_blocks, states, state_stride<Bf16>(args), kHeader);
}
#endif

// next: what is likely to be this thread's next task, or null.
template <int kWidth, class T>
void attend(const Args& args, const Task& task, const Task* next, float* states) {
  static thread_local Workspace work;
  const int stride = state_stride<T>(args);
  for (int g = 0; g < args.group; ++g) {
    std::fill(states + g * stride, states + (g + 1) * stride, 0.0f);
    states[g * stride] = kNoKeys;
  }
#if defined(SPARSESERVE_AMX)
  if constexpr (std::is_same_v<T, Bf16>) {
    if (args.amx) return attend_by_tiles(args, task, next, states);
  }
#endif
  prepare<kWidth, T>(args, task.lane, work);
  for (int64_t index = task.first; index < task.last; ++index) {
    if (args.num_valid[task.lane * args.num_blocks + index] <= 0) continue;
    attend_block<kWidth>(args, task, index, next_keys<T>(args, task, index), work, states);
  }
}

// The lane's result from the states of its chunks; nothing to attend to: zeros.
template <class T>
void finish(const Args& args, int64_t lane, const float* states, int64_t num_chunks) {
  const int width = args.shape.head_dim, stride = state_stride<T>(args);
  const int64_t chunk = static_cast<int64_t>(args.group) * stride;
  std::vector<float> sums(stride - kHeader);
  for (int g = 0; g < args.group; ++g) {
    const float* state = states + g * stride;
    float most = kNoKeys, total = 0.0f;
    for (int64_t c = 0; c < num_chunks; ++c) most = std::max(most, state[c * chunk]);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t c = 0; c < num_chunks; ++c) {
      const float weight = num_chunks == 1 ? 1.0f : exp2(splat(state[c * chunk] - most))[0];
      total += weight * state[c * chunk + 1];
      for (int d = 0; d < stride - kHeader; ++d) sums[d] += weight * state[c * chunk + kHeader + d];
    }
    const float norm = total == 0.0f ? 0.0f : 1.0f / total;
    float* out = args.out + (lane * args.group + g) * width;
    for (int d = 0; d < width; ++d) out[d] = total == 0.0f ? 0.0f : sums[Steps<T>::place(d)] * norm;
  }
}

// One past the last block of the lane that has tokens. Tables of dense layers are wide and mostly empty.
int64_t live_blocks(const Args& args, int64_t lane) {
  const int32_t* counts = args.num_valid + lane * args.num_blocks;
  int64_t end = args.num_blocks;
  for (; end >= 32; end -= 32) {
    int32_t any = 0;
    for (int i = 1; i <= 32; ++i) any |= counts[end - i] > 0;
    if (any) break;
  }
  while (end > 0 && counts[end - 1] <= 0) --end;
  return end;
}

template <int kWidth, class T>
void run(ffi::ThreadPool& threads, const Args& args) {
  const int64_t chunk_blocks = std::max(1, kChunkTokens / args.shape.block_size);
  std::vector<Task> tasks;
  std::vector<int64_t> first_task(args.num_lanes + 1);
  for (int64_t lane = 0; lane < args.num_lanes; ++lane) {
    first_task[lane] = tasks.size();
    const int64_t end = live_blocks(args, lane);
    for (int64_t first = 0; first < end; first += chunk_blocks) {
      tasks.push_back({lane, first, std::min(end, first + chunk_blocks)});
    }
    if (end == 0) finish<T>(args, lane, nullptr, 0);
  }
  first_task[args.num_lanes] = tasks.size();
  // Kept between calls of a thread: fresh memory of this size would have to be mapped each time.
  static thread_local std::vector<float> scratch;
  const int64_t state_size = static_cast<int64_t>(args.group) * state_stride<T>(args);
  if (scratch.size() < tasks.size() * state_size) scratch.resize(tasks.size() * state_size);
  float* states = scratch.data();
  const auto unfinished = std::make_unique<std::atomic<int64_t>[]>(args.num_lanes);
  for (int64_t lane = 0; lane < args.num_lanes; ++lane) unfinished[lane] = first_task[lane + 1] - first_task[lane];
  const size_t num_threads = threads.num_threads();
  parallel_for(threads, tasks.size(), [&](int64_t index) {
    const Task& task = tasks[index];
    const Task* next = index + num_threads < tasks.size() ? &tasks[index + num_threads] : nullptr;
    attend<kWidth, T>(args, task, next, states + index * state_size);
    if (unfinished[task.lane].fetch_sub(1) == 1) {
      const int64_t begin = first_task[task.lane];
      finish<T>(args, task.lane, states + begin * state_size, first_task[task.lane + 1] - begin);
    }
  });
}

// Widths that are known to the compiler are some tenths faster; for the rest one version saves seconds of compiling.
template <class T>
void dispatch(ffi::ThreadPool& threads, const Args& args) {
  if constexpr (!std::is_same_v<T, float>) {
    if (args.shape.head_dim == 64) return run<64, T>(threads, args);
    if (args.shape.head_dim == 128) return run<128, T>(threads, args);
  }
  run<0, T>(threads, args);
}

ffi::Error decode_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, Ints block_ids,
                            Ints num_valid, ffi::Buffer<ffi::PRED> mask, Floats kv_scales, ffi::Result<Floats> out,
                            float scale, bool allow_amx) {
  SPARSESERVE_CHECK(is_pool(pool), "pool is [num_blocks, num_kv_heads, 2, block_size, head_dim]");
  const PoolShape shape(pool);
  SPARSESERVE_CHECK(rank(q) == 3 && dim(q, 2) == shape.head_dim && is_float(q),
                    "q is [num_seqs, num_q_heads, head_dim], bfloat16 or float32");
  SPARSESERVE_CHECK(rank(block_ids) == 3 && dim(block_ids, 0) == dim(q, 0) && dim(block_ids, 1) == shape.num_heads,
                    "block_ids is [num_seqs, num_kv_heads, num_selected]");
  SPARSESERVE_CHECK(same_shape(num_valid, block_ids), "num_valid is shaped as block_ids");
  SPARSESERVE_CHECK(shape.num_blocks > 0 && shape.num_heads > 0 && dim(q, 1) % shape.num_heads == 0,
                    "query heads are a multiple of KV heads");
  SPARSESERVE_CHECK(out->element_count() == q.element_count(), "the result is shaped as q");
  const int64_t num_lanes = dim(q, 0) * shape.num_heads, group = dim(q, 1) / shape.num_heads;
  const int64_t num_mask = mask.element_count(), num_scales = kv_scales.element_count();
  SPARSESERVE_CHECK(num_mask == 0 || num_mask == static_cast<int64_t>(block_ids.element_count()) * group,
                    "query_mask is [num_seqs, num_kv_heads, group, num_selected]");
  const bool quantised = pool.element_type() == ffi::DataType::S8;
  SPARSESERVE_CHECK(num_scales == (quantised ? shape.num_blocks * shape.num_heads * 2 : 0),
                    "kv_scales is [num_blocks, num_kv_heads, 2], for an int8 pool only");
#if defined(SPARSESERVE_AMX)
  const bool amx = allow_amx && DecodeAmx::supports(shape.head_dim, shape.block_size, static_cast<int>(group));
#else
  const bool amx = false;
#endif
  const Args args{q, pool.untyped_data(), shape, block_ids.typed_data(), num_valid.typed_data(),
                  num_mask ? mask.typed_data() : nullptr, num_scales ? kv_scales.typed_data() : nullptr,
                  num_lanes, dim(block_ids, 2), static_cast<int>(group), scale * kLog2E, amx,
                  out->typed_data()};
  if (quantised) {
    dispatch<int8_t>(threads, args);
  } else {
    SPARSESERVE_CHECK(with_float_type(pool.element_type(), [&](auto* type) {
      dispatch<std::remove_pointer_t<decltype(type)>>(threads, args);
    }), "the pool is bfloat16 (or its bits), float32 or int8");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparseserve

SPARSESERVE_FFI_HANDLER(SparseServeDecodeAttention, sparseserve::decode_attention,
                        xla::ffi::Ffi::Bind()
                            .Ctx<xla::ffi::ThreadPool>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<xla::ffi::AnyBuffer>()
                            .Arg<sparseserve::Ints>()
                            .Arg<sparseserve::Ints>()
                            .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                            .Arg<sparseserve::Floats>()
                            .Ret<sparseserve::Floats>()
                            .Attr<float>("scale")
                            .Attr<bool>("allow_amx"));
