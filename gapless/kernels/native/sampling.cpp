#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "parallel.h"

namespace gapless {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr Cut KEEP_ALL{NONE, std::numeric_limits<int32_t>::max()};

// Which of the tokens first, first + 1 and so on are kept.
i32x16 kept(f32x16 x, int64_t first, const Cut& cut) {
  return more(x, all(cut.value)) | (same(x, all(cut.value)) & upto(cut.id, first));
}

template <typename T>
int64_t first_equal(const T* x, float value, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    i32x16 here = same(load(x + i), all(value));
    if (!any(here)) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (here[lane]) return i + lane;
  }
  for (; i < count; i++)
    if (to_float(x[i]) == value) return i;
  return 0;
}

// The low halves of the lanes times a factor.
inline u64s times(u64s a, uint32_t factor) {
#if GAPLESS_AVX512  // the compiler would multiply whole lanes
  return (u64s)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (u64s)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#else
  return (a & 0xFFFFFFFF) * factor;
#endif
}

// The random words of 64 tokens, in their order: Philox4x32-10 of the counters (block, position, 0, 0) for sixteen blocks
// from this one on. A word is the low half of a lane; what stands in the upper one means nothing.
inline void random_words(uint32_t block, const Stream& stream, u32x16* out) {
  constexpr int SOME = sizeof(u64s) / 8, BLOCKS = 16;
  uint64_t first[BLOCKS], second[BLOCKS], all[2 * BLOCKS];
  for (int i = 0; i < BLOCKS; i += SOME) {
    u64s word0, word1 = u64s{} + stream.position, word2{}, word3{};
    for (int lane = 0; lane < SOME; lane++) word0[lane] = block + i + lane;
    uint32_t key0 = stream.key_low, key1 = stream.key_high;
    for (int round = 0; round < 10; round++) {
      u64s product0 = times(word0, 0xD2511F53u), product1 = times(word2, 0xCD9E8D57u);
      word0 = (product1 >> 32) ^ word1 ^ key0, word1 = product1;
      word2 = (product0 >> 32) ^ word3 ^ key1, word3 = product0;
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    word0 = (word0 & 0xFFFFFFFF) | word1 << 32, word2 = (word2 & 0xFFFFFFFF) | word3 << 32;
    std::memcpy(first + i, &word0, sizeof(word0)), std::memcpy(second + i, &word2, sizeof(word2));
  }
  for (int i = 0; i < BLOCKS; i++) all[2 * i] = first[i], all[2 * i + 1] = second[i];
  std::memcpy(out, all, sizeof(all));
}

}  // namespace

template <typename T>
Best best_of(const T* x, int64_t count) {
  f32x16 tops[4] = {all(NONE), all(NONE), all(NONE), all(NONE)};
  i32x16 odd{};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int v = 0; v < 4; v++) {
      f32x16 some = load(x + i + v * LANES);
      tops[v] = max(some, tops[v]);
      odd |= ~same(some, some);
    }
  float top = largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  bool nan = any(odd);
  for (; i < count; i++) {
    float value = to_float(x[i]);
    nan |= value != value;
    top = value > top ? value : top;
  }
  if (nan)
    for (i = 0; i < count; i++)
      if (to_float(x[i]) != to_float(x[i])) return {to_float(x[i]), i, false};
  return {top, first_equal(x, top, count), std::isfinite(top)};
}

template <typename T>
std::vector<Contender> contenders(
    const T* row, int64_t vocab, float best, float temperature, const Cut& cut, const Stream& stream) {
  constexpr double DOUBT = 1e-3;  // more than rounding moves a score that can win
  constexpr float LEAST = -2.9f, MOST = 22.9f, LN2 = 0.69314718f;  // noise is between the first two
  std::vector<Contender> found;
  double lead = LEAST;  // of the scores so far; the best token's is above this
  // Scores are compared times the temperature, which needs no division. A temperature that float32 hardly holds looks
  // larger, which lets more through.
  const float scale = std::max(temperature, 1e-20f), slope = scale * LN2 * 0x1p-23f;
  for (int64_t first = 0; first < vocab; first += 4 * LANES) {
    f32x16 below[4], top = all(NONE);
    for (int v = 0; v < 4; v++) {
      int64_t i = first + v * LANES;
      f32x16 x = i < vocab ? load_some(row + i, int(std::min<int64_t>(LANES, vocab - i))) : all(NONE);
      below[v] = pick(kept(x, i, cut), x - best, all(NONE));
      top = max(below[v], top);
    }
    if (largest(top) < scale * (float(lead) - MOST)) continue;
    u32x16 words[4];
    random_words(uint32_t(first / 4), stream, words);
    // A token's noise is less than -log(u) of its uniform number u = word / 2^32, and a float's bits as a whole number
    // are linear in less than its log2.
    f32x16 above[4], most = all(NONE);
    for (int v = 0; v < 4; v++) {
      i32x16 bits = bits_of<i32x16>(to_floats(words[v]));
      above[v] = below[v] - to_floats(bits) * slope;
      most = max(above[v], most);
    }
    float least = scale * (float(lead - DOUBT) - (127 + 32) * LN2);
    if (largest(most) < least) continue;
    for (int i = 0; i < 4 * LANES && first + i < vocab; i++) {
      if (above[i / LANES][i % LANES] < least) continue;
      float uniform = std::min((float(words[i / LANES][i % LANES]) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
      double score = double(below[i / LANES][i % LANES] / temperature) - std::log(-std::log1p(-double(uniform)));
      if (score < lead - DOUBT) continue;
      lead = std::max(lead, score);
      found.push_back({int32_t(first + i), uniform, score});
    }
  }
  std::erase_if(found, [&](const Contender& one) { return one.score < lead - DOUBT; });
  return found;
}

namespace {

constexpr float UNITS = 0x1p40f;  // the best token's weight as a whole number, so that no sum depends on its order
constexpr int STEPS[] = {12, 10, 10};  // bits of a key that each look at the tokens tells
constexpr int64_t PIECE = 1 << 15;     // tokens of a row that a thread takes

// A token's term in a sum: one, or its weight in units.
struct Amount {
  bool weight;
  float best, temperature;

  f32x16 weights(f32x16 x) const { return exp((x - best) / temperature); }

  int64_t of(float x) const { return weight ? int64_t(weights(all(x))[0] * UNITS) : 1; }

  // Adds the amounts of `count` tokens to the sums of their buckets: `bits` bits of a key after the first `known`.
  template <typename T>
  void add(const T* x, int64_t count, int known, int bits, int64_t* sums) const {
    constexpr int SOME = 32 * LANES;  // through memory, which is faster than to take vectors apart
    uint32_t buckets[SOME];
    float units[SOME];
    for (int64_t first = 0; first < count; first += SOME) {
      int some = int(std::min<int64_t>(SOME, count - first));
      for (int i = 0; i < some; i += LANES) {
        f32x16 values = load_some(x + first + i, some - i);
        u32x16 bucket = keys(values) << known >> (32 - bits);
        std::memcpy(buckets + i, &bucket, sizeof(bucket));
        if (weight) store(units + i, weights(values) * UNITS);
      }
      for (int i = 0; i < some; i++) sums[buckets[i]] += weight ? int64_t(units[i]) : 1;
    }
  }
};

// The sums of amounts by buckets.
template <typename T>
std::vector<int64_t> tally(const T* x, int64_t count, int known, int bits, const Amount& amount, bool spread) {
  int64_t size = 1 << bits, pieces = spread ? (count + PIECE - 1) / PIECE : 1;
  std::vector<int64_t> sums(pieces * size);
  share(pieces, spread, [&](int64_t piece, bool) {
    int64_t begin = piece * PIECE, end = piece + 1 < pieces ? begin + PIECE : count;
    amount.add(x + begin, end - begin, known, bits, sums.data() + piece * size);
  });
  for (int64_t piece = 1; piece < pieces; piece++)
    for (int64_t i = 0; i < size; i++) sums[i] += sums[piece * size + i];
  sums.resize(size);
  return sums;
}

// Some tokens' logits.
struct Logits {
  std::unique_ptr<float[]> data;
  int64_t count;
};

// The tokens with passing keys, and room for `more`.
template <typename T, typename Passes>
Logits narrowed(const T* x, int64_t count, const Passes& passes, int64_t more = 0) {
  Logits found{std::make_unique_for_overwrite<float[]>(count + more + LANES), 0};
  for (int64_t i = 0; i < count; i += LANES) {
    f32x16 values = load_some(x + i, int(std::min<int64_t>(LANES, count - i)));
    found.count += compress(found.data.get() + found.count, values, passes(keys(values)) & upto(count - 1, i));
  }
  return found;
}

// The point where a sum over the best tokens reaches its target: a logit, and the needed number of tokens with it.
struct Place {
  uint32_t key;
  int64_t needed;
};

// `sums` are by the first bits of the keys.
template <typename T>
Place reach(const T* x, int64_t count, std::vector<int64_t> sums, int64_t target, const Amount& amount) {
  Place place{};
  Logits left{};
  int known = 0;
  for (int bits : STEPS) {
    if (known) sums = tally(left.data.get(), left.count, known, bits, amount, false);
    int64_t bucket = (1 << bits) - 1;
    for (; bucket > 0 && sums[bucket] < target; bucket--) target -= sums[bucket];
    place.key = place.key << bits | uint32_t(bucket);
    auto here = [&](u32x16 key) { return same(key >> (32 - known - bits), all(place.key)); };
    left = known ? narrowed(left.data.get(), left.count, here) : narrowed(x, count, here);
    known += bits;
  }
  int64_t each = std::max<int64_t>(amount.of(of_key(place.key)), 1);
  place.needed = (target + each - 1) / each;
  return place;
}

// The lowest key of a logit that weighs this share of the best.
uint32_t likely(float share, const Amount& amount) {
  uint32_t low = 0, high = keys(all(amount.best))[0];
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (amount.weights(all(of_key(middle)))[0] >= share)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The id of the n-th token with this logit, counted from 1.
template <typename T>
int32_t nth(const T* row, int64_t vocab, float value, int64_t n) {
  for (int64_t i = 0; i < vocab; i += LANES) {
    int some = int(std::min<int64_t>(LANES, vocab - i));
    i32x16 here = same(load_some(row + i, some), all(value));
    if (!any(here)) continue;
    for (int lane = 0; lane < some; lane++)
      if (here[lane] && --n <= 0) return int32_t(i + lane);
  }
  return KEEP_ALL.id;
}

// The end of the tokens that top-p keeps of these.
template <typename T>
Place reach_share(const T* x, int64_t count, float top_p, const Amount& units, bool spread) {
  std::vector<int64_t> sums = tally(x, count, 0, STEPS[0], units, spread);
  int64_t total = std::accumulate(sums.begin(), sums.end(), int64_t(0));
  int64_t needed = std::clamp(int64_t(std::ceil(double(top_p) * double(total))), int64_t(1), total);
  return reach(x, count, std::move(sums), needed, units);
}

}  // namespace

template <typename T>
Cut cut_of(const T* row, int64_t vocab, const Filters& filters, bool spread) {
  Best best = best_of(row, vocab);
  bool few = filters.top_k > 0 && filters.top_k < vocab;
  if (!best.finite || filters.temperature <= 0 || !(few || filters.top_p < 1 || filters.min_p > 0)) return KEEP_ALL;
  Amount units{true, best.value, filters.temperature}, ones{};
  uint32_t lowest = filters.min_p > 0 ? likely(filters.min_p, units) : 0;
  Place place{};
  if (few) place = reach(row, vocab, tally(row, vocab, 0, STEPS[0], ones, spread), filters.top_k, ones);
  if (filters.top_p < 1 && !few) place = reach_share(row, vocab, filters.top_p, units, spread);
  if (filters.top_p < 1 && few) {
    Logits left = narrowed(row, vocab, [&](u32x16 key) { return more(key, all(place.key)); }, place.needed);
    std::fill_n(left.data.get() + left.count, place.needed, of_key(place.key));
    place = reach_share(left.data.get(), left.count + place.needed, filters.top_p, units, false);
  }
  if (place.key < lowest || !place.needed) return {of_key(lowest), KEEP_ALL.id};
  float value = of_key(place.key);
  // A search that reached what cannot be drawn reached everything.
  return value == NONE ? KEEP_ALL : Cut{value, nth(row, vocab, value, place.needed)};
}

template Best best_of(const float*, int64_t);
template Best best_of(const bf16*, int64_t);
template Best best_of(const f16*, int64_t);
template Cut cut_of(const float*, int64_t, const Filters&, bool);
template Cut cut_of(const bf16*, int64_t, const Filters&, bool);
template Cut cut_of(const f16*, int64_t, const Filters&, bool);
template std::vector<Contender> contenders(const float*, int64_t, float, float, const Cut&, const Stream&);
template std::vector<Contender> contenders(const bf16*, int64_t, float, float, const Cut&, const Stream&);
template std::vector<Contender> contenders(const f16*, int64_t, float, float, const Cut&, const Stream&);

}  // namespace gapless
