// Norms, rotation and the activation of the MLP: each reads its inputs once, computes in float32 and rounds at the end.
#pragma once

#include <cstdint>

#include "fewer_bits.h"

namespace gapless {

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const float* weight, int64_t rows, int64_t size, float eps, T* out);

// weight and bias [size] or null.
template <typename T>
void layer_norm(
    const T* x, int64_t x_stride, const float* weight, const float* bias, int64_t rows, int64_t size, float eps,
    T* out);

// x += delta first; x is rounded to its dtype and then normed.
template <typename T>
void add_rms_norm(
    T* x, const T* delta, const float* weight, int64_t rows, int64_t size, float eps, T* out);

// out [tokens, dim]: rows of table [length, dim] by position; past its end, its last.
void angles(const int64_t* positions, int64_t tokens, const float* table, int64_t length, int64_t dim, float* out);

struct RopeShape {
  int64_t tokens, heads, kv_heads, dim;
  int64_t angles_stride;
  int64_t layers, page_size, layer;
  float key_scale = 1, value_scale = 1;  // of a cache of fewer bits
};

// qkv [tokens, heads + 2 kv_heads, dim] in place; norm [heads + kv_heads, dim] or null; angles [tokens, dim]. A cache
// of fewer bits gets keys, and one of e4m3 values, rounded to T and then divided by their scale.
template <typename T, typename S>
void rope_and_write(
    T* qkv, const float* norm, float eps, const float* angles, const int64_t* slots, S* cache, const RopeShape& shape);

// As `kinds.Activation`.
enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU2 };

// out [rows, size]. Gated: x has as many gates as factors, gates first.
template <typename T>
void activate(const T* x, int64_t rows, int64_t size, Activation kind, bool gated, T* out);

}  // namespace gapless
