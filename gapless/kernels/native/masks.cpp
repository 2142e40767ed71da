#include "masks.h"

#include <algorithm>
#include <limits>

namespace gapless {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t* tag_at(const Masked& row, int64_t word) { return reinterpret_cast<int64_t*>(row.mail + word); }

// Whether the mask after the row's tokens and `place` drafts is ready.
bool there(const Masked& row, int64_t place) {
  if (__atomic_load_n(tag_at(row, MAIL_TAG + 2 * place), __ATOMIC_ACQUIRE) != row.tag() + place) return false;
  return place == 0 || row.mail[MAIL_ALONG + place - 1] == row.drafts[place - 1];
}

}  // namespace

void leave_masked(const int32_t* mask, float* logits, int64_t vocab) {
  for (int64_t first = 0; first < vocab; first += 32, mask++) {
    uint32_t allowed = uint32_t(*mask);
    int64_t count = std::min<int64_t>(32, vocab - first);
    if (allowed == 0) std::fill_n(logits + first, count, NONE);
    for (int64_t i = 0; allowed && ~allowed && i < count; i++)
      if (!(allowed >> i & 1)) logits[first + i] = NONE;
  }
}

void mask(const Masked& row, const Places& own) {
  int64_t place = 0, drafted = drafts_of(row.state, own.places);
  for (; place <= drafted && there(row, place); place++)
    std::copy_n(row.mail + MAIL_MASK + place * own.words, own.words, own.masks + place * own.words);
  row.state[LATE] = place == 0;
  if (place > 0 && own.places > 1) row.state[DRAFTED] = int32_t(row.state[LENGTH] + place - 1);
}

void expect(const Masked& row, const int32_t* params, const int32_t* tokens, int64_t width, int64_t most) {
  int64_t count = 0;
  while (count < width && tokens[count] >= 0) count++;
  if (!row.state[ACTIVE] || count == 0) return;
  if (__atomic_load_n(tag_at(row, MAIL_AHEAD), __ATOMIC_ACQUIRE) != row.tag() - count) return;
  const int32_t* run = row.mail + MAIL_RUN;
  if (!std::equal(tokens, tokens + count, run)) return;
  int64_t room = std::min<int64_t>({params[DRAFTS], int64_t(params[MAX_LEN]) - 1 - row.state[LENGTH], most});
  int64_t left = std::min(row.mail[MAIL_EXPECTED] - count, room);
  if (left <= 0) return;
  if (drafts_of(row.state, most + 1) >= left && std::equal(run + count, run + count + left, row.drafts)) return;
  std::copy_n(run + count, left, row.drafts);
  row.state[DRAFTED] = int32_t(row.state[LENGTH] + left);
}

void reply(const Masked& row, const int32_t* tokens, int64_t width, int64_t drafts) {
  if (!row.state[ACTIVE] || tokens[0] == NO_TOKEN) return;
  std::copy_n(tokens, width, row.mail + MAIL_TOKENS);
  int64_t count = drafts_of(row.state, drafts + 1);
  row.mail[MAIL_DRAFTED] = int32_t(count);
  std::copy_n(row.drafts, count, row.mail + MAIL_DRAFTS);
  __atomic_store_n(tag_at(row, MAIL_TOLD), row.tag(), __ATOMIC_RELEASE);
}

}  // namespace gapless
