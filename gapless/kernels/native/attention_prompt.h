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
//   fetch_values(values, count)   its values alone
//   any_wild(first, last)         whether a value of these keys is infinite or no number
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

// Rows first.. of a chunk, each a query with one of the heads that share `head`.
template <typename T, typename S>
struct Unit {
  const Queries<T>& q;
  const Paged<S>& kv;
  const Attend& attend;
  Chunk chunk;
  int64_t head, first, count;

  int64_t grouped() const { return q.heads / kv.kv_heads; }
  int64_t query(int64_t row) const { return (first + row) / grouped(); }
  int64_t query_head(int64_t row) const { return head * grouped() + (first + row) % grouped(); }
  Range readable(int64_t row) const { return chunk.readable(attend, query(row)); }
};

constexpr float NONE = -std::numeric_limits<float>::infinity();

// The largest score so far of a row, and the sum of its weights by lane.
struct Sofar {
  float top;
  f32x16 weight;
};

// A row's weights of `count` keys, the first `limit` of them read. Returns the factor of its sums so far.
template <typename Weight>
float weigh(const float* scores, int64_t count, int64_t limit, float scale, Sofar& sofar, Weight* weights) {
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

// A thread's buffers, kept from call to call. Of fewer bits, `unpacked` has a block's keys and values as numbers.
template <typename Multiplier, typename S>
struct alignas(64) Prompt {
  using T = typename Multiplier::Number;
  using One = Unit<T, S>;
  static constexpr int64_t GROUP = Multiplier::GROUP, STEP = Multiplier::STEP;

  float sums[MOST_ROWS * MOST_DIM];  // weighted values so far, [rows, sums_stride]
  float scores[GROUP * KEYS];
  typename Multiplier::Weight weights[GROUP * KEYS];
  float factors[GROUP];
  Sofar sofar[MOST_ROWS];
  Range ranges[MOST_ROWS];            // of the entries that each row reads
  Range groups[MOST_ROWS / GROUP + 1];  // and some row of a group
  Range some, each;                   // some row of the unit, and each of them
  const T* values[KEYS];
  bool apart;  // the rows of this block must be worked one by one: see `fetch`
  Multiplier multiplier;
  T unpacked[FEWER<S> ? 2 * KEYS : 1][FEWER<S> ? MOST_DIM : 1];

  // Keys and values of a block, with zeros for what no row of the unit reads: memory there may hold no number. So may a
  // value that some rows read and others do not, and their weight of zero would not hide it.
  void fetch(const One& unit, int64_t start) {
    static constexpr T zeros[MOST_DIM] = {};
    const Paged<S>& kv = unit.kv;
    const int64_t count = std::min(some.high - start, KEYS), skip = std::max<int64_t>(some.low - start, 0);
    const T* keys[KEYS];
    for (int64_t i = 0; i < skip; i++) keys[i] = values[i] = zeros;
    for (int64_t i = skip; i < count;) {
      Key<S> key = kv.key(unit.chunk.pages, start + i, unit.head);
      const int64_t end = std::min(count, i + kv.page_size - (start + i) % kv.page_size);
      for (; i < end; i++, key = kv.after(key, kv.kv_heads))
        if constexpr (FEWER<S>) {
          unpack(key, kv.dim, unpacked[i], unpacked[KEYS + i]);
          keys[i] = unpacked[i], values[i] = unpacked[KEYS + i];
        } else {
          keys[i] = key, values[i] = key + kv.value_offset();
        }
    }
    for (int64_t i = count; i < KEYS; i++) keys[i] = values[i] = zeros;
    multiplier.fetch(keys, values, whole_steps(count, STEP));
    apart = multiplier.any_wild(std::max<int64_t>(each.high - start, 0), count) ||
            (each.low > start && multiplier.any_wild(0, std::min(each.low - start, count)));
  }

  // A block's values for one row: zeros for those that it does not read.
  void fetch_values(const Range& limits, int64_t count) {
    static constexpr T zeros[MOST_DIM] = {};
    const T* own[KEYS];
    for (int64_t i = 0; i < KEYS; i++) own[i] = i >= limits.low && i < limits.high ? values[i] : zeros;
    multiplier.fetch_values(own, count);
  }

  bool reads(const Range& range, int64_t start) const { return range.high > start && range.low < start + KEYS; }

  // Rows low..high, some of which read keys of the block.
  void attend(int64_t low, int64_t high, int64_t start, int64_t stride, const Attend& attend) {
    const int64_t count = whole_steps(std::min(groups[low / GROUP].high - start, KEYS), STEP);
    int64_t first = low;  // that reads some of them; earlier rows stay unchanged
    while (first < high && !reads(ranges[first], start)) first++;
    while (high > first && !reads(ranges[high - 1], start)) high--;
    multiplier.score(first, high, count, scores);
    float scale = attend.scale;
    if (attend.softcap != 0) {
      for (int64_t row = 0; row < high - first; row++)
        for (float* score = scores + row * KEYS; score < scores + row * KEYS + count; score += LANES)
          store(score, capped(load(score) * scale, attend.softcap));
      scale = 1;
    }
    for (int64_t row = first; row < high; row++) {
      const int64_t at = (row - first) * KEYS, skip = ranges[row].low - start;
      if (skip > 0) std::fill_n(scores + at, std::min(skip, count), NONE);  // times the scale, which is above 0
      factors[row - first] = weigh(scores + at, count, ranges[row].high - start, scale, sofar[row], weights + at);
    }
    if (!apart) return multiplier.add(weights, factors, 0, high - first, count, sums + first * stride);
    for (int64_t row = first; row < high; row++) {
      fetch_values({ranges[row].low - start, ranges[row].high - start}, count);
      multiplier.add(weights, factors, row - first, row - first + 1, count, sums + first * stride);
    }
  }

  void begin(const One& unit) {
    const int64_t dim = unit.kv.dim;
    std::fill_n(sums, unit.count * sums_stride(dim), 0.0f);
    multiplier.begin(dim);
    some = each = unit.readable(0);
    for (int64_t row = 0; row < unit.count; row++) {
      const T* from = unit.q.data + (unit.chunk.token + unit.query(row)) * unit.q.token_stride;
      multiplier.keep(row, from + unit.query_head(row) * dim);
      sofar[row] = {NONE, f32x16{}};
      const Range range = ranges[row] = unit.readable(row);
      Range& group = groups[row / GROUP];
      if (row % GROUP == 0) group = range;
      group = {std::min(group.low, range.low), std::max(group.high, range.high)};
      some = {std::min(some.low, range.low), std::max(some.high, range.high)};
      each = {std::max(each.low, range.low), std::min(each.high, range.high)};
    }
  }

  void finish(const One& unit, T* out) {
    const int64_t dim = unit.kv.dim;
    const float* sinks = unit.attend.sinks;
    multiplier.end();
    for (int64_t row = 0; row < unit.count; row++) {
      const int64_t head = unit.query_head(row);
      T* to = out + ((unit.chunk.token + unit.query(row)) * unit.q.heads + head) * dim;
      const float* from = sums + row * sums_stride(dim);
      const float weight = normalizer(sofar[row].top, sum(sofar[row].weight), sinks ? sinks + head : nullptr);
      const float scale = weight * unit.attend.values;
      for (int64_t d = 0; d < dim; d += LANES) store_some(to + d, load(from + d) * scale, int(dim - d));
    }
  }

  void attend(const One& unit, T* out) {
    begin(unit);
    for (int64_t start = some.low / KEYS * KEYS; start < some.high; start += KEYS) {
      fetch(unit, start);
      for (int64_t low = (unit.count - 1) / GROUP * GROUP; low >= 0; low -= GROUP)
        if (reads(groups[low / GROUP], start))
          attend(low, std::min(low + GROUP, unit.count), start, sums_stride(unit.kv.dim), unit.attend);
    }
    finish(unit, out);
  }
};

// prefill_attention by a multiplier.
template <typename Multiplier, typename S, typename T = typename Multiplier::Number>
void attend_prompts(const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out) {
  constexpr int64_t WORTH = 1 << 20;  // least products of a call with a second thread
  std::vector<Unit<T, S>> units;
  int64_t products = 0;
  for (int64_t i = 0; i < batch.count; i++) {
    const Chunk chunk = chunk_of(batch, kv, i);
    const int64_t all = chunk.count * (q.heads / kv.kv_heads);
    products += chunk.count * attend.most(chunk.length) * q.heads * kv.dim;
    // The last units have the most keys: they come first, so that threads end together.
    for (int64_t first = (all - 1) / MOST_ROWS * MOST_ROWS; first >= 0 && first < all; first -= MOST_ROWS)
      for (int64_t head = 0; head < kv.kv_heads; head++)
        units.push_back({q, kv, attend, chunk, head, first, std::min(MOST_ROWS, all - first)});
  }
  share(int64_t(units.size()), products / WORTH, [&](int64_t i, bool) {
    using Own = Prompt<Multiplier, S>;
    static thread_local std::unique_ptr<Own> kept = std::make_unique<Own>();
    kept->attend(units[i], out);
  });
}

}  // namespace gapless
