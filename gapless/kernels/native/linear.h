// x @ weight.T + bias with float32 sums, over a weight that was packed once.
//
// Packed: tiles of 64 output columns one after the other, the last one narrower (a multiple of 16). A tile holds all its
// columns input by input; of bfloat16 by pairs of inputs k, k + 1 next to each other, as vdpbf16ps, bfdot and AMX want
// them: a tile is one stream of memory. The order of an output's sums is the path's: one chain over ascending k (of pairs
// for dot products), or that of AMX. A path has the same order for any number of rows, and a weight has one path, so results do
// not depend on the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vec.h"

namespace gapless {

constexpr int64_t TILE = 64;

// Whether this processor multiplies pairs of bfloat16 at once.
constexpr bool DOTS_HERE = GAPLESS_BF16_DOT || GAPLESS_NEON_BF16;

// Inputs that lie next to each other.
template <typename W>
constexpr int64_t TOGETHER = std::is_same_v<W, bf16> ? 2 : 1;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <typename W>
int64_t packed_elements(int64_t n, int64_t k) {
  return round_up(n, LANES) * round_up(k, TOGETHER<W>);
}

// Start and number of columns of the tile with a column.
template <typename W>
struct PackedPlace {
  int64_t n, k;
  int64_t tile(int64_t column) const { return column / TILE * TILE * round_up(k, TOGETHER<W>); }
  int64_t width(int64_t column) const { return std::min(TILE, round_up(n, LANES) - column / TILE * TILE); }
};

// Sums [rows, TILE] of some columns, with the bias, to rows of the result.
template <typename T>
void write_tile(const float* sums, int64_t rows, int64_t columns, const T* bias, T* out, int64_t out_stride) {
  for (int64_t v = 0; v < columns; v += LANES) {
    const int count = int(std::min<int64_t>(columns - v, LANES));
    const f32x16 add = bias ? load_some(bias + v, count) : f32x16{};
    for (int64_t r = 0; r < rows; r++) store_some(out + r * out_stride + v, load(sums + r * TILE + v) + add, count);
  }
}

template <typename W>
void pack(const W* weight, int64_t n, int64_t k, W* packed);

// out[i] = weight[ids[i]], the weight's row back in order.
template <typename W>
void unpack_rows(const W* packed, int64_t n, int64_t k, const int64_t* ids, int64_t count, W* out);

// x [m, k] with rows `x_stride` apart; out [m, n]. On any vector unit.
template <typename T, typename W>
void linear_floats(
    const T* x, int64_t x_stride, int64_t m, const W* packed, int64_t n, int64_t k, const T* bias, T* out);

// The same with k even (the caller pads), if DOTS_HERE.
void linear_dots(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out);

// The same where AMX serves (amx.h).
void linear_amx(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out);

}  // namespace gapless
