// x @ weight.T + bias over a weight in 8-bit floats (e4m3), which become bfloat16 on their way into AMX: exact.
//
// Packed: tiles of 64 outputs (the last one is filled up). For each span of inputs with one scale a tile has 64 scales,
// and the weights by pairs of inputs [inputs / 2][64][2]. AMX adds up the products of a span, or of 128 inputs of it;
// float32 adds these, each times its scale, in the order of the inputs: for any number of rows.
#pragma once

#include <cstdint>

#include "linear.h"

namespace gapless {

struct Fp8Form {
  int64_t n, k;
  int64_t group;  // inputs that share a scale, a multiple of 32; 0 for all

  int64_t width() const { return round_up(k, 32); }
  int64_t span() const { return group ? std::min(group, width()) : width(); }
  int64_t head() const { return TILE * sizeof(float); }
  int64_t tile() const { return (width() + span() - 1) / span() * head() + TILE * width(); }
  int64_t tiles() const { return (n + TILE - 1) / TILE; }
};

// `weight` e4m3 [n, k]; `scales` [n, groups]. A weight that is NaN makes its scale so.
void pack_fp8(const Fp8Form& form, const uint8_t* weight, const float* scales, uint8_t* packed);

// x [m, k], k a multiple of 32 (the caller pads), with rows `x_stride` apart; out [m, n]. Where AMX serves (amx.h).
void linear_fp8(
    const Fp8Form& form, const bf16* x, int64_t x_stride, int64_t m, const uint8_t* packed, const bf16* bias,
    bf16* out);

}  // namespace gapless
