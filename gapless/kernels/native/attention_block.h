// One block of keys by some queries, for attention.cpp.
//
// Softmax goes along with the sums ("online softmax": Milakov, Gimelshein, arXiv 1805.02867; FlashAttention: Dao et
// al., arXiv 2205.14135). Query heads that share a KV head are worked together, so a key is read once for all of them.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace gapless {
namespace {

constexpr int BLOCK = 64;  // keys at a time
constexpr int GROUP = 4;   // queries at a time
constexpr float NONE = -std::numeric_limits<float>::infinity();

constexpr int64_t DEEP = 2 * WIDTH;  // dims at a time: of `Two`
// Sums that are kept in registers.
#if GAPLESS_AVX512 || defined(__aarch64__)
constexpr int SUMS = 16;
#else
constexpr int SUMS = 8;
#endif

// Whether weights are rounded to bfloat16 and pairs of values multiplied at once. Sums of a head's dims 0..32 then lie
// as interleaving two rows leaves them: 0-3, 8-11, 16-19, 24-27, and 4-7, 12-15, 20-23, 28-31 behind them. Without
// pairs they lie as load_two leaves them.
template <typename T>
constexpr bool PAIRS = GAPLESS_BF16_DOT && std::is_same_v<T, bf16>;

// Queries as they are multiplied: floats in the order of load_two, and zeros up to `padded` dims.
template <typename T>
using Query = std::conditional_t<PAIRS<T>, T, float>;

int64_t padded(int64_t dim) { return (dim + 31) / 32 * 32; }

// Sums so far of one query: largest score, sum of weights by lane, weighted values [dim].
struct State {
  float top;
  f32x16 weight;
  float* values;
};

template <typename T>
inline void ask(const T* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < int64_t(count * sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

template <typename S>
inline void ask(const Stored<S>& entry, int64_t dim) {
  ask(entry.key, dim), ask(entry.value, Stored<S>::NIBBLES ? dim / 2 : dim);
}

// Keys of all heads: before the first that may be read it is repeated, and so is the last one after it. `next`: keys to
// be asked for meanwhile.
template <typename S>
struct Block {
  Key<S> keys[BLOCK];
  const Key<S>* next;
  int count;

  // Repeats the ends of `limits` in place of the keys outside.
  void close(const Range& limits) {
    std::fill(keys, keys + limits.low, keys[limits.low]);
    std::fill(keys + limits.high, keys + BLOCK, keys[limits.high - 1]);
  }
};

// The part of `range` in the block at `start`; empty without one.
Range within(const Range& range, int64_t start) {
  const int64_t high = std::clamp<int64_t>(range.high - start, 0, BLOCK);
  return {std::clamp<int64_t>(range.low - start, 0, high), high};
}

template <typename S>
void find_block(const Paged<S>& kv, const int32_t* pages, int64_t start, const Range& range, Block<S>& block) {
  const Range limits = within(range, start);
  block.count = int(limits.high);
  for (int i = int(limits.low); i < block.count;) {
    Key<S> key = kv.key(pages, start + i, 0);
    int run = int(std::min<int64_t>(block.count - i, kv.page_size - (start + i) % kv.page_size));
    for (int j = 0; j < run; j++, key = kv.after(key, kv.kv_heads)) block.keys[i + j] = key;
    i += run;
  }
  if (block.count) block.close(limits);
}

// One head of a block: its keys are at block.keys + keys, its values `values` further on.
struct HeadOf {
  int64_t keys, values, dim;
};

template <typename S>
HeadOf head_of(const Paged<S>& kv, int64_t head) {
  return {head * kv.dim, kv.value_offset(), kv.dim};
}

// Scratch of a thread, kept from call to call.
enum Use { VALUES, QUERIES, NUMBERS };
template <Use USE>
float* scratch(size_t size) {
  static thread_local std::vector<float> kept;
  if (kept.size() < size) kept.resize(size);
  return kept.data();
}

// The keys and values of one head of a block of fewer bits, as numbers: a block for this head alone.
template <typename T, typename S>
HeadOf unpack_block(const Paged<S>& kv, const Block<S>& block, const Range& limits, int64_t head, Block<T>& to) {
  constexpr int64_t LINE = 64;
  const int64_t stride = padded(kv.dim), values = BLOCK * stride;
  const auto raw = reinterpret_cast<uintptr_t>(scratch<NUMBERS>(2 * values * sizeof(T) / sizeof(float) + LINE));
  T* numbers = reinterpret_cast<T*>((raw + LINE - 1) / LINE * LINE);
  for (int64_t i = limits.low; i < limits.high; i++) {
    ask(kv.after(block.next[i], head), kv.dim);
    to.keys[i] = numbers + i * stride;
    unpack(kv.after(block.keys[i], head), kv.dim, numbers + i * stride, numbers + values + i * stride);
  }
  to.close(limits), to.next = to.keys, to.count = block.count;
  return {0, values, kv.dim};
}

// Calls body(block, start of its keys) for all blocks with keys of the range. Keys `after` them, BLOCK or none, are
// asked for in the last one.
template <typename S, typename Body>
void each_block(
    const Paged<S>& kv, const int32_t* pages, const Range& range, const Key<S>* after, const Body& body) {
  Block<S> blocks[2];
  int64_t start = range.low / BLOCK * BLOCK;
  find_block(kv, pages, start, range, blocks[0]);
  for (int turn = 0; start < range.high; start += BLOCK, turn ^= 1) {
    Block<S>&block = blocks[turn], &next = blocks[turn ^ 1];
    find_block(kv, pages, start + BLOCK, range, next);
    block.next = next.count ? next.keys : after ? after : block.keys;
    body(block, start);
  }
}

// The first `count` of two registers' numbers; the rest read as zero and are not touched.
template <typename T>
inline Two load_some_two(const T* from, int64_t count) {
  if (count >= DEEP) return load_two(from);
  T some[DEEP] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load_two(some);
}

template <typename T>
inline void store_some_two(T* to, const Two& x, int64_t count) {
  if (count >= DEEP) return store_two(to, x);
  T some[DEEP];
  store_two(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

#if GAPLESS_BF16_DOT
// The first `count` of 32; the rest read as zero and are not touched.
inline __m512i load_pairs(const bf16* from, int64_t count) {
  return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

inline __attribute__((always_inline)) Floats dot(const bf16* a, const bf16* b, int64_t dim) {
  __m512 total = _mm512_setzero_ps();
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + 32 <= dim; d += 32)
    total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(a + d), (__m512bh)_mm512_loadu_si512(b + d));
  if (d < dim)
    total = _mm512_dpbf16_ps(total, (__m512bh)load_pairs(a + d, dim - d), (__m512bh)load_pairs(b + d, dim - d));
  return (Floats)total;
}
#endif

// COUNT keys by ROWS queries, the lanes of each product not yet added.
template <typename T, int ROWS, int COUNT>
inline __attribute__((always_inline)) void dots(
    const T* const* keys, int64_t offset, const Query<T>* const* queries, int64_t dim, Floats (*totals)[4]) {
#if GAPLESS_BF16_DOT
  if constexpr (PAIRS<T>) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) totals[r][i] = dot(keys[i] + offset, queries[r], dim);
    return;
  } else
#endif
  {
    Floats found[ROWS][COUNT] = {};
    auto step = [&](int64_t d, auto load) {
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) {
        const Two key = load(keys[i] + offset + d);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          found[r][i] += key.a * load_floats(queries[r] + d);
          found[r][i] += key.b * load_floats(queries[r] + d + WIDTH);
        }
      }
    };
    int64_t d = 0;
    for (; d + DEEP <= dim; d += DEEP) step(d, [](const T* from) { return load_two(from); });
    if (d < dim) step(d, [&](const T* from) { return load_some_two(from, dim - d); });
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) totals[r][i] = found[r][i];
  }
}

// The sums of four vectors, as `join` wants them.
#if GAPLESS_AVX512
typedef Floats Four;
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
  auto both = [](Floats x, Floats y) {
    return _mm512_castps_pd(
        _mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y), _mm512_unpackhi_ps((__m512)x, (__m512)y)));
  };
  __m512d ab = both(a, b), cd = both(c, d);
  return (Floats)_mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}
#else
typedef float Four __attribute__((vector_size(16)));
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX2__)
  __m256 found = _mm256_hadd_ps(
      _mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(found), _mm256_extractf128_ps(found, 1));
#elif defined(__x86_64__)
  __m128 w = (__m128)a, x = (__m128)b, y = (__m128)c, z = (__m128)d;
  _MM_TRANSPOSE4_PS(w, x, y, z);
  return (Four)_mm_add_ps(_mm_add_ps(w, x), _mm_add_ps(y, z));
#else
  auto added = [](Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); };
  return Four{added(a), added(b), added(c), added(d)};
#endif
}
#endif

// Lane i: the i-th of the sixteen sums.
inline f32x16 join(const Four* four) {
#if GAPLESS_AVX512
  auto both = [](auto x, auto y) {
    return _mm512_add_ps(
        _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88), _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xDD));
  };
  return (f32x16)both(both(four[0], four[1]), both(four[2], four[3]));
#else
  return load(reinterpret_cast<const float*>(four));
#endif
}

// The weights of a block by query; halves hold them rounded where PAIRS.
template <int ROWS>
struct alignas(64) Weights {
  float of[ROWS][BLOCK];
  bf16 halves[ROWS][BLOCK];
};

// Weighted values of dims d.. of TWOS * DEEP: added to each query's. With TWOS of 1 there may be only `rest` of them.
template <typename T, int ROWS, int TWOS>
void add_values(
    const Block<T>& block, int64_t offset, int64_t d, int64_t rest, const Weights<ROWS>& weights, State* states) {
  Floats values[ROWS][2 * TWOS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * TWOS; v++) values[r][v] = load_floats(states[r].values + d + v * WIDTH);
  for (int i = 0; i < block.count; i++) {
    const T* from = block.keys[i] + offset + d;
    ask(block.next[i] + offset + d, TWOS * DEEP);
#pragma GCC unroll 8
    for (int t = 0; t < TWOS; t++) {
      const Two value = TWOS == 1 ? load_some_two(from, rest) : load_two(from + t * DEEP);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        values[r][2 * t] += weights.of[r][i] * value.a;
        values[r][2 * t + 1] += weights.of[r][i] * value.b;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * TWOS; v++) store_floats(states[r].values + d + v * WIDTH, values[r][v]);
}

#if GAPLESS_BF16_DOT
inline int32_t pair_at(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return pair;
}

// As add_values for dims d.. of CHUNKS * 32, two keys at a time.
template <int ROWS, int CHUNKS>
void add_pairs(
    const Block<bf16>& block, int64_t offset, int64_t d, int64_t rest, const Weights<ROWS>& weights, State* states) {
  __m512 values[ROWS][2 * CHUNKS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * CHUNKS; v++) values[r][v] = _mm512_loadu_ps(states[r].values + d + v * LANES);
  for (int i = 0; i < block.count; i += 2) {
    const bf16 *one = block.keys[i] + offset + d, *two = block.keys[i + 1] + offset + d;
    ask(block.next[i] + offset + d, 32 * CHUNKS);
    ask(block.next[i + 1] + offset + d, 32 * CHUNKS);
    __m512bh value[2 * CHUNKS];
#pragma GCC unroll 8
    for (int c = 0; c < CHUNKS; c++) {
      const int64_t count = CHUNKS == 1 ? rest : 32;
      __m512i a = load_pairs(one + 32 * c, count), b = load_pairs(two + 32 * c, count);
      value[2 * c] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      value[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      __m512bh pair = (__m512bh)_mm512_set1_epi32(pair_at(&weights.halves[r][i]));
#pragma GCC unroll 8
      for (int v = 0; v < 2 * CHUNKS; v++) values[r][v] = _mm512_dpbf16_ps(values[r][v], value[v], pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * CHUNKS; v++) _mm512_storeu_ps(states[r].values + d + v * LANES, values[r][v]);
}
#endif

// Caps a query's scores and drops those below the first that it reads; returns the largest by lane. Apart from the loop
// below, whose registers it would take from models that do neither.
[[gnu::noinline, gnu::cold]] f32x16 adjusted(float* scores, int count, const Range& limits, float softcap) {
  f32x16 top = all(NONE);
  for (int low = 0; low < count; low += LANES) {
    f32x16 some = load(scores + low);
    if (softcap != 0) some = pick(upto(limits.high - 1, low), capped(some, softcap), all(NONE));
    some = pick(upto(limits.low - 1, low), all(NONE), some);
    store(scores + low, some);
    top = max(some, top);
  }
  return top;
}

// Scores of a block; the sums so far are brought to the new largest score, and the weights follow from it.
template <typename T, int ROWS>
inline __attribute__((always_inline)) void weigh(
    const Block<T>& block, int64_t offset, int64_t dim, const Query<T>* const* queries, const Range* limits,
    const Attend& attend, State* states, Weights<ROWS>& weights) {
  f32x16 tops[ROWS];
  for (int r = 0; r < ROWS; r++) tops[r] = all(NONE);
  for (int low = 0; low < block.count; low += LANES) {
    Four fours[ROWS][4];
    for (int quad = 0; quad < 4; quad++) {
      const T* const* keys = block.keys + low + 4 * quad;
      for (int i = 0; i < 4; i++) ask(block.next[low + 4 * quad + i] + offset, dim);
      constexpr int COUNT = ROWS * 4 <= SUMS ? 4 : 2;
      Floats totals[ROWS][4];
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += COUNT) {
        Floats(*some)[4] = reinterpret_cast<Floats(*)[4]>(&totals[0][i]);
        dots<T, ROWS, COUNT>(keys + i, offset, queries, dim, some);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        fours[r][quad] = sums(totals[r][0], totals[r][1], totals[r][2], totals[r][3]);
    }
    for (int r = 0; r < ROWS; r++) {
      f32x16 scores = join(fours[r]) * attend.scale;
      scores = pick(upto(limits[r].high - 1, low), scores, all(NONE));
      store(&weights.of[r][low], scores);
      // A score that is no number must reach the result: max drops it, so the sum of weights carries it there.
      tops[r] = max(scores, tops[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    if (attend.softcap != 0 || limits[r].low > 0)
      tops[r] = adjusted(weights.of[r], block.count, limits[r], attend.softcap);
    float top = std::max(states[r].top, largest(tops[r]));
    float shift = top == NONE ? 0.0f : top;
    if (top > states[r].top) {
      f32x16 factor = exp(all(states[r].top - shift));
      states[r].weight *= factor;
      for (int64_t d = 0; d < padded(dim); d += LANES)
        store(states[r].values + d, load(states[r].values + d) * factor);
      states[r].top = top;
    }
    for (int low = 0; low < block.count; low += LANES) {
      f32x16 weight = exp(load(&weights.of[r][low]) - shift);
      if constexpr (PAIRS<T>) {
        store(&weights.halves[r][low], weight);
        weight = load(&weights.halves[r][low]);
      }
      store(&weights.of[r][low], weight);
      states[r].weight += weight;
    }
  }
}

// ROWS queries over a block of keys; query r reads those in limits[r], which is one or more for some r.
// DIM: the head's size where it is known beforehand, else 0.
template <typename T, int ROWS, int DIM>
void attend(
    const Block<T>& block, int64_t head_offset, int64_t value_offset, int64_t real_dim, const Query<T>* const* queries,
    const Range* limits, const Attend& attend, State* states) {
  const int64_t dim = DIM ? DIM : real_dim, offset = head_offset + value_offset;
  Weights<ROWS> weights;
  weigh<T, ROWS>(block, head_offset, dim, queries, limits, attend, states, weights);
  int64_t d = 0;
  if constexpr (PAIRS<T>) {
#if GAPLESS_BF16_DOT
    for (; d + 64 <= dim; d += 64) add_pairs<ROWS, 2>(block, offset, d, 64, weights, states);
    for (; d < dim; d += 32) add_pairs<ROWS, 1>(block, offset, d, dim - d, weights, states);
#endif
  } else {
    constexpr int TWOS = std::min(4, SUMS / 2 / ROWS);
    if constexpr (TWOS > 1)
      for (; d + TWOS * DEEP <= dim; d += TWOS * DEEP)
        add_values<T, ROWS, TWOS>(block, offset, d, TWOS * DEEP, weights, states);
    for (; d < dim; d += DEEP) add_values<T, ROWS, 1>(block, offset, d, dim - d, weights, states);
  }
}

template <typename T, int DIM>
auto of_rows(int count) {
  if (count == 4) return attend<T, 4, DIM>;
  if (count == 3) return attend<T, 3, DIM>;
  return count == 2 ? attend<T, 2, DIM> : attend<T, 1, DIM>;
}

template <typename T>
void attend_some(
    int count, const Block<T>& block, const HeadOf& head, const Query<T>* const* queries, const Range* limits,
    const Attend& attend, State* states) {
  constexpr bool KNOWN = PAIRS<T>;  // where known sizes gain 5 to 10 %
  auto* chosen = head.dim == 128  ? of_rows<T, KNOWN ? 128 : 0>(count)
                 : head.dim == 64 ? of_rows<T, KNOWN ? 64 : 0>(count)
                                  : of_rows<T, 0>(count);
  chosen(block, head.keys, head.values, head.dim, queries, limits, attend, states);
}

void reset(State& state, int64_t dim) {
  state.top = NONE, state.weight = f32x16{};
  std::fill_n(state.values, padded(dim), 0.0f);
}

template <typename T>
void finish(const State& state, int64_t dim, const Attend& attend, int64_t head, T* out) {
  const float* sink = attend.sinks ? attend.sinks + head : nullptr;
  const float scale = normalizer(state.top, sum(state.weight), sink) * attend.values;
  for (int64_t d = 0; d < dim; d += DEEP) {
    const Two x = {load_floats(state.values + d) * scale, load_floats(state.values + d + WIDTH) * scale};
    if constexpr (PAIRS<T>) {
#if GAPLESS_BF16_DOT
      const __m512 low = (__m512)x.a, high = (__m512)x.b;
      const __m512 first = _mm512_shuffle_f32x4(low, high, 0x44), second = _mm512_shuffle_f32x4(low, high, 0xEE);
      store_some(out + d, (f32x16)_mm512_shuffle_f32x4(first, first, 0xD8), int(dim - d));
      if (d + LANES < dim)
        store_some(out + d + LANES, (f32x16)_mm512_shuffle_f32x4(second, second, 0xD8), int(dim - d - LANES));
#endif
    } else {
      store_some_two(out + d, x, dim - d);
    }
  }
}

// The query as it is multiplied; `room` has padded(dim) floats for it.
template <typename T>
const Query<T>* prepared(const T* query, int64_t dim, float* room) {
  if constexpr (PAIRS<T>) return query;
  else {
    for (int64_t d = 0; d < dim; d += DEEP) {
      const Two x = load_some_two(query + d, dim - d);
      store_floats(room + d, x.a), store_floats(room + d + WIDTH, x.b);
    }
    return room;
  }
}

// Sums of several parts of a row become one, in the order of the parts.
void merge(State& into, const State& from, int64_t dim) {
  float top = std::max(into.top, from.top);
  float shift = top == NONE ? 0.0f : top;
  f32x16 a = exp(all(into.top - shift)), b = exp(all(from.top - shift));
  into.top = top;
  into.weight = into.weight * a + from.weight * b;
  for (int64_t d = 0; d < padded(dim); d += LANES)
    store(into.values + d, load(into.values + d) * a + load(from.values + d) * b);
}

}  // namespace
}  // namespace gapless
