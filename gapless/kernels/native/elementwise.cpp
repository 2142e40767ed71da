#include "elementwise.h"

#include <algorithm>

#include "norm.h"
#include "parallel.h"

namespace gapless {
namespace {

// Least elements of a call with a second thread.
constexpr int64_t WORTH = 1 << 16;

template <typename T>
void layer_norm_row(const T* x, const float* weight, const float* bias, int64_t size, float eps, T* out) {
  f32x16 total{}, squares{};
  for (int64_t i = 0; i < size; i += LANES) total += load_some(x + i, int(size - i));
  const float mean = sum(total) / float(size);
  for (int64_t i = 0; i < size; i += LANES) {
    f32x16 some = pick(upto(size - 1, i), load_some(x + i, int(size - i)) - mean, f32x16{});
    squares += some * some;
  }
  const float scale = factor(squares, size, eps);
  for (int64_t i = 0; i < size; i += LANES) {
    int count = int(size - i);
    f32x16 some = (load_some(x + i, count) - mean) * scale;
    if (weight) some = some * load_some(weight + i, count);
    if (bias) some = some + load_some(bias + i, count);
    store_some(out + i, some, count);
  }
}

template <typename T>
void add_row(T* x, const T* delta, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) + load(delta + i));
  int rest = int(size - i);
  if (rest) store_some(x + i, load_some(x + i, rest) + load_some(delta + i, rest), rest);
}

// One head: norm if asked, then the halves turned by the angles of the position.
template <typename T>
void rotate(T* x, const float* norm, float eps, const float* angles, int64_t dim) {
  int64_t half = dim / 2;
  float scale = 1.0f;
  if (norm) {
    f32x16 squares{};
    for (int64_t i = 0; i < dim; i += LANES) {
      f32x16 some = load_some(x + i, int(dim - i));
      squares += some * some;
    }
    scale = factor(squares, dim, eps);
  }
  for (int64_t i = 0; i < half; i += LANES) {
    int count = int(half - i);
    f32x16 a = load_some(x + i, count), b = load_some(x + half + i, count);
    if (norm) {
      a = a * scale * load_some(norm + i, count);
      b = b * scale * load_some(norm + half + i, count);
    }
    f32x16 cos = load_some(angles + i, count), sin = load_some(angles + half + i, count);
    store_some(x + i, a * cos - b * sin, count);
    store_some(x + half + i, b * cos + a * sin, count);
  }
}

// A NaN stays one.
inline f32x16 relu(f32x16 x) { return pick(more(f32x16{}, x), f32x16{}, x); }

// By Abramowitz and Stegun, 7.1.26, within 1.5e-7 of the error function.
inline f32x16 gelu(f32x16 x) {
  const f32x16 z = max(x, -x) * 0.70710678f, t = 1.0f / (1.0f + z * 0.3275911f);
  f32x16 p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32x16 beyond = x * p * t * exp(-z * z) * 0.5f;
  return pick(more(x, f32x16{}), x - beyond, beyond);
}

template <Activation KIND>
inline f32x16 activated(f32x16 x) {
  if constexpr (KIND == SILU) return x / (1.0f + exp(-x));
  if constexpr (KIND == GELU) return gelu(x);
  // x * (1 + tanh(u)) / 2, with exp(-2 u)
  if constexpr (KIND == GELU_TANH) return x / (1.0f + exp((x + x * x * x * 0.044715f) * -1.59576912f));
  if constexpr (KIND == RELU) return relu(x);
  if constexpr (KIND == RELU2) return relu(x) * relu(x);
}

template <Activation KIND, typename T>
void activate_rows(const T* x, int64_t rows, int64_t size, bool gated, T* out) {
  share(rows, rows * size * 4 / WORTH, [&](int64_t row, bool) {
    const T *gate = x + row * size * (gated ? 2 : 1), *up = gate + size;
    T* to = out + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      int count = int(size - i);
      f32x16 found = activated<KIND>(load_some(gate + i, count));
      if (gated) found = found * load_some(up + i, count);
      store_some(to + i, found, count);
    }
  });
}

}  // namespace

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const float* weight, int64_t rows, int64_t size, float eps, T* out) {
  share(rows, rows * size / WORTH, [&](int64_t row, bool) {
    norm_row(x + row * x_stride, weight, size, eps, out + row * size);
  });
}

template <typename T>
void layer_norm(
    const T* x, int64_t x_stride, const float* weight, const float* bias, int64_t rows, int64_t size, float eps,
    T* out) {
  share(rows, rows * size / WORTH, [&](int64_t row, bool) {
    layer_norm_row(x + row * x_stride, weight, bias, size, eps, out + row * size);
  });
}

template <typename T>
void add_rms_norm(T* x, const T* delta, const float* weight, int64_t rows, int64_t size, float eps, T* out) {
  share(rows, rows * size / WORTH, [&](int64_t row, bool) {
    add_row(x + row * size, delta + row * size, size);
    norm_row(x + row * size, weight, size, eps, out + row * size);
  });
}

void angles(const int64_t* positions, int64_t tokens, const float* table, int64_t length, int64_t dim, float* out) {
  for (int64_t token = 0; token < tokens; token++)
    std::copy_n(table + std::clamp<int64_t>(positions[token], 0, length - 1) * dim, dim, out + token * dim);
}

// Keys [kv_heads, dim] and their values, into the entry at `place` of a page of one layer.
template <typename T, typename S>
void pack_entry(const T* keys, const T* values, S* page, int64_t place, const RopeShape& shape) {
  const int64_t count = shape.page_size * shape.kv_heads, dim = shape.dim;
  const auto first = Stored<S, uint8_t>::first(&page->bits, count, dim).after(place * shape.kv_heads, dim);
  for (int64_t head = 0; head < shape.kv_heads; head++) {
    const auto [key, value, pair] = first.after(head, dim);
    pack_e4m3(keys + head * dim, dim, shape.key_scale, key);
    if constexpr (Stored<S>::NIBBLES) pack_nibbles(values + head * dim, dim, value, pair);
    else pack_e4m3(values + head * dim, dim, shape.value_scale, value);
  }
}

template <typename T, typename S>
void rope_and_write(
    T* qkv, const float* norm, float eps, const float* angles, const int64_t* slots, S* cache, const RopeShape& shape) {
  int64_t dim = shape.dim, turned = shape.heads + shape.kv_heads, kv = shape.kv_heads * dim;
  int64_t wide = (turned + shape.kv_heads) * dim;
  share(shape.tokens, shape.tokens * wide / WORTH, [&](int64_t token, bool) {
    T* x = qkv + token * wide;
    const float* turn = angles + token * shape.angles_stride;
    for (int64_t head = 0; head < turned; head++)
      rotate(x + head * dim, norm ? norm + head * dim : nullptr, eps, turn, dim);
    int64_t page = slots[token] / shape.page_size, offset = slots[token] % shape.page_size;
    if constexpr (FEWER<S>) {
      const int64_t bytes = Stored<S>::page_bytes(shape.page_size * shape.kv_heads, dim);
      S* at = cache + (page * shape.layers + shape.layer) * bytes;
      pack_entry(x + shape.heads * dim, x + turned * dim, at, offset, shape);
    } else {
      T* keys = cache + ((page * shape.layers + shape.layer) * 2 * shape.page_size + offset) * kv;
      std::copy_n(x + shape.heads * dim, kv, keys);
      std::copy_n(x + turned * dim, kv, keys + shape.page_size * kv);
    }
  });
}

template <typename T>
void activate(const T* x, int64_t rows, int64_t size, Activation kind, bool gated, T* out) {
  constexpr decltype(&activate_rows<SILU, T>) KINDS[] = {
      activate_rows<SILU, T>, activate_rows<GELU, T>, activate_rows<GELU_TANH, T>, activate_rows<RELU, T>,
      activate_rows<RELU2, T>};
  KINDS[kind](x, rows, size, gated, out);
}

#define GAPLESS_FOR(T)                                                                                         \
  template void rms_norm(const T*, int64_t, const float*, int64_t, int64_t, float, T*);                        \
  template void layer_norm(const T*, int64_t, const float*, const float*, int64_t, int64_t, float, T*);        \
  template void add_rms_norm(T*, const T*, const float*, int64_t, int64_t, float, T*);                         \
  template void rope_and_write(T*, const float*, float, const float*, const int64_t*, T*, const RopeShape&);   \
  template void rope_and_write(T*, const float*, float, const float*, const int64_t*, e4m3*, const RopeShape&); \
  template void rope_and_write(T*, const float*, float, const float*, const int64_t*, k8v4*, const RopeShape&); \
  template void activate(const T*, int64_t, int64_t, Activation, bool, T*);
GAPLESS_FOR(float)
GAPLESS_FOR(bf16)
GAPLESS_FOR(f16)
#undef GAPLESS_FOR

}  // namespace gapless
