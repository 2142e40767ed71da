// Products on AMX of up to 32 rows: tiles 0 to 3 are sums, 4 and 5 of x, 6 and 7 of the weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles.h"

#if GAPLESS_AMX

namespace gapless {

constexpr int64_t TILE_ROWS = 16, MOST_TILED = 32;
constexpr int X = 4, WEIGHT = 6;

// Gives the tiles their shapes for 1 to 32 rows of x, of `bytes` each.
inline void configure(int64_t rows, int64_t bytes) {
  alignas(64) uint8_t shapes[64] = {1};
  const uint8_t first = uint8_t(std::min(rows, TILE_ROWS)), more = uint8_t(rows - first), other = more ? more : first;
  const uint8_t deep = uint8_t(bytes / 4), heights[] = {first, other, first, other, first, more, deep, deep};
  for (int tile = 0; tile < 8; tile++) {
    shapes[16 + 2 * tile] = !heights[tile] ? 0 : tile / 2 == X / 2 ? uint8_t(bytes) : 64;  // bytes of a row
    shapes[48 + tile] = heights[tile];
  }
  tile_configure(shapes);
}

}  // namespace gapless

#endif
