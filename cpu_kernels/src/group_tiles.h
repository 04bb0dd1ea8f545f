// Products of rows (keys, digests) with the few queries of a group, by AMX tiles.
//
// The rows are an operand as they lie in memory, 16 of them a tile; the queries are the other one, packed once. A tile
// of results has a column for each query and no more, so 16 rows take 16 cycles for every 32 dimensions, whatever the
// size of the group.
#pragma once

#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace sparseserve {

#if defined(SPARSESERVE_AMX)

// A row of a tile. Tiles are loaded from memory and stored to it faster if it is aligned.
struct alignas(64) Line {
  float values[16];
};

class GroupTiles {
 public:
  static constexpr int kMostQueries = 8;  // weights of a query take two rows of a tile: see decode_amx.h
  static constexpr int kRows = 16;        // of a tile

  // width: of a row, in elements.
  static bool supports(int width, int group) {
    return width > 0 && width % 32 == 0 && group > 0 && group <= kMostQueries && amx::available();
  }

  // Tiles 0 to 2 are for these products; the rest is for weights (3), sums of values (4 to 7) with values in tile 2.
  SPARSESERVE_TILES static void configure(int group) {
    const auto columns = static_cast<uint8_t>(4 * group), weights = static_cast<uint8_t>(2 * group);
    amx::configure({{16, columns}, {16, columns}, {16, 64}, {weights, 64}, {weights, 64}, {weights, 64}, {weights, 64},
                    {weights, 64}});
  }

  // Rows of packed queries.
  static int packed_size(int width) { return width / 2; }

  // Query g among packed ones (zeroed before): row d has dimensions 2 d and 2 d + 1, a column a query.
  static void pack(const float* query, int g, int width, Line* packed) {
    const __m512i rows = _mm512_slli_epi32((__m512i)lane_index(), 4);
    for (int d = 0; d < width; d += 32) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(query + d + 16), _mm512_loadu_ps(query + d));
      _mm512_i32scatter_epi32(packed[d / 2].values + g, rows, (__m512i)pairs, sizeof(float));
    }
  }

  // products[16][group] of 16 rows, `row_bytes` apart.
  SPARSESERVE_TILES static void multiply(const Bf16* rows, int64_t row_bytes, int width, const Line* packed, int group,
                                         float* products) {
    _tile_zero(0);
    SPARSESERVE_MEMORY_BARRIER();
    for (int d = 0; d < width; d += 32) {
      _tile_loadd(1, packed + d / 2, 64);
      _tile_loadd(2, rows + d, row_bytes);
      _tile_dpbf16ps(0, 2, 1);
    }
    _tile_stored(0, products, 4 * group);
    SPARSESERVE_MEMORY_BARRIER();
  }

};

// Turns products[16][kGroup] around.
template <int kGroup>
class GroupTransposition {
 public:
  GroupTransposition() {
    for (int row = 0; row < GroupTiles::kRows; ++row) {
      for (int g = 0; g < kGroup; ++g) {
        const int place = row * kGroup + g;
        lanes_[g][row] = place % kLanes;
        parts_[g][place / kLanes] |= static_cast<__mmask16>(1u << row);
      }
    }
  }

  // out[g]: products of query g with the 16 rows.
  void operator()(const float* products, F32 (&out)[kGroup]) const {
    __m512 parts[kGroup];
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) parts[i] = _mm512_loadu_ps(products + i * kLanes);
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; ++g) {
      const __m512i lanes = _mm512_load_si512(lanes_[g]);
      __m512 of_query = _mm512_permutexvar_ps(lanes, parts[0]);
#pragma GCC unroll 8
      for (int i = 1; i < kGroup; ++i) {
        of_query = _mm512_mask_permutexvar_ps(of_query, parts_[g][i], lanes, parts[i]);
      }
      out[g] = (F32)of_query;
    }
  }

 private:
  alignas(64) int32_t lanes_[kGroup][kLanes];
  __mmask16 parts_[kGroup][kGroup] = {};
};

// Calls body with the size of the group as a compile-time constant.
template <class Body>
void with_group(int group, Body&& body) {
  switch (group) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    case 7: return body(std::integral_constant<int, 7>());
    default: return body(std::integral_constant<int, 8>());
  }
}

#endif

}  // namespace sparseserve
