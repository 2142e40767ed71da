#include "scores.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "parallel.h"

namespace gapless {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
// Tokens of a row that are summed in float32. It follows from the vocabulary alone how a row is cut, and so do its bits.
constexpr int64_t PIECE = 1 << 14;
// Least logits of a call with a second thread.
constexpr int64_t WORTH = 1 << 14;

// A token as a whole number: greater for a larger logit and, of equal ones, for a smaller id. 0 is none.
using Ranked = uint64_t;
Ranked ranked(uint32_t key, int64_t id) { return Ranked(key) << 32 | uint32_t(~id); }
int32_t id_of(Ranked token) { return int32_t(~uint32_t(token)); }
float logit_of(Ranked token) { return of_key(uint32_t(token >> 32)); }

// Results for a piece of a row.
struct Part {
  float top;      // the largest logit
  bool odd;       // there is a NaN
  int64_t ahead;  // tokens that rank before the target
  double sum;     // of e^(logit - top)
};

void insert(Ranked token, Ranked* best, int64_t width) {
  int64_t i = width - 1;
  if (token <= best[i]) return;
  for (; i > 0 && best[i - 1] < token; i--) best[i] = best[i - 1];
  best[i] = token;
}

// `best` gets the best of these tokens, in order.
template <typename T>
Part look(const T* row, int64_t begin, int64_t end, int64_t target, Ranked* best, int64_t width) {
  float own = to_float(row[target]);
  f32x16 top = all(NONE);
  i32x16 odd{}, ahead{};
  std::fill_n(best, width, 0);
  for (int64_t i = begin; i < end; i += LANES) {
    i32x16 here = upto(end - 1, i);
    f32x16 x = load_some(row + i, int(std::min<int64_t>(LANES, end - i)));
    top = max(pick(here, x, all(NONE)), top);
    odd |= ~same(x, x);
    ahead -= here & (more(x, all(own)) | (same(x, all(own)) & upto(target - 1, i)));
    if (!width) continue;
    u32x16 key = keys(x);
    if (i - begin >= width && !any(more(key, all(uint32_t(best[width - 1] >> 32))))) continue;
    for (int lane = 0; lane < LANES && i + lane < end; lane++) insert(ranked(key[lane], i + lane), best, width);
  }
  Part part{largest(top), any(odd), 0, 0};
  for (int lane = 0; lane < LANES; lane++) part.ahead += ahead[lane];
  if (part.top == NONE) return part;
  f32x16 total{};
  for (int64_t i = begin; i < end; i += LANES) {
    f32x16 x = load_some(row + i, int(std::min<int64_t>(LANES, end - i)));
    total += pick(upto(end - 1, i), exp(x - part.top), f32x16{});
  }
  part.sum = sum(total);
  return part;
}

// From the parts of a row, and the best tokens of each, which are used up.
void write_line(
    const Part* parts, int64_t pieces, float own, Ranked* best, int64_t width, int32_t* line) {
  float top = NONE;
  bool odd = false;
  int64_t ahead = 0;
  for (int64_t i = 0; i < pieces; i++) {
    top = std::max(top, parts[i].top), odd |= parts[i].odd, ahead += parts[i].ahead;
    if (i)
      for (int64_t n = 0; n < width; n++) insert(best[i * width + n], best, width);
  }
  double total = 0;
  for (int64_t i = 0; i < pieces; i++) total += parts[i].sum * std::exp(double(parts[i].top) - top);
  double log_total = top + std::log(total);
  auto logprob = [&](float x) {
    return odd || !std::isfinite(top) ? std::numeric_limits<float>::quiet_NaN() : float(x - log_total);
  };
  line[SCORE_LOGPROB] = bits_of<int32_t>(logprob(own)), line[SCORE_RANK] = int32_t(ahead + 1);
  for (int64_t n = 0; n < width; n++) {
    line[SCORE_TOP + n] = best[n] ? id_of(best[n]) : NO_TOKEN;
    line[SCORE_TOP + width + n] = bits_of<int32_t>(best[n] ? logprob(logit_of(best[n])) : NONE);
  }
}

}  // namespace

template <typename T>
void score(const Scored<T>& step, Table state, int64_t width, int32_t* lines) {
  int64_t pieces = (step.vocab + PIECE - 1) / PIECE, size = SCORE_TOP + 2 * width;
  std::vector<Part> parts(step.count * pieces);
  std::vector<Ranked> best(step.count * pieces * width);
  auto given = [&](int64_t entry) { return step.tokens + step.index[entry] % step.batch * step.token_width; };
  auto place = [&](int64_t entry) { return step.index[entry] / step.batch; };
  auto token = [&](int64_t entry) { return given(entry)[place(entry)]; };
  auto row = [&](int64_t entry) { return step.logits + step.index[entry] * step.vocab; };
  auto target = [&](int64_t entry) { return std::max(token(entry), 0); };
  // Results after the last token of a row with drafts are undefined.
  auto idle = [&](int64_t entry) { return place(entry) > 0 && token(entry) < 0; };
  // A list is filled up with its last entry.
  auto again = [&](int64_t entry) { return entry && step.index[entry] == step.index[entry - 1]; };
  share(step.count * pieces, step.count * step.vocab / WORTH, [&](int64_t i, bool) {
    int64_t entry = i / pieces, begin = i % pieces * PIECE, end = std::min(begin + PIECE, step.vocab);
    if (!again(entry) && !idle(entry)) parts[i] = look(row(entry), begin, end, target(entry), best.data() + i * width, width);
  });
  for (int64_t entry = 0; entry < step.count; entry++) {
    int32_t* line = lines + entry * size;
    if (again(entry)) {
      std::copy_n(line - size, size, line);
      continue;
    }
    int32_t number = step.rows[step.index[entry] % step.batch];
    const int32_t* own = state.row(number);
    line[SCORE_ROW] = number, line[SCORE_GENERATION] = own[GENERATION];
    auto taken = std::count_if(given(entry), given(entry) + step.token_width, [](int32_t id) { return id >= 0; });
    line[SCORE_POSITION] = token(entry) >= 0 ? int32_t(own[LENGTH] - taken + place(entry)) : -1;
    Ranked* tops = best.data() + entry * pieces * width;
    write_line(parts.data() + entry * pieces, pieces, to_float(row(entry)[target(entry)]), tops, width, line);
  }
}

template void score(const Scored<float>&, Table, int64_t, int32_t*);
template void score(const Scored<bf16>&, Table, int64_t, int32_t*);
template void score(const Scored<f16>&, Table, int64_t, int32_t*);

}  // namespace gapless
