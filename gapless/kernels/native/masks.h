// Masks of rows whose matchers decide what may come next: gapless/kernels/masks.py says what each does.
#pragma once

#include <cstdint>

#include "glue.h"

namespace gapless {

enum Mail { MAIL_TAG, MAIL_TOLD = 2, MAIL_TOKEN = 4, MAIL_MASK = 16 };

// A row that gets masks: its line of the state, its slot's mail and owner.
struct Masked {
  int32_t *state, *mail, owner;

  int64_t tag() const { return int64_t(owner) << 32 | uint32_t(state[LENGTH]); }
};

// Notes whether the mask of the row's next token is late; if not, tokens that it leaves out get -inf.
void mask(const Masked& row, float* logits, int64_t vocab);

// The token that a live row got, where it got one.
void reply(const Masked& row, int32_t token);

}  // namespace gapless
