// Decode rows, and prompts with their bits: the attention whose rows depend on nothing beside them.
#include "attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_block.h"
#include "parallel.h"

namespace gapless {
namespace {

// Keys of a decode row that are worked as one. Fixed, so that neither batch nor threads change a result.
constexpr int64_t SPLIT = 512;
// Queries of a chunk that share one fetch of a block of keys.
constexpr int64_t QUERY_TILE = 16;
// Least products of a call with a second thread.
constexpr int64_t WORTH = 1 << 19;

// Keys of one row, which are in one SPLIT, and the KV heads low..high with all their queries: the unit of a thread's
// work. Heads lie next to each other in memory, so a block of keys is read for one head after the other.
struct Part {
  int64_t row;
  Range keys;
  int64_t low, high;
};

// `next`: the part that this thread works on afterwards, if any.
template <typename T, typename S>
void attend_part(
    const Queries<T>& q, const Part& part, const Part* next, const Paged<S>& kv, const int64_t* rows,
    const Attend& attend, State* states) {
  auto pages = [&](const Part& of) { return kv.table + rows[of.row] * kv.table_stride; };
  int64_t grouped = q.heads / kv.kv_heads;
  const T* row = q.data + part.row * q.token_stride;
  // Prepared queries of each head of the part.
  const int64_t first = part.low * grouped, count = (part.high - part.low) * grouped;
  float* room = PAIRS<T> ? nullptr : scratch<QUERIES>(count * padded(kv.dim));
  std::vector<const Query<T>*> queries(count);
  for (int64_t i = 0; i < count; i++)
    queries[i] = prepared(row + (first + i) * kv.dim, kv.dim, room + i * padded(kv.dim));
  Block<S> after;
  if (next) find_block(kv, pages(*next), next->keys.low / BLOCK * BLOCK, next->keys, after);
  each_block(kv, pages(part), part.keys, next ? after.keys : nullptr, [&](const Block<S>& block, int64_t start) {
    Range limits[GROUP];
    std::fill_n(limits, GROUP, within(part.keys, start));
    auto attend_head = [&](const Block<T>& block, const HeadOf& at, int64_t head) {
      for (int64_t g = head * grouped; g < (head + 1) * grouped; g += GROUP) {
        int count = int(std::min<int64_t>(GROUP, (head + 1) * grouped - g));
        attend_some(count, block, at, &queries[g - first], limits, attend, states + g - first);
      }
    };
    for (int64_t head = part.low; head < part.high; head++)
      if constexpr (FEWER<S>) {
        Block<T> own;
        const HeadOf at = unpack_block(kv, block, limits[0], head, own);
        attend_head(own, at, head);
      } else {
        attend_head(block, head_of(kv, head), head);
      }
  });
}

// Calls body(keys) for the parts of a range, which is cut at fixed places.
template <typename Body>
void each_split(const Range& range, const Body& body) {
  for (int64_t start = range.low / SPLIT * SPLIT; start < range.high; start += SPLIT)
    body(Range{std::max(start, range.low), std::min(start + SPLIT, range.high)});
}

// Heads are shared out only when there are too few rows for the threads, which changes no result.
std::vector<Part> find_parts(const std::vector<Range>& ranges, int64_t heads, int64_t wanted) {
  int64_t cuts = 0;
  for (const Range& range : ranges) each_split(range, [&](const Range&) { cuts++; });
  int64_t groups = std::clamp<int64_t>((wanted + cuts - 1) / cuts, 1, heads);
  std::vector<Part> found;
  found.reserve(cuts * groups);
  for (size_t row = 0; row < ranges.size(); row++)
    for (int64_t group = 0; group < groups; group++)
      each_split(ranges[row], [&](const Range& keys) {
        found.push_back({int64_t(row), keys, heads * group / groups, heads * (group + 1) / groups});
      });
  return found;
}

// States with room for the values of each.
std::vector<State> states_of(int64_t count, int64_t dim) {
  std::vector<State> found(count);
  float* values = scratch<VALUES>(count * padded(dim));
  for (int64_t i = 0; i < count; i++) found[i].values = values + i * padded(dim);
  return found;
}

}  // namespace

template <typename T, typename S>
void decode_attention(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out) {
  if (!batch.count) return;
  int64_t grouped = q.heads / kv.kv_heads, dim = kv.dim, entries = 0;
  std::vector<Range> ranges(batch.count);
  for (int64_t row = 0; row < batch.count; row++) {
    ranges[row] = attend.readable(batch.kv_lens[row] - 1, batch.kv_lens[row]);
    entries += ranges[row].high - ranges[row].low;
  }
  const int64_t worth = entries * q.heads * dim / WORTH;
  const int threads = threads_for(worth);
  std::vector<Part> parts = find_parts(ranges, kv.kv_heads, threads > 1 ? 4 * threads : 1);
  std::vector<int64_t> first(parts.size() + 1, 0);  // of each part's queries
  for (size_t i = 0; i < parts.size(); i++) first[i + 1] = first[i] + (parts[i].high - parts[i].low) * grouped;
  std::vector<State> states = states_of(first.back(), dim);
  share(int64_t(parts.size()), worth, [&](int64_t i, bool last) {
    for (int64_t at = first[i]; at < first[i + 1]; at++) reset(states[at], dim);
    attend_part(q, parts[i], last ? nullptr : &parts[i + 1], kv, batch.rows, attend, &states[first[i]]);
  });
  for (size_t i = 0, next; i < parts.size(); i = next) {
    const Part& part = parts[i];
    for (next = i + 1; next < parts.size() && parts[next].row == part.row && parts[next].low == part.low;) next++;
    for (int64_t g = 0; g < first[i + 1] - first[i]; g++) {
      State& whole = states[first[i] + g];
      for (size_t other = i + 1; other < next; other++) merge(whole, states[first[other] + g], dim);
      const int64_t head = part.low * grouped + g;
      finish(whole, dim, attend, head, out + (part.row * q.heads + head) * dim);
    }
  }
}

namespace {

// Whether a value of this head, of some of the block's keys, is infinite or no number.
template <typename T>
bool any_wild(const Block<T>& block, const Range& keys, int64_t offset, int64_t dim) {
  f32x16 found{};  // zero times a number is zero
  for (int64_t i = keys.low; i < keys.high; i++)
    for (int64_t d = 0; d < dim; d += LANES) found += load_some(block.keys[i] + offset + d, int(dim - d)) * 0.0f;
  return any(~same(found, f32x16{}));
}

// Some queries of a chunk with all heads that share `head`: a block of keys is fetched once for them.
template <typename T, typename S>
class Tile {
 public:
  Tile(const Queries<T>& q, const Paged<S>& kv, const Chunk& chunk, int64_t head, const Attend& attend)
      : q(q), kv(kv), chunk(chunk), attend(attend), head(head), grouped(q.heads / kv.kv_heads),
        size(chunk.count * grouped), states(states_of(2 * size, kv.dim)), queries(size), ranges(size) {
    float* room = PAIRS<T> ? nullptr : scratch<QUERIES>(size * padded(kv.dim));
    some = each = chunk.readable(attend, 0);
    for (int64_t i = 0; i < size; i++) {
      const T* query = q.data + (chunk.token + i / grouped) * q.token_stride + (head * grouped + i % grouped) * kv.dim;
      queries[i] = prepared(query, kv.dim, room + i * padded(kv.dim));
      const Range range = ranges[i] = chunk.readable(attend, i / grouped);
      some = {std::min(some.low, range.low), std::max(some.high, range.high)};
      each = {std::max(each.low, range.low), std::min(each.high, range.high)};
    }
  }

  void run(T* out) {
    // Keys are cut as in a decode row: a query's result is the same in both.
    each_split(some, [&](const Range& keys) {
      for (int64_t i = 0; i < size; i++) reset(states[size + i], kv.dim);
      const Key<S>* none = nullptr;
      each_block(kv, chunk.pages, keys, none, [&](Block<S>& block, int64_t start) {
        if constexpr (FEWER<S>) {
          Block<T> own;
          const HeadOf at = unpack_block(kv, block, within(keys, start), head, own);
          add(own, at, start);
        } else {
          add(block, head_of(kv, head), start);
        }
      });
      for (int64_t i = 0; i < size; i++) {
        if (ranges[i].low >= keys.high || ranges[i].high <= keys.low) continue;
        if (ranges[i].low >= keys.low / SPLIT * SPLIT) std::swap(states[i], states[size + i]);  // the first part of it
        else merge(states[i], states[size + i], kv.dim);
      }
    });
    for (int64_t i = 0; i < size; i++) {
      const int64_t query_head = head * grouped + i % grouped;
      T* to = out + ((chunk.token + i / grouped) * q.heads + query_head) * kv.dim;
      finish(states[i], kv.dim, attend, query_head, to);
    }
  }

 private:
  void add(Block<T>& block, const HeadOf& at, int64_t start) {
    const int64_t all = block.count, offset = at.keys + at.values;
    // A value that is no number must not reach the queries that do not read it: their weight of zero would not hide it.
    const bool apart = any_wild(block, {0, std::clamp<int64_t>(each.low - start, 0, all)}, offset, kv.dim) ||
                       any_wild(block, {std::clamp<int64_t>(each.high - start, 0, all), all}, offset, kv.dim);
    const int64_t group = apart ? 1 : GROUP;
    for (int64_t i = (size - 1) / group * group; i >= 0; i -= group) {
      const int count = int(std::min(group, size - i));
      Range limits[GROUP];
      block.count = 0;
      for (int j = 0; j < count; j++) {
        limits[j] = within(ranges[i + j], start);
        if (limits[j].low < limits[j].high) block.count = std::max(block.count, int(limits[j].high));
      }
      if (!block.count) continue;
      Block<T> own;
      if (apart) own = block, own.close(limits[0]);
      attend_some(count, apart ? own : block, at, &queries[i], limits, attend, &states[size + i]);
      block.next = block.keys;
    }
  }

  const Queries<T>& q;
  const Paged<S>& kv;
  const Chunk chunk;
  const Attend& attend;
  const int64_t head, grouped, size;
  std::vector<State> states;  // of the parts so far, by query and head; then of the part at hand
  std::vector<const Query<T>*> queries;
  std::vector<Range> ranges;
  Range some, each;  // of the entries that some query reads, and each of them
};

}  // namespace

template <typename T, typename S>
void prefill_attention(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out) {
  std::vector<Chunk> tiles;
  int64_t products = 0;
  for (int64_t i = 0; i < batch.count; i++) {
    const Chunk chunk = chunk_of(batch, kv, i);
    products += chunk.count * attend.most(chunk.length) * q.heads * kv.dim;
    // The last tiles have the most keys: they come first, so that threads end together.
    for (int64_t end = chunk.count; end > 0; end = (end - 1) / QUERY_TILE * QUERY_TILE)
      tiles.push_back(chunk.part((end - 1) / QUERY_TILE * QUERY_TILE, (end - 1) % QUERY_TILE + 1));
  }
  share(int64_t(tiles.size()) * kv.kv_heads, products / WORTH, [&](int64_t i, bool) {
    Tile<T, S>(q, kv, tiles[i / kv.kv_heads], i % kv.kv_heads, attend).run(out);
  });
}

#define GAPLESS_ATTENTION(T, S)                                                                             \
  template void decode_attention(const Queries<T>&, const Batch&, const Paged<S>&, const Attend&, T*);      \
  template void prefill_attention(const Queries<T>&, const Batch&, const Paged<S>&, const Attend&, T*);
GAPLESS_EACH_KV(GAPLESS_ATTENTION)

}  // namespace gapless
