// Low-rank adapters: see gapless/kernels/adapt.py for their terms.
#pragma once

#include <cstdint>

#include "vec.h"

namespace gapless {

constexpr int64_t MOST_RANKS = 1024;  // of all projections of a product

struct AdapterShape {
  int64_t inputs, outputs, rank;
  const int64_t* ends;  // of the columns of each projection
  int64_t projections;
};

// y += (x @ down.T) @ up for each token whose slot is not 0; the others are not touched.
template <typename T>
void adapt(
    const T* x, int64_t x_stride, T* y, const int64_t* slots, int64_t tokens, const T* down, const T* up,
    const AdapterShape& shape);

}  // namespace gapless
