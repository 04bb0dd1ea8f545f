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
constexpr int kTileWords = kTileRows * kTileDepth / 2;

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

// A run of tiles along one row of tiles, `steps` of them.
template <class T>
inline void pack_tiles(const T* from, int64_t stride, int rows, int columns, uint32_t* to) {
  for (int k = 0; k < columns; k += kTileDepth, to += kTileWords) {
    pack_tile(from + k, stride, rows, columns - k, to);
  }
}

// Up to 16 rows that are loaded as tiles.
struct Rows {
  const Bf16* data;
  int64_t stride_bytes;
};

// Rows as they are, if they are whole bfloat16 tiles, else padded copies in `to` [16][32 * steps].
template <class T>
inline Rows rows_of(const T* from, int columns, int rows, Bf16* to) {
  const int width = round_up(columns, kTileDepth);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (rows >= kTileRows && columns == width) return {from, columns * int64_t{sizeof(Bf16)}};
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int k = 0; k < width; k += kTileDepth) {
      const S32 pairs = i < rows ? read_pairs(from + static_cast<int64_t>(i) * columns + k, columns - k) : S32{};
      std::memcpy(to + i * width + k, &pairs, sizeof pairs);
    }
  }
  return {to, width * int64_t{sizeof(Bf16)}};
}

// sums[i][j] = a[i] b[j], each [16][16], for two rows of tiles and one or two packed ones, `steps` tiles long. With
// every step `lines` cache lines of each range are prefetched.
template <int kColumns>
SPARSESERVE_TILES inline void multiply(const Rows (&a)[2], const uint32_t* const (&b)[2], int steps, float* sums,
                                       Prefetcher (&ahead)[2], int lines) {
  SPARSESERVE_MEMORY_BARRIER();
  _tile_zero(0);
  _tile_zero(2);
  if (kColumns == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int k = 0; k < steps; ++k) {
    _tile_loadd(4, a[0].data + k * kTileDepth, a[0].stride_bytes);
    _tile_loadd(6, b[0] + k * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a[1].data + k * kTileDepth, a[1].stride_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (kColumns == 2) {
      _tile_loadd(7, b[1] + k * kTileWords, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    ahead[0].advance(lines);
    ahead[1].advance(lines);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 2 * 256, 64);
  if (kColumns == 2) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(3, sums + 3 * 256, 64);
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
    for (int s = 0; s < strips; ++s) {
      const int64_t row = int64_t{s} * kTileRows;
      const int rows = static_cast<int>(std::min<int64_t>(kTileRows, call_.rows - row));
      pack_tiles(call_.x + row * call_.in, call_.in, rows, call_.in, x + s * strip_words());
    }
    const int64_t panel_bytes = int64_t{2 * kTileRows} * call_.in * sizeof(T);
    const int grain = static_cast<int>(std::max<int64_t>(1, kTaskBytes / panel_bytes));
    const int panels = num_panels();
    parallel_for(threads, (panels + grain - 1) / grain, [&](int64_t task) {
      amx::configure();
      const int first = static_cast<int>(task) * grain, last = std::min(panels, first + grain);
      for (int panel = first; panel < last; ++panel) few_panel(panel, panel + 1 < last, x, strips);
      tile_release();
    });
  }

  SPARSESERVE_TILES static void tile_release() { _tile_release(); }

  void few_panel(int panel, bool more, const uint32_t* x, int strips) {
    Bf16* padded = scratch<Padded, Bf16>(2 * kTileRows * round_up(call_.in, kTileDepth));
    Rows weight[2];
    for (int t = 0; t < 2; ++t) {
      weight[t] = rows_of(weight_at(weight_row(panel, t)), call_.in, weight_rows(panel, t),
                          padded + t * kTileRows * round_up(call_.in, kTileDepth));
    }
    const int64_t bytes = more ? weight_rows(panel + 1, 0) * int64_t{call_.in} * sizeof(T) : 0;
    const int64_t bytes1 = more ? weight_rows(panel + 1, 1) * int64_t{call_.in} * sizeof(T) : 0;
    Prefetcher ahead[2] = {{weight_at(weight_row(panel + more, 0)), bytes}, {weight_at(weight_row(panel + more, 1)), bytes1}};
    alignas(64) float sums[4 * 256];
    for (int s = 0; s < strips; s += 2) {
      const uint32_t* const columns[2] = {x + s * strip_words(), x + (s + 1) * strip_words()};
      if (s + 1 < strips) {
        multiply<2>(weight, columns, steps_, sums, ahead, 16);
      } else {
        multiply<1>(weight, columns, steps_, sums, ahead, 16);
      }
      for (int c = 0; c < 2 && s + c < strips; ++c) write_transposed(panel, int64_t{s + c} * kTileRows, sums + c * 256);
    }
  }

  // sums[2 * 256]: tiles [16 rows of the weight][16 rows of x].
  void write_transposed(int panel, int64_t row, const float* sums) {
    S32 squares[2][kLanes];
    for (int t = 0; t < 2; ++t) {
      for (int i = 0; i < kTileRows; ++i) std::memcpy(&squares[t][i], sums + t * 512 + i * kTileRows, sizeof(S32));
      transpose(squares[t]);
    }
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, call_.rows - row));
    for (int i = 0; i < rows; ++i) write_panel(panel, row + i, (F32)squares[0][i], (F32)squares[1][i]);
  }

  void write_panel(int panel, int64_t row, F32 first, F32 second) {
    const int feature = panel * panel_features();
    linear::write(call_, row, feature, weight_rows(panel, 0), first, second);
    if (!call_.gated && weight_rows(panel, 1) > 0) {
      linear::write(call_, row, feature + kTileRows, weight_rows(panel, 1), second, F32{});
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
      const int count = std::min(block, panels - first);
      parallel_for(threads, count, 4, [&](int64_t i) {
        for (int t = 0; t < 2; ++t) {
          const int panel = first + static_cast<int>(i);
          pack_tiles(weight_at(weight_row(panel, t)), call_.in, weight_rows(panel, t), call_.in,
                     packed + i * panel_words + t * strip_words());
        }
      });
      const int64_t tasks = (call_.rows + kTaskRows - 1) / kTaskRows;
      parallel_for(threads, tasks, [&](int64_t task) {
        amx::configure();
        for (int64_t row = task * kTaskRows; row < std::min(call_.rows, (task + 1) * kTaskRows); row += 2 * kTileRows) {
          many_rows(row, first, count, packed);
        }
        tile_release();
      });
    }
  }

  void many_rows(int64_t row, int first, int count, const uint32_t* packed) {
    const int width = round_up(call_.in, kTileDepth);
    Bf16* padded = scratch<Padded, Bf16>(2 * kTileRows * width);
    Rows x[2];
    int rows[2];
    for (int t = 0; t < 2; ++t) {
      rows[t] = static_cast<int>(std::clamp<int64_t>(call_.rows - row - t * kTileRows, 0, kTileRows));
      x[t] = rows_of(call_.x + (row + t * kTileRows) * call_.in, call_.in, rows[t], padded + t * kTileRows * width);
    }
    Prefetcher ahead[2] = {{nullptr, 0}, {nullptr, 0}};
    alignas(64) float sums[4 * 256];
    for (int i = 0; i < count; ++i) {
      const uint32_t* panel = packed + i * 2 * strip_words();
      const uint32_t* const columns[2] = {panel, panel + strip_words()};
      multiply<2>(x, columns, steps_, sums, ahead, 0);
      for (int t = 0; t < 2; ++t) {
        for (int r = 0; r < rows[t]; ++r) {
          const float* of_row = sums + t * 512 + r * kTileRows;
          write_panel(first + i, row + t * kTileRows + r, load(of_row), load(of_row + 256));
        }
      }
    }
  }

  const Call& call_;
  const int steps_;
};

}  // namespace sparseserve::linear
