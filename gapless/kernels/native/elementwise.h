// Norms, rotation and the gate of the MLP: each reads its inputs once, computes in float32 and rounds at the end.
#pragma once

#include <cstdint>

#include "vec.h"

namespace gapless {

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, int64_t rows, int64_t size, float eps, T* out);

// x += delta first; x is rounded to its dtype and then normed.
template <typename T>
void add_rms_norm(
    T* x, const T* delta, const T* weight, int64_t rows, int64_t size, float eps, T* out);

struct RopeShape {
  int64_t tokens, heads, kv_heads, dim;
  int64_t table_rows;
  int64_t layers, page_size, layer;
};

// qkv [tokens, heads + 2 kv_heads, dim] in place; norm [heads + kv_heads, dim] or null; table [table_rows, dim].
template <typename T>
void rope_and_write(
    T* qkv, const T* norm, float eps, const int64_t* positions, const float* table, const int64_t* slots, T* cache,
    const RopeShape& shape);

template <typename T>
void silu_mul(const T* gate_up, int64_t rows, int64_t size, T* out);

}  // namespace gapless
