// The product of sparse prefill's selection with AMX tiles.
#pragma once

#include "prefill_amx.h"

namespace sparseserve::prefill {

// out[32][kPanel] = a[32][n] * b[n][kPanel] in pairs of bfloat16; n is a multiple of 16.
struct ByAmx {
  using Element = uint32_t;
  static constexpr int kPerElement = 2;

  static void begin() { amx::configure(); }
  static void end() { amx::release(); }

  SPARSESERVE_TILES static void multiply(const uint32_t* a, const uint32_t* b, float* out, int n) {
    for (int lane = 0; lane < kPanel; lane += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      SPARSESERVE_MEMORY_BARRIER();
      for (int i = 0; i < n; i += 16) {
        _tile_loadd(4, a + i, n * 4);
        _tile_loadd(5, a + i + 16 * n, n * 4);
        _tile_loadd(6, b + i * kPanel + lane, kPanel * 4);
        _tile_loadd(7, b + i * kPanel + lane + 16, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, out + lane, kPanel * 4);
      _tile_stored(1, out + lane + 16, kPanel * 4);
      _tile_stored(2, out + lane + 16 * kPanel, kPanel * 4);
      _tile_stored(3, out + lane + 16 * kPanel + 16, kPanel * 4);
      SPARSESERVE_MEMORY_BARRIER();
    }
  }
};

}  // namespace sparseserve::prefill
