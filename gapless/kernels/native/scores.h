// Log-probabilities of sampled tokens, of the raw logits. Words of a line as in gapless/kernels/layout.py.
#pragma once

#include <cstdint>

#include "glue.h"
#include "vec.h"

namespace gapless {

enum Score { SCORE_ROW, SCORE_GENERATION, SCORE_POSITION, SCORE_LOGPROB, SCORE_RANK, SCORE_TOP };

template <typename T>
struct Scored {
  const T* logits;  // [places * R, vocab]
  int64_t vocab;
  const int32_t* index;  // [count], which logits
  int64_t count;
  const int32_t* rows;  // [R], of the tables
  const int32_t* tokens;  // [R, token_width]
  int64_t batch, token_width;
};

// A line for each listed place of a row, from `lines` on: the token that it got, and the `width` most likely ones.
template <typename T>
void score(const Scored<T>& step, Table state, int64_t width, int32_t* lines);

}  // namespace gapless
