// Stands in for native/tiles.h: AMX as Intel's manual describes it, in plain C++. What a processor refuses, throws.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "vec.h"

#define GAPLESS_AMX 1

namespace gapless {

struct Tiles {
  uint8_t shapes[64] = {};
  uint8_t bytes[8][16][64];

  int rows(int tile) const { return shapes[48 + tile]; }
  int width(int tile) const { return shapes[16 + 2 * tile]; }
};

inline thread_local Tiles here;
inline const char* fence = nullptr;  // where the caller's x ends: no load may go across

inline void require(bool good, const char* what) {
  if (!good) throw std::logic_error(what);
}

// What this emulation gets wrong, for tests that want it noticed.
enum Fault { NONE_AT_ALL, ODD_PRODUCTS, LAST_ROW, KEPT_SUMS, SECOND_WEIGHT, NARROW_STORE, SIGNED_WEIGHT };
inline int fault = NONE_AT_ALL;
inline std::string refusal;

inline std::string ask_for_tiles() { return refusal; }

inline void tile_configure(const uint8_t (&shapes)[64]) {
  require(shapes[0] == 1 && shapes[1] == 0, "palette 1 from row 0");
  std::memcpy(here.shapes, shapes, 64);
  std::memset(here.bytes, 0, sizeof(here.bytes));
  for (int i = 0; i < 8; i++) {
    require(here.rows(i) <= 16 && here.width(i) <= 64 && !here.rows(i) == !here.width(i), "the shape of a tile");
    require(!shapes[17 + 2 * i] && !shapes[32 + 2 * i] && !shapes[33 + 2 * i] && !shapes[56 + i], "eight tiles");
  }
}

inline void tile_release() { std::memset(here.shapes, 0, 64); }

template <int AT>
void tile_zero() {
  require(here.rows(AT), "a tile that has a shape");
  if (fault == KEPT_SUMS && AT < 4) return;
  std::memset(here.bytes[AT], 0, sizeof(here.bytes[AT]));
}

template <int AT>
void tile_load(const void* from, int64_t stride) {
  tile_zero<AT>();
  const char* row = static_cast<const char*>(from);
  require(row >= fence || row + (here.rows(AT) - 1) * stride + here.width(AT) <= fence, "a load within x");
  for (int r = 0; r < here.rows(AT); r++, row += stride) std::memcpy(here.bytes[AT][r], row, here.width(AT));
}

template <int AT>
void tile_store(void* to, int64_t stride) {
  require(here.rows(AT), "a tile that has a shape");
  if (fault == NARROW_STORE && stride == 128) to = static_cast<char*>(to) + 4;  // attention's products
  for (int r = 0; r < here.rows(AT) - (fault == LAST_ROW); r++)
    std::memcpy(static_cast<char*>(to) + r * stride, here.bytes[AT][r], here.width(AT));
}

// Denormal numbers are zero, in and out.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

// The even and the odd products of a row, each one chain of fused sums; the two together are added to what was there.
template <int SUMS, int X, int WEIGHT>
void tile_multiply() {
  const Tiles& t = here;
  require(t.rows(SUMS) && t.rows(SUMS) == t.rows(X) && t.width(SUMS) == t.width(WEIGHT) &&
          t.width(X) == 4 * t.rows(WEIGHT), "tiles that fit together");
  for (int r = 0; r < t.rows(SUMS); r++) {
    bf16 x[32], weight[32];
    float sums[16], chains[2][16] = {};
    std::memcpy(x, t.bytes[X][r], 64);
    std::memcpy(sums, t.bytes[SUMS][r], 64);
    for (int pair = 0; pair < t.rows(WEIGHT); pair++) {
      std::memcpy(weight, t.bytes[fault == SECOND_WEIGHT ? 6 : WEIGHT][pair], 64);
      for (int odd = 0; odd < 2; odd++) {
        float factor = flushed(to_float(x[2 * pair + odd]));
        if (fault == ODD_PRODUCTS && odd) factor = 0;
        for (int n = 0; n < 16; n++)
          chains[odd][n] = flushed(std::fma(factor, flushed(to_float(weight[2 * n + odd])), chains[odd][n]));
      }
    }
    for (int n = 0; n < 16; n++) sums[n] = flushed(flushed(sums[n]) + flushed(chains[0][n] + chains[1][n]));
    std::memcpy(here.bytes[SUMS][r], sums, 64);
  }
}

// Four signed bytes of x by four unsigned ones of the weight, added to each sum.
template <int SUMS, int X, int WEIGHT>
void tile_multiply_bytes() {
  const Tiles& t = here;
  require(t.rows(SUMS) && t.rows(SUMS) == t.rows(X) && t.width(SUMS) == t.width(WEIGHT) &&
          t.width(X) == 4 * t.rows(WEIGHT), "tiles that fit together");
  for (int r = 0; r < t.rows(SUMS); r++) {
    int32_t sums[16];
    std::memcpy(sums, t.bytes[SUMS][r], 64);
    for (int i = 0; i < t.width(X); i++)
      for (int n = 0; n < t.width(SUMS) / 4; n++) {
        const uint8_t weight = t.bytes[WEIGHT][i / 4][4 * n + i % 4];
        sums[n] += int8_t(t.bytes[X][r][i]) * (fault == SIGNED_WEIGHT ? int8_t(weight) : weight);
      }
    std::memcpy(here.bytes[SUMS][r], sums, 64);
  }
}

}  // namespace gapless
