#include "adjust.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace gapless {
namespace {

constexpr int32_t IN_PROMPT = 1 << 30;
constexpr float BANNED = -1e30f;

enum Penalty { REPETITION = FIRST_PENALTY, FREQUENCY, PRESENCE, PENALTY_END };  // in the order of base/params.py

// A product that is rounded before it is subtracted, as torch's is: else compilers join the two.
[[gnu::noinline]] float product(float a, float b) { return a * b; }

struct Penalties {
  float repetition, frequency, presence;

  explicit Penalties(const int32_t* params)
      : repetition(bits_of<float>(params[REPETITION])),
        frequency(bits_of<float>(params[FREQUENCY])),
        presence(bits_of<float>(params[PRESENCE])) {}

  bool none() const { return repetition == 1 && frequency == 0 && presence == 0; }

  float of(float x, int32_t count) const {
    if (!count) return x;
    int32_t output = count & (IN_PROMPT - 1);
    x = x > 0 ? x / repetition : x * repetition;
    return x - product(frequency, float(output)) - (output ? presence : 0);
  }
};

// How often the row has a token, its drafts before this place included.
int32_t count_of(const Asking& row, int32_t token) {
  const int32_t* drafts = row.history + row.state[LENGTH];
  return row.counts[token] + int32_t(std::count(drafts, drafts + row.place, token));
}

}  // namespace

const int64_t ADJUST_COLUMNS = PENALTY_END;

void count_tokens(const Asking& row) {
  if (Penalties(row.params).none() && !row.wishes[PROCESSORS]) return;
  int32_t length = row.state[LENGTH], output = row.wishes[OUTPUT];
  for (int32_t i = *row.counted; i < length; i++) {
    int32_t& count = row.counts[row.history[i]];
    count = i < output ? count | IN_PROMPT : count + 1;
  }
  *row.counted = length;
}

template <typename T>
void penalize(const T* raw, int64_t first, int64_t count, const Asking& row) {
  Penalties penalties(row.params);
  for (int64_t i = first; i < first + count; i++) row.logits[i] = to_float(raw[i]);
  if (penalties.none()) return;
  constexpr int64_t SOME = 64;  // few tokens of a vocabulary have a count
  for (int64_t i = first; i < first + count; i += SOME) {
    int64_t end = std::min(i + SOME, first + count);
    int32_t any = 0;
    for (int64_t j = i; j < end; j++) any |= row.counts[j];
    for (int64_t j = i; any && j < end; j++) row.logits[j] = penalties.of(row.logits[j], row.counts[j]);
  }
  const int32_t* drafts = row.history + row.state[LENGTH];
  for (const int32_t* draft = drafts; draft < drafts + row.place; draft++)
    if (*draft >= first && *draft < first + count)
      row.logits[*draft] = penalties.of(to_float(raw[*draft]), count_of(row, *draft));
}

template <typename T>
void apply_lists(const T* raw, int64_t vocab, const Asking& row) {
  const int32_t *biased = row.wishes + WISHES, *biases = biased + row.wishes[BIASES];
  const int32_t *allowed = biases + row.wishes[BIASES], *ends = allowed + row.wishes[ALLOWED];
  const int32_t* words = ends + row.wishes[BAD_WORDS];
  Penalties penalties(row.params);
  for (int64_t i = 0; i < row.wishes[BIASES]; i++) {
    float x = to_float(raw[biased[i]]) + bits_of<float>(biases[i]);
    row.logits[biased[i]] = penalties.none() ? x : penalties.of(x, count_of(row, biased[i]));
  }
  if (allowed != ends) {
    std::vector<float> kept;
    for (const int32_t* id = allowed; id < ends; id++) kept.push_back(row.logits[*id]);
    std::fill_n(row.logits, vocab, -std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < kept.size(); i++) row.logits[allowed[i]] = kept[i];
  }
  int64_t length = row.state[LENGTH] + row.place, output = length - row.wishes[OUTPUT];
  for (int64_t i = 0, begin = 0; i < row.wishes[BAD_WORDS]; begin = ends[i++]) {
    int64_t before = ends[i] - begin - 1;
    const int32_t* word = words + begin;
    if (before > output || !std::equal(word, word + before, row.history + length - before)) continue;
    float& x = row.logits[word[before]];
    x = std::min(BANNED, x);
  }
}

template void penalize(const float*, int64_t, int64_t, const Asking&);
template void penalize(const bf16*, int64_t, int64_t, const Asking&);
template void penalize(const f16*, int64_t, int64_t, const Asking&);
template void apply_lists(const float*, int64_t, const Asking&);
template void apply_lists(const bf16*, int64_t, const Asking&);
template void apply_lists(const f16*, int64_t, const Asking&);

}  // namespace gapless
