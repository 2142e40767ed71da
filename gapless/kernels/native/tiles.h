// The operations of AMX that products and attention use. A test puts another text here, which computes them in C++.
//
// -march=native tells whether processor, system and compiler support them; elsewhere GAPLESS_AMX is 0.
#pragma once

#include <cstdint>
#include <string>

#include "vec.h"

#if GAPLESS_BF16_DOT && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__linux__)
#define GAPLESS_AMX 1
#else
#define GAPLESS_AMX 0
#endif

#if GAPLESS_AMX

#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>

namespace gapless {

// Asks Linux for the tiles, for this process: its threads then have room for them. Empty, or why they are refused.
inline std::string ask_for_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? std::string("refused by Linux: ") + std::strerror(errno) : "";
}

// `shapes`: the 64 bytes of LDTILECFG; all tiles are zero afterwards.
inline void tile_configure(const uint8_t (&shapes)[64]) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

inline void tile_release() { asm volatile("tilerelease"); }

template <int AT>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(AT));
}

template <int AT>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(AT) : "memory");
}

template <int AT>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(AT) : "memory");
}

// SUMS += X * WEIGHT (TDPBF16PS).
template <int SUMS, int X, int WEIGHT>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
}

// The same of bytes, signed ones of x and unsigned ones of the weight, in whole numbers (TDPBSUD).
template <int SUMS, int X, int WEIGHT>
inline void tile_multiply_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
}

}  // namespace gapless

#endif
