// The linear operation with AMX tiles: bfloat16 products 16 x 16 x 32 in one instruction.
//
// A product of tiles takes 16 rows of one matrix as they are in memory and 16 rows of the other packed: pairs of
// elements, transposed. With few rows of x those are packed and the weight, whose reading takes the time, is used where
// it lies; with many the weight is packed, once a call, and results come out as they are to be written. int8 weights
// are widened to bfloat16, which is exact, on their way.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "amx.h"
#include "linear_call.h"
#include "parallel.h"
#include "transpose.h"

namespace sparseserve::linear {

constexpr int kTileRows = 16, kTileDepth = 32;  // of a tile: rows, and elements of a row
constexpr int kTileWords = kTileRows * kTileDepth / 2, kTileFloats = kTileRows * kTileRows;

// Memory of a thread, kept from call to call: fresh pages cost more than small products.
template <class Owner, class Element>
Element* scratch(int64_t elements) {
  constexpr int64_t kAlign = 64;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  const int64_t bytes = (elements * sizeof(Element) + kAlign - 1) / kAlign * kAlign;
  if (size < bytes) {
    memory.reset(std::aligned_alloc(kAlign, bytes));
    size = bytes;
  }
  return static_cast<Element*>(memory.get());
}

// 32 elements as bfloat16.
inline S32 read_pairs(const Bf16* p) {
  S32 pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return pairs;
}
inline S32 read_pairs(const int8_t* p) {
  return (S32)_mm512_cvtne2ps_pbh((__m512)load(p + kLanes), (__m512)load(p));
}
// The first n of them, zeros after them.
template <class T>
inline S32 read_pairs(const T* p, int n) {
  if (n >= kTileDepth) return read_pairs(p);
  T whole[kTileDepth] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return read_pairs(whole);
}

// One tile of up to 16 rows and 32 columns, zeros around them, transposed: [16 pairs of columns][16 rows].
template <class T>
inline void pack_tile(const T* from, int64_t stride, int rows, int columns, uint32_t* to) {
  S32 square[kLanes];
  for (int i = 0; i < kTileRows; ++i) square[i] = i < rows ? read_pairs(from + i * stride, columns) : S32{};
  transpose(square);
  for (int i = 0; i < kTileRows; ++i) std::memcpy(to + i * kTileRows, &square[i], sizeof(S32));
}

// A row of such tiles, every `of`-th in memory.
template <class T>
inline void pack_tiles(const T* from, int64_t stride, int rows, int columns, uint32_t* to, int of) {
  for (int k = 0; k < columns; k += kTileDepth, to += of * kTileWords) {
    pack_tile(from + k, stride, rows, columns - k, to);
  }
}

// Up to 16 rows that are loaded as tiles.
struct Rows {
  const Bf16* data;
  int64_t stride_bytes;
};

// Rows as they are, if they are whole bfloat16 tiles, else padded copies in `to` [16][32 * steps]; `between()` runs with
// every row that is copied.
template <class T, class Between>
inline Rows rows_of(const T* from, int columns, int rows, Bf16* to, Between&& between) {
  const int width = round_up(columns, kTileDepth);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (rows >= kTileRows && columns == width) return {from, columns * int64_t{sizeof(Bf16)}};
  }
  for (int i = 0; i < kTileRows; ++i, to += width) {
    between();
    const T* row = from + static_cast<int64_t>(i) * columns;
    const int whole = i < rows ? columns / kTileDepth * kTileDepth : 0;
    for (int k = 0; k < whole; k += kTileDepth) {
      const S32 pairs = read_pairs(row + k);
      std::memcpy(to + k, &pairs, sizeof pairs);
    }
    for (int k = whole; k < width; k += kTileDepth) {
      const S32 pairs = i < rows ? read_pairs(row + k, columns - k) : S32{};
      std::memcpy(to + k, &pairs, sizeof pairs);
    }
  }
  return {to - kTileRows * width, width * int64_t{sizeof(Bf16)}};
}

// Where tiles of results are: [32][kColumns * 16] floats, or what they start from; stride 0 repeats one row.
struct Results {
  float* data;
  int64_t stride_bytes;
};

// c = start + a b: two rows of tiles with one or two packed ones, which take turns in memory, `steps` tiles long. No
// start: zeros. `between(step)` runs with every step, beside the products. Packed tiles are loaded with the hint that
// they are not needed again soon: with many rows those of x are, and should stay in the L1 cache.
template <int kColumns, class Between>
SPARSESERVE_TILES inline __attribute__((always_inline)) void multiply(const Rows (&a)[2], const uint32_t* b, int steps,
                                                                      Results start, Results c, Between&& between) {
  SPARSESERVE_MEMORY_BARRIER();
  if (start.data == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    const float* lower = start.data + start.stride_bytes / sizeof(float) * kTileRows;
    _tile_loadd(0, start.data, start.stride_bytes);
    _tile_loadd(2, lower, start.stride_bytes);
    if (kColumns == 2) {
      _tile_loadd(1, start.data + kTileRows, start.stride_bytes);
      _tile_loadd(3, lower + kTileRows, start.stride_bytes);
    }
  }
  for (int k = 0; k < steps; ++k, b += kColumns * kTileWords) {
    _tile_stream_loadd(6, b, 64);
    _tile_loadd(4, a[0].data + k * kTileDepth, a[0].stride_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kColumns == 2) {
      _tile_stream_loadd(7, b + kTileWords, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, a[1].data + k * kTileDepth, a[1].stride_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    between(k);
  }
  float* lower = c.data + c.stride_bytes / sizeof(float) * kTileRows;
  _tile_stored(0, c.data, c.stride_bytes);
  _tile_stored(2, lower, c.stride_bytes);
  if (kColumns == 2) {
    _tile_stored(1, c.data + kTileRows, c.stride_bytes);
    _tile_stored(3, lower + kTileRows, c.stride_bytes);
  }
  SPARSESERVE_MEMORY_BARRIER();
}

// T: elements of the weight.
template <class T>
class Amx {
 public:
  explicit Amx(const Call& call) : call_(call), steps_((call.in + kTileDepth - 1) / kTileDepth) {}

  void run(ffi::ThreadPool& threads) {
    if (call_.rows <= kFewRows) {
      few(threads);
    } else {
      many(threads);
    }
  }

 private:
  static constexpr int kFewRows = 256;
  static constexpr int64_t kTaskBytes = 128 << 10;   // of the weight, in a task with few rows
  static constexpr int64_t kPackedBytes = 1 << 20;   // of the weight that is packed at a time: half an L2 cache
  static constexpr int kTaskRows = 64;               // in a task with many rows

  struct Packed {};
  struct Padded {};

  // A panel is two tiles of rows of the weight: neighbours, or a gate and its up.
  int panel_features() const { return call_.gated ? kTileRows : 2 * kTileRows; }
  int num_panels() const { return (call_.features() + panel_features() - 1) / panel_features(); }
  // The first row of a panel's tile in the weight, and how many there are.
  int weight_row(int panel, int tile) const {
    return panel * panel_features() + tile * (call_.gated ? call_.features() : kTileRows);
  }
  int weight_rows(int panel, int tile) const {
    const int first = panel * panel_features() + (call_.gated ? 0 : tile * kTileRows);
    return std::clamp(call_.features() - first, 0, kTileRows);
  }
  const T* weight_at(int row) const { return static_cast<const T*>(call_.weight) + static_cast<int64_t>(row) * call_.in; }

  int64_t strip_words() const { return int64_t{steps_} * kTileWords; }

  // --- few rows ------------------------------------------------------------------------------------------------------

  void few(ffi::ThreadPool& threads) {
    const int strips = static_cast<int>((call_.rows + kTileRows - 1) / kTileRows);
    uint32_t* x = scratch<Packed, uint32_t>(strips * strip_words());
    for (int s = 0; s < strips; ++s) {  // in pairs, which take turns
      const int64_t row = int64_t{s} * kTileRows;
      const int rows = static_cast<int>(std::min<int64_t>(kTileRows, call_.rows - row)), of = s / 2 * 2 + 1 < strips ? 2 : 1;
      pack_tiles(call_.x + row * call_.in, call_.in, rows, call_.in, x + s / 2 * 2 * strip_words() + s % 2 * kTileWords, of);
    }
    const int64_t panel_bytes = int64_t{2 * kTileRows} * call_.in * sizeof(T);
    const int panels = num_panels(), grain = static_cast<int>(std::max<int64_t>(1, kTaskBytes / panel_bytes));
    parallel_for(threads, (panels + grain - 1) / grain, [&](int64_t task) {
      const int first = static_cast<int>(task) * grain;
      few_panels(first, std::min(panels, first + grain), x, strips);
    });
  }

  SPARSESERVE_TILES void few_panels(int first, int last, const uint32_t* x, int strips) {
    const int width = round_up(call_.in, kTileDepth);
    Bf16* padded = scratch<Padded, Bf16>(2 * kTileRows * width);
    const int row_lines = static_cast<int>((call_.in * sizeof(T) + 63) / 64);
    alignas(64) float sums[4 * kTileFloats];
    amx::configure();
    for (int panel = first; panel < last; ++panel) {
      Prefetcher ahead[2] = {next(panel + 1, last, 0), next(panel + 1, last, 1)};
      Rows weight[2];
      for (int t = 0; t < 2; ++t) {
        weight[t] = rows_of(weight_at(weight_row(panel, t)), call_.in, weight_rows(panel, t),
                            padded + t * kTileRows * width, [&] { ahead[t].advance(row_lines); });
      }
      const auto prefetch = [&](int) {
        ahead[0].advance(kTileRows);
        ahead[1].advance(kTileRows);
      };
      for (int s = 0; s < strips; s += 2) {
        const uint32_t* columns = x + s * strip_words();
        if (s + 1 < strips) {
          multiply<2>(weight, columns, steps_, {nullptr, 0}, {sums, 128}, prefetch);
        } else {
          multiply<1>(weight, columns, steps_, {nullptr, 0}, {sums, 128}, prefetch);
        }
        for (int c = 0; c < 2 && s + c < strips; ++c) {
          write_transposed(panel, int64_t{s + c} * kTileRows, sums + c * kTileRows);
        }
      }
    }
    amx::release();
  }

  Prefetcher next(int panel, int last, int tile) const {
    if (panel == last) return {nullptr, 0};
    return {weight_at(weight_row(panel, tile)), weight_rows(panel, tile) * int64_t{call_.in} * int64_t{sizeof(T)}};
  }

  // sums[32][32]: two tiles of [16 rows of the weight][16 rows of x].
  void write_transposed(int panel, int64_t row, const float* sums) {
    S32 squares[2][kLanes];
    for (int t = 0; t < 2; ++t) {
      for (int i = 0; i < kTileRows; ++i) {
        std::memcpy(&squares[t][i], sums + (t * kTileRows + i) * 2 * kTileRows, sizeof(S32));
      }
      transpose(squares[t]);
    }
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, call_.rows - row));
    for (int i = 0; i < rows; ++i) write_panel(call_, panel, row + i, (F32)squares[0][i], (F32)squares[1][i]);
  }

  void write_panel(const Call& call, int panel, int64_t row, F32 first, F32 second) const {
    const int feature = panel * panel_features();
    linear::write(call, row, feature, weight_rows(panel, 0), first, second);
    if (!call.gated && weight_rows(panel, 1) > 0) {
      linear::write(call, row, feature + kTileRows, weight_rows(panel, 1), second, F32{});
    }
  }

  // --- many rows -----------------------------------------------------------------------------------------------------

  void many(ffi::ThreadPool& threads) {
    const int panels = num_panels();
    const int64_t panel_words = 2 * strip_words();
    const int blocks = static_cast<int>((panels * panel_words * 4 + kPackedBytes - 1) / kPackedBytes);
    const int block = (panels + blocks - 1) / blocks;
    uint32_t* packed = scratch<Packed, uint32_t>(block * panel_words);
    for (int first = 0; first < panels; first += block) {
      const int last = std::min(panels, first + block);
      parallel_for(threads, last - first, 4, [&](int64_t i) {
        const int panel = first + static_cast<int>(i);
        for (int t = 0; t < 2; ++t) {
          pack_tiles(weight_at(weight_row(panel, t)), call_.in, weight_rows(panel, t), call_.in,
                     packed + i * panel_words + t * kTileWords, 2);
        }
      });
      parallel_for(threads, (call_.rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
        for (int64_t row = task * kTaskRows; row < std::min(call_.rows, (task + 1) * kTaskRows); row += 2 * kTileRows) {
          many_rows(row, first, last, packed);
        }
      });
    }
  }

  // 32 rows of x with the panels [first, last). Sums that still have to be worked on are written while the products of
  // the next panel are under way.
  SPARSESERVE_TILES void many_rows(int64_t row, int first, int last, const uint32_t* packed) {
    const Call call = call_;  // a copy: for all the compiler knows, results could be written over the caller's
    constexpr int kRows = 2 * kTileRows;
    const int width = round_up(call.in, kTileDepth);
    Bf16* padded = scratch<Padded, Bf16>(kRows * width);
    const int rows = static_cast<int>(std::min<int64_t>(kRows, call.rows - row));
    Rows x[2];
    for (int t = 0; t < 2; ++t) {
      const int some = std::clamp(rows - t * kTileRows, 0, kTileRows);
      x[t] = rows_of(call.x + (row + t * kTileRows) * call.in, call.in, some, padded + t * kTileRows * width, [] {});
    }
    const int rows_a_step = (kRows + steps_ - 1) / steps_;
    const bool streams = past_the_cache();
    alignas(64) float sums[2][4 * kTileFloats];
    int waiting = -1;  // the panel whose sums are in sums[waiting % 2]
    const auto write_rows = [&](int begin, int end) {
      for (int r = begin; r < std::min(end, rows); ++r) {
        const float* of_row = sums[waiting % 2] + r * kRows;
        if (streams) {
          stream_panel(call, waiting, row + r, load(of_row), load(of_row + kTileRows));
        } else {
          write_panel(call, waiting, row + r, load(of_row), load(of_row + kTileRows));
        }
      }
    };
    const int64_t after = std::clamp<int64_t>(call.rows - row - kRows, 0, kRows);
    Prefetcher ahead(call.x + (row + rows) * call.in, after * call.in * int64_t{sizeof(Bf16)});
    int next = first;  // the panel that follows
    const auto write_some = [&](int step) {
      ahead.advance(2);
      const int begin = step * rows_a_step, end = std::min(rows, begin + rows_a_step);
      if (waiting >= 0) write_rows(begin, end);
      if (next < last) prefetch_panel(call, next, row + begin, row + end, streams);
    };
    const int64_t stride = call.features() * int64_t{sizeof(float)};
    amx::configure();
    for (int panel = first; panel < last; ++panel, packed += 2 * strip_words()) {
      const bool direct = !streams && is_direct() && rows == kRows && weight_rows(panel, 1) == kTileRows;
      next = panel + 1;
      if (direct) {
        const int64_t at = row * call.features() + panel * panel_features();
        multiply<2>(x, packed, steps_, start(panel, at, stride), {call.result + at, stride}, write_some);
      } else {
        multiply<2>(x, packed, steps_, {nullptr, 0}, {sums[panel % 2], kRows * sizeof(float)}, write_some);
      }
      waiting = direct ? -1 : panel;
    }
    amx::release();
    if (waiting >= 0) write_rows(0, rows);
    _mm_sfence();  // streamed lines must be there before this task counts as done
  }

  // Where rows of a panel's results are written, and what they start from: waiting for it would stop the products.
  void prefetch_panel(const Call& call, int panel, int64_t begin, int64_t end, bool streams) const {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * call.features() + panel * panel_features();
      if (call.gated) {
        __builtin_prefetch(call.gated_result + at, 1);
        continue;
      }
      for (int t = 0; t < 2; ++t) {
        if (!streams) __builtin_prefetch(call.result + at + t * kTileRows, 1);
        if (call.residual != nullptr) __builtin_prefetch(call.residual + at + t * kTileRows);
      }
    }
  }

  // With residuals, results that fill an L2 cache are written past it, whole lines at a time: as much is read as is
  // written then, and a line that is written otherwise is read first.
  bool past_the_cache() const {
    constexpr int64_t kCacheBytes = 2 << 20;
    const int64_t bytes = call_.rows * call_.features() * static_cast<int64_t>(sizeof(float));
    return call_.residual != nullptr && bytes >= kCacheBytes && call_.features() % (2 * kTileRows) == 0 &&
           reinterpret_cast<uintptr_t>(call_.result) % 64 == 0;
  }

  void stream_panel(const Call& call, int panel, int64_t row, F32 first, F32 second) const {
    const int feature = panel * panel_features();
    float* to = call.result + row * call.features() + feature;
    _mm512_stream_ps(to, (__m512)finished(call, row, feature, kTileRows, first, F32{}));
    _mm512_stream_ps(to + kTileRows, (__m512)finished(call, row, feature + kTileRows, kTileRows, second, F32{}));
  }

  // Sums are results as they are, if they start from the bias or from the residual.
  bool is_direct() const {
    return !call_.gated && call_.scales == nullptr && (call_.bias == nullptr || call_.residual == nullptr);
  }
  Results start(int panel, int64_t at, int64_t stride) const {
    if (call_.residual != nullptr) return {const_cast<float*>(call_.residual) + at, stride};
    if (call_.bias != nullptr) return {const_cast<float*>(call_.bias) + panel * panel_features(), 0};
    return {nullptr, 0};
  }

  const Call& call_;
  const int steps_;
};

}  // namespace sparseserve::linear
