// The attention of prompts, whatever multiplies. A row is one query with one of its heads; rows that share a KV head
// are worked together, and a block of keys is fetched once for many of them. Blocks lie at fixed positions and no row
// touches another, so a query's result depends neither on its chunk nor on its neighbours.
//
// A Multiplier keeps the queries of a unit and a block of keys and values as its instructions want them:
//   Number, Weight      of the queries and results; of the softmax as it is multiplied with values
//   GROUP, STEP         rows at a time; what the number of keys and that of dims are rounded up to
//   begin, end          of a unit
//   keep(row, query)    a query's dims
//   fetch(keys, values, count)    a block of `count` keys, whole steps
//   any_wild(first, last)         whether a value of these keys is infinite or no number
//   forget(first)                 zeros in place of the block's values from here on
//   score(low, high, count, scores)              rows low..high by the block's keys, [rows, KEYS]
//   add(weights, factors, first, last, count, sums)   of rows first..last: sums times factors, plus weights by values
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace gapless {

constexpr int64_t KEYS = 64;        // at a time
constexpr int64_t MOST_ROWS = 128;  // that share one fetch of a block of keys
constexpr int64_t MOST_DIM = 256;

inline int64_t whole_steps(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The dims of a row of sums.
inline int64_t sums_stride(int64_t dim) { return whole_steps(dim, 32); }

// Rows first.. of a chunk, whose queries begin at `token` of q and at `position` of the row's keys.
template <typename T>
struct Unit {
  const Queries<T>& q;
  const Paged<T>& kv;
  const int32_t* pages;
  int64_t head, token, position, first, count;
  float scale;

  int64_t grouped() const { return q.heads / kv.kv_heads; }
  int64_t query(int64_t row) const { return (first + row) / grouped(); }
  int64_t query_head(int64_t row) const { return head * grouped() + (first + row) % grouped(); }
};

// The largest score so far of a row, and the sum of its weights by lane.
struct Sofar {
  float top;
  f32x16 weight;
};

// A row's weights of `count` keys, the first `limit` of them read. Returns the factor of its sums so far.
template <typename Weight>
float weigh(const float* scores, int64_t count, int64_t limit, float scale, Sofar& sofar, Weight* weights) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  f32x16 found[KEYS / LANES], most = all(NONE);
  for (int64_t i = 0; i < count; i += LANES) {
    f32x16& score = found[i / LANES] = load(scores + i) * scale;
    if (limit < i + LANES) score = pick(upto(limit - 1, i), score, all(NONE));
    // A score that is no number must reach the result: max drops it, so the sum of weights carries it there.
    most = max(score, most);
  }
  float before = sofar.top, shift = 0;
  sofar.top = std::max(before, largest(most));
  if (sofar.top != NONE) shift = sofar.top;
  float factor = sofar.top > before ? exp(all(before - shift))[0] : 1.0f;
  sofar.weight *= factor;
  for (int64_t i = 0; i < count; i += LANES) {
    store(weights + i, exp(found[i / LANES] - shift));
    sofar.weight += load(weights + i);
  }
  return factor;
}

// A thread's buffers, kept from call to call.
template <typename Multiplier>
struct alignas(64) Prompt {
  using T = typename Multiplier::Number;
  static constexpr int64_t GROUP = Multiplier::GROUP, STEP = Multiplier::STEP;

  float sums[MOST_ROWS * MOST_DIM];  // weighted values so far, [rows, sums_stride]
  float scores[GROUP * KEYS];
  typename Multiplier::Weight weights[GROUP * KEYS];
  float factors[GROUP];
  Sofar sofar[MOST_ROWS];
  int64_t limits[MOST_ROWS];  // how many keys each row reads, never less than the row before
  bool apart;                 // the rows of this block must be worked one by one: see `fetch`
  Multiplier multiplier;

  // Keys and values of a block, with zeros after the last one read by the unit: memory there may hold no number. So may
  // a value that some rows read and earlier rows do not, and their weight of zero would not hide it.
  void fetch(const Unit<T>& unit, int64_t start) {
    static constexpr T zeros[MOST_DIM] = {};
    const Paged<T>& kv = unit.kv;
    const int64_t count = std::min(limits[unit.count - 1] - start, KEYS);
    const T *keys[KEYS], *values[KEYS];
    for (int64_t i = 0; i < count;) {
      const T* key = kv.key(unit.pages, start + i, unit.head);
      const int64_t end = std::min(count, i + kv.page_size - (start + i) % kv.page_size);
      for (; i < end; i++, key += kv.kv_heads * kv.dim) keys[i] = key, values[i] = key + kv.value_offset();
    }
    for (int64_t i = count; i < KEYS; i++) keys[i] = values[i] = zeros;
    multiplier.fetch(keys, values, whole_steps(count, STEP));
    apart = multiplier.any_wild(std::max<int64_t>(limits[0] - start, 0), count);
  }

  // Rows low..high; the last reads some of the block's keys.
  void attend(int64_t low, int64_t high, int64_t start, int64_t stride, float scale) {
    const int64_t count = whole_steps(std::min(limits[high - 1] - start, KEYS), STEP);
    int64_t first = low;  // that reads some of them; earlier rows stay unchanged
    while (limits[first] <= start) first++;
    multiplier.score(first, high, count, scores);
    for (int64_t row = first; row < high; row++)
      factors[row - first] =
          weigh(scores + (row - first) * KEYS, count, limits[row] - start, scale, sofar[row], weights + (row - first) * KEYS);
    if (!apart) return multiplier.add(weights, factors, 0, high - first, count, sums + first * stride);
    for (int64_t row = high - 1; row >= first; row--) {  // the last first: it reads most
      multiplier.forget(limits[row] - start);
      multiplier.add(weights, factors, row - first, row - first + 1, count, sums + first * stride);
    }
  }

  void begin(const Unit<T>& unit) {
    const int64_t dim = unit.kv.dim;
    std::fill_n(sums, unit.count * sums_stride(dim), 0.0f);
    multiplier.begin(dim);
    for (int64_t row = 0; row < unit.count; row++) {
      const T* from = unit.q.data + (unit.token + unit.query(row)) * unit.q.token_stride;
      multiplier.keep(row, from + unit.query_head(row) * dim);
      sofar[row] = {-std::numeric_limits<float>::infinity(), f32x16{}};
      // An inert row has one entry, whatever its chunk: each of its queries reads that.
      limits[row] = std::max<int64_t>(unit.position + unit.query(row) + 1, 1);
    }
  }

  void finish(const Unit<T>& unit, T* out) {
    const int64_t dim = unit.kv.dim;
    multiplier.end();
    for (int64_t row = 0; row < unit.count; row++) {
      T* to = out + ((unit.token + unit.query(row)) * unit.q.heads + unit.query_head(row)) * dim;
      const float *from = sums + row * sums_stride(dim), scale = 1.0f / sum(sofar[row].weight);
      for (int64_t d = 0; d < dim; d += LANES) store_some(to + d, load(from + d) * scale, int(dim - d));
    }
  }

  void attend(const Unit<T>& unit, T* out) {
    begin(unit);
    for (int64_t start = 0; start < limits[unit.count - 1]; start += KEYS) {
      fetch(unit, start);
      for (int64_t low = (unit.count - 1) / GROUP * GROUP; low >= 0; low -= GROUP) {
        const int64_t high = std::min(low + GROUP, unit.count);
        if (limits[high - 1] > start) attend(low, high, start, sums_stride(unit.kv.dim), unit.scale);
      }
    }
    finish(unit, out);
  }
};

// prefill_attention by a multiplier.
template <typename Multiplier, typename T = typename Multiplier::Number>
void attend_prompts(
    const Queries<T>& q, int64_t chunks, const Paged<T>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, T* out) {
  constexpr int64_t WORTH = 1 << 20;  // least products of a call with a second thread
  std::vector<Unit<T>> units;
  int64_t products = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const int64_t size = starts[chunk + 1] - starts[chunk], all = size * (q.heads / kv.kv_heads);
    const int32_t* pages = kv.table + rows[chunk] * kv.table_stride;
    products += size * kv_lens[chunk] * q.heads * kv.dim;
    // The last units have the most keys: they come first, so that threads end together.
    for (int64_t first = (all - 1) / MOST_ROWS * MOST_ROWS; first >= 0 && first < all; first -= MOST_ROWS)
      for (int64_t head = 0; head < kv.kv_heads; head++)
        units.push_back(
            {q, kv, pages, head, starts[chunk], kv_lens[chunk] - size, first, std::min(MOST_ROWS, all - first), scale});
  }
  share(int64_t(units.size()), products / WORTH, [&](int64_t i, bool) {
    static thread_local std::unique_ptr<Prompt<Multiplier>> kept = std::make_unique<Prompt<Multiplier>>();
    kept->attend(units[i], out);
  });
}

}  // namespace gapless
