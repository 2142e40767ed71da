#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace gapless {
namespace {

// Least elements of a call with a second thread.
constexpr int64_t WORTH = 1 << 16;

inline float factor(f32x16 squares, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

template <typename T>
void norm_row(const T* x, const float* weight, int64_t size, float eps, T* out) {
  f32x16 squares{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32x16 some = load(x + i);
    squares += some * some;
  }
  f32x16 rest = i < size ? load_some(x + i, int(size - i)) : f32x16{};
  float scale = factor(squares + rest * rest, size, eps);
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size) store_some(out + i, rest * scale * load_some(weight + i, int(size - i)), int(size - i));
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

}  // namespace

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const float* weight, int64_t rows, int64_t size, float eps, T* out) {
  share(rows, rows * size / WORTH, [&](int64_t row, bool) {
    norm_row(x + row * x_stride, weight, size, eps, out + row * size);
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

template <typename T>
void rope_and_write(
    T* qkv, const float* norm, float eps, const float* angles, const int64_t* slots, T* cache, const RopeShape& shape) {
  int64_t dim = shape.dim, turned = shape.heads + shape.kv_heads, kv = shape.kv_heads * dim;
  int64_t wide = (turned + shape.kv_heads) * dim;
  share(shape.tokens, shape.tokens * wide / WORTH, [&](int64_t token, bool) {
    T* x = qkv + token * wide;
    const float* turn = angles + token * shape.angles_stride;
    for (int64_t head = 0; head < turned; head++)
      rotate(x + head * dim, norm ? norm + head * dim : nullptr, eps, turn, dim);
    int64_t page = slots[token] / shape.page_size, offset = slots[token] % shape.page_size;
    T* keys = cache + ((page * shape.layers + shape.layer) * 2 * shape.page_size + offset) * kv;
    std::copy_n(x + shape.heads * dim, kv, keys);
    std::copy_n(x + turned * dim, kv, keys + shape.page_size * kv);
  });
}

template <typename T>
void silu_mul(const T* gate_up, int64_t rows, int64_t size, T* out) {
  share(rows, rows * size * 4 / WORTH, [&](int64_t row, bool) {
    const T *gate = gate_up + 2 * row * size, *up = gate + size;
    T* to = out + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      int count = int(size - i);
      f32x16 x = load_some(gate + i, count);
      store_some(to + i, x / (1.0f + exp(-x)) * load_some(up + i, count), count);
    }
  });
}

#define GAPLESS_FOR(T)                                                                                         \
  template void rms_norm(const T*, int64_t, const float*, int64_t, int64_t, float, T*);                        \
  template void add_rms_norm(T*, const T*, const float*, int64_t, int64_t, float, T*);                         \
  template void rope_and_write(T*, const float*, float, const float*, const int64_t*, T*, const RopeShape&);   \
  template void silu_mul(const T*, int64_t, int64_t, T*);
GAPLESS_FOR(float)
GAPLESS_FOR(bf16)
GAPLESS_FOR(f16)
#undef GAPLESS_FOR

}  // namespace gapless
