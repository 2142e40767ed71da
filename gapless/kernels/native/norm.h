// The norm of one row: for the kernels, and for sums of ranks that end with one.
#pragma once

#include <cmath>
#include <cstdint>

#include "vec.h"

namespace gapless {

inline float factor(f32x16 squares, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

template <typename T>
inline void norm_row(const T* x, const float* weight, int64_t size, float eps, T* out) {
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

}  // namespace gapless
