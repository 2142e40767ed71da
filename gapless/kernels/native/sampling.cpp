#include "sampling.h"

#include <algorithm>

#include <cmath>
#include <limits>


namespace gapless {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

template <typename T>
int64_t first_equal(const T* x, float value, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    i32x16 same = load(x + i) == all(value);
#ifdef __AVX512F__
    if (!_mm512_test_epi32_mask((__m512i)same, (__m512i)same)) continue;
#endif
    for (int lane = 0; lane < LANES; lane++)
      if (same[lane]) return i + lane;
  }
  for (; i < count; i++)
    if (to_float(x[i]) == value) return i;
  return 0;
}

// Four words of Philox4x32-10 for the counter (block, position, 0, 0).
inline void philox(uint32_t block, uint32_t position, uint32_t key0, uint32_t key1, uint32_t* out) {
  uint32_t word0 = block, word1 = position, word2 = 0, word3 = 0;
  for (int round = 0; round < 10; round++) {
    uint64_t product0 = uint64_t(word0) * 0xD2511F53u, product1 = uint64_t(word2) * 0xCD9E8D57u;
    word0 = uint32_t(product1 >> 32) ^ word1 ^ key0;
    word2 = uint32_t(product0 >> 32) ^ word3 ^ key1;
    word1 = uint32_t(product1), word3 = uint32_t(product0);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  out[0] = word0, out[1] = word1, out[2] = word2, out[3] = word3;
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
      odd |= some != some;
    }
  float top = largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  bool nan = false;
  for (int lane = 0; lane < LANES; lane++) nan |= odd[lane] != 0;
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

void minus_uniform(int64_t vocab, uint32_t position, uint32_t key_low, uint32_t key_high, float* out) {
  constexpr int SIDE = 16;  // blocks at a time, so that the compiler works them side by side
  for (int64_t token = 0; token < vocab; token += 4 * SIDE) {
    uint32_t words[SIDE][4];
    for (int i = 0; i < SIDE; i++) philox(uint32_t(token / 4 + i), position, key_low, key_high, words[i]);
    int64_t count = std::min<int64_t>(4 * SIDE, vocab - token);
    for (int64_t i = 0; i < count; i++) {
      float uniform = (float(words[i / 4][i % 4]) + 0.5f) * 0x1p-32f;
      out[token + i] = -(uniform > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : uniform);
    }
  }
}

void negate(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] = -x[i];
}

template <typename T>
int64_t draw(const T* logits, float best, float temperature, float* minus_noise, int64_t vocab) {
  f32x16 top = all(NONE);
  float last = NONE;
  int64_t i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    f32x16 score = (load(logits + i) - best) / temperature - load(minus_noise + i);
    store(minus_noise + i, score);
    top = max(score, top);
  }
  for (; i < vocab; i++) {
    minus_noise[i] = (to_float(logits[i]) - best) / temperature - minus_noise[i];
    last = std::max(last, minus_noise[i]);
  }
  return first_equal(minus_noise, std::max(last, largest(top)), vocab);
}

template Best best_of(const float*, int64_t);
template Best best_of(const bf16*, int64_t);
template int64_t draw(const float*, float, float, float*, int64_t);
template int64_t draw(const bf16*, float, float, float*, int64_t);

}  // namespace gapless
