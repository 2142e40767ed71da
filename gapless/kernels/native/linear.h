// x @ weight.T + bias in bfloat16 with float32 sums, over a weight that was packed once.
//
// Packed: tiles of 64 output columns one after the other, the last one narrower (a multiple of 16). A tile holds for
// each pair of inputs k, k + 1 the pairs of all its columns, as vdpbf16ps wants them: a tile is one stream of memory.
// The order of an output's sums is the path's: one chain over ascending k, or that of AMX. A path has the same order
// for any number of rows, and a weight has one path, so results do not depend on the batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace gapless {

constexpr int64_t TILE = 64;

constexpr bool LINEAR_HERE = GAPLESS_BF16_DOT;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t packed_elements(int64_t n, int64_t k) { return round_up(n, LANES) * round_up(k, 2); }

// The place of weight[n][k] for even k; weight[n][k + 1] is next to it.
struct PackedPlace {
  int64_t n, k;
  int64_t tile(int64_t column) const { return column / TILE * TILE * round_up(k, 2); }
  int64_t width(int64_t column) const {
    int64_t start = column / TILE * TILE;
    return std::min(TILE, round_up(n, LANES) - start);
  }
};

void pack(const bf16* weight, int64_t n, int64_t k, bf16* packed);

// out[i] = weight[ids[i]], the weight's row back in order.
void unpack_rows(const bf16* packed, int64_t n, int64_t k, const int64_t* ids, int64_t count, bf16* out);

// x [m, k] with rows `x_stride` apart, k even (the caller pads); out [m, n]. Where LINEAR_HERE.
void linear_vectors(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out);

// The same where AMX serves (amx.h).
void linear_amx(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out);

// The same promise on any processor and in float32, also by a weight W in bfloat16: packed as tiles of 64 columns,
// [k][columns] each, the last tile narrower (a multiple of 16).
inline int64_t wide_elements(int64_t n, int64_t k) { return round_up(n, LANES) * k; }

template <typename T>
void pack_wide(const T* weight, int64_t n, int64_t k, T* packed);

// x [m, k] with rows `x_stride` apart; out [m, n]. Each output is one chain of float32 sums over ascending k.
template <typename T, typename W>
void linear_wide(
    const T* x, int64_t x_stride, int64_t m, const W* packed, int64_t n, int64_t k, const T* bias, T* out);

// The product of a head that drafts, where BYTES_HERE. Weights are bytes, 128 + 127 w / the largest of their column, in
// tiles of 64 columns (the last one is filled up), [k / 4][columns][4] each, with zeros up to whole groups of inputs. In
// each group a row of x is rounded likewise, so a large input makes only its neighbors coarse. An output is about a
// hundredth off, which may cost a draft; half as much is read as in bfloat16.
constexpr bool BYTES_HERE = GAPLESS_BYTE_DOT;
constexpr int64_t INPUT_GROUP = 64;

inline int64_t byte_elements(int64_t n, int64_t k) { return round_up(n, TILE) * round_up(k, INPUT_GROUP); }

// `scales` [n rounded up to whole tiles].
void pack_bytes(const float* weight, int64_t n, int64_t k, uint8_t* packed, float* scales);

// x [m, k] with rows `x_stride` apart; out [m, n].
template <typename T>
void linear_bytes(
    const T* x, int64_t x_stride, int64_t m, const uint8_t* packed, const float* scales, int64_t n, int64_t k,
    const T* bias, T* out);

}  // namespace gapless
