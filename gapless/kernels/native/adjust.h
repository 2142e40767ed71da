// Logits of rows with biases, penalties, allowed ids or bad words: see gapless/kernels/adjust.py.
#pragma once

#include <cstdint>

#include "glue.h"
#include "vec.h"

namespace gapless {

extern const int64_t ADJUST_COLUMNS;  // columns of parameters, at least

// A row's lines of the tables and of its slot, and the number of its drafts that count as tokens.
struct Asking {
  const int32_t *state, *params, *history, *wishes;
  int32_t *counts, *counted;
  float* logits;
  int64_t place;
};

// Counts the tokens of the history that came since the last call.
void count_tokens(const Asking& row);

// The raw logits of `count` tokens from `first` on, with penalties, into the slot.
template <typename T>
void penalize(const T* raw, int64_t first, int64_t count, const Asking& row);

// Then what the lists of the row change.
template <typename T>
void apply_lists(const T* raw, int64_t vocab, const Asking& row);

}  // namespace gapless
