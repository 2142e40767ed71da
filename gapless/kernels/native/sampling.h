// Choosing tokens: the largest logit, and the noise that turns the largest into a draw.
#pragma once

#include <cstdint>

#include "vec.h"

namespace gapless {

// The largest of a row, where it lies first, and whether it is finite. A NaN counts as the largest, as in torch.
struct Best {
  float value;
  int64_t index;
  bool finite;
};

template <typename T>
Best best_of(const T* row, int64_t vocab);

// Minus the uniform numbers of gapless/kernels/random.py for all tokens: its noise is -log(-log1p(these)).
void minus_uniform(int64_t vocab, uint32_t position, uint32_t key_low, uint32_t key_high, float* out);

void negate(float* x, int64_t count);

// The first largest of (logits - best) / temperature - minus_noise, which is overwritten.
template <typename T>
int64_t draw(const T* logits, float best, float temperature, float* minus_noise, int64_t vocab);

}  // namespace gapless
