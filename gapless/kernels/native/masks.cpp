#include "masks.h"

#include <algorithm>
#include <limits>

namespace gapless {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t* tag_at(const Masked& row, int word) { return reinterpret_cast<int64_t*>(row.mail + word); }

}  // namespace

void mask(const Masked& row, float* logits, int64_t vocab) {
  bool late = __atomic_load_n(tag_at(row, MAIL_TAG), __ATOMIC_ACQUIRE) != row.tag();
  row.state[LATE] = late;
  if (late) return;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row.mail + MAIL_MASK);
  for (int64_t first = 0; first < vocab; first += 32, words++) {
    uint32_t allowed = *words;
    int64_t count = std::min<int64_t>(32, vocab - first);
    if (allowed == 0) std::fill_n(logits + first, count, NONE);
    for (int64_t i = 0; allowed && ~allowed && i < count; i++)
      if (!(allowed >> i & 1)) logits[first + i] = NONE;
  }
}

void reply(const Masked& row, int32_t token) {
  if (!row.state[ACTIVE] || token == NO_TOKEN) return;
  row.mail[MAIL_TOKEN] = token;
  __atomic_store_n(tag_at(row, MAIL_TOLD), row.tag(), __ATOMIC_RELEASE);
}

}  // namespace gapless
