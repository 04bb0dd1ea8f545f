// AMX tiles (Sapphire Rapids and later): whether they may be used, and what every kernel with them needs.
#pragma once

#if defined(__AVX512BF16__) && defined(__linux__)
#define SPARSESERVE_AMX 1

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#define SPARSESERVE_TILES __attribute__((target("amx-tile,amx-bf16,avx512vbmi")))

// GCC's tile loads do not say that they read memory.
#define SPARSESERVE_MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

namespace sparseserve::amx {

inline bool cpu_has_it() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d >> 22 & 1) && (d >> 24 & 1) && (c >> 1 & 1);  // amx-bf16, amx-tile, avx512vbmi
}

// This processor has AMX with bfloat16 (and the byte permutations of AVX512-VBMI, which every such CPU has), and the
// operating system lets this process use it.
inline bool available() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool yes = cpu_has_it() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return yes;
}

struct TileShape {
  uint8_t rows = 16, row_bytes = 64;
};

SPARSESERVE_TILES inline void configure(const TileShape (&tiles)[8]) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = tiles[i].row_bytes;
    config.rows[i] = tiles[i].rows;
  }
  SPARSESERVE_MEMORY_BARRIER();
  _tile_loadconfig(&config);
  SPARSESERVE_MEMORY_BARRIER();
}

// Eight tiles of 16 rows of 64 bytes.
SPARSESERVE_TILES inline void configure() {
  const TileShape whole[8] = {};
  configure(whole);
}

SPARSESERVE_TILES inline void release() { _tile_release(); }

}  // namespace sparseserve::amx

#endif
