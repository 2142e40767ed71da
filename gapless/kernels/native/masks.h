// Masks of rows with matchers: see gapless/kernels/masks.py.
#pragma once

#include <cstdint>

#include "glue.h"

namespace gapless {

constexpr int64_t MAX_DRAFTS = 8;
enum Mail {
  MAIL_TAG,
  MAIL_TOLD = MAIL_TAG + 2 * (1 + MAX_DRAFTS),
  MAIL_TOKENS = MAIL_TOLD + 2,
  MAIL_DRAFTED = MAIL_TOKENS + 1 + MAX_DRAFTS,
  MAIL_DRAFTS,
  MAIL_ALONG = MAIL_DRAFTS + MAX_DRAFTS,
  MAIL_AHEAD = MAIL_ALONG + MAX_DRAFTS,
  MAIL_EXPECTED = MAIL_AHEAD + 2,
  MAIL_RUN,
  MAIL_MASK = 80
};

// A row that gets masks: its line of the state, what its history has after its tokens, and its mail.
struct Masked {
  int32_t *state, *drafts, *mail;

  int64_t tag() const { return int64_t(state[GENERATION]) << 32 | uint32_t(state[LENGTH]); }
};

// A row's line of the masks: up to `places` masks of `words` words.
struct Places {
  int32_t* masks;
  int64_t words, places;
};

// Notes whether the mask of the row's next token is late; if not, fetches it, and the masks after drafts up to the
// first missing one.
void mask(const Masked& row, const Places& own);

// Writes -inf to the logits that a mask leaves out.
void leave_masked(const int32_t* mask, float* logits, int64_t vocab);

// A live row that got what its mail expects has up to `most` of the tokens expected after that as its drafts,
// unless its drafts begin with these.
void expect(const Masked& row, const int32_t* params, const int32_t* tokens, int64_t width, int64_t most);

// Replies with a live row's new tokens in a step of `width` tokens, if any, and its next drafts.
void reply(const Masked& row, const int32_t* tokens, int64_t width, int64_t drafts);

}  // namespace gapless
