// Softmax goes along with the sums ("online softmax": Milakov, Gimelshein, arXiv 1805.02867; FlashAttention: Dao et al.,
// arXiv 2205.14135). Query heads that share a KV head are worked together, so a key is read once for all of them.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace gapless {
namespace {

constexpr int BLOCK = 64;  // keys at a time
constexpr int GROUP = 4;   // queries at a time
// Keys of a decode row that are worked as one. Fixed, so that neither batch nor threads change a result.
constexpr int64_t SPLIT = 512;
// Queries of a chunk for which a block of keys is fetched once.
constexpr int64_t QUERY_TILE = 16;
// Products of a call from which a second thread helps.
constexpr int64_t WORTH = 1 << 19;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Sums so far of one query: largest score, sum of weights by lane, weighted values [dim].
struct State {
  float top;
  f32x16 weight;
  float* values;
};

// Keys of all heads, and where the keys after them lie, to be asked for meanwhile.
template <typename T>
struct Block {
  const T* keys[BLOCK];
  const T* const* next;
  int count, next_count;
};

template <typename T>
void find_block(const Paged<T>& kv, const int32_t* pages, int64_t start, int64_t end, Block<T>& block) {
  block.count = int(std::clamp<int64_t>(end - start, 0, BLOCK));
  for (int i = 0; i < block.count;) {
    const T* key = kv.key(pages, start + i, 0);
    int run = int(std::min<int64_t>(block.count - i, kv.page_size - (start + i) % kv.page_size));
    for (int j = 0; j < run; j++, key += kv.kv_heads * kv.dim) block.keys[i + j] = key;
    i += run;
  }
}

// Calls body(block, start of its keys) for all blocks of start..end.
template <typename T, typename Body>
void each_block(const Paged<T>& kv, const int32_t* pages, int64_t start, int64_t end, const Body& body) {
  Block<T> blocks[2];
  find_block(kv, pages, start, end, blocks[0]);
  for (int turn = 0; start < end; start += BLOCK, turn ^= 1) {
    Block<T>&block = blocks[turn], &next = blocks[turn ^ 1];
    find_block(kv, pages, start + BLOCK, end, next);
    block.next = next.keys;
    block.next_count = next.count;
    body(block, start);
  }
}

template <typename T>
inline void ask(const T* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < int64_t(count * sizeof(T)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

template <typename T>
inline __attribute__((always_inline)) f32x16 wide_dot(const T* a, const T* b, int64_t dim) {
  f32x16 total{};
  for (int64_t d = 0; d < dim; d += LANES) total += load_some(a + d, int(dim - d)) * load_some(b + d, int(dim - d));
  return total;
}

inline __attribute__((always_inline)) f32x16 dot(const float* a, const float* b, int64_t dim) {
  return wide_dot(a, b, dim);
}

inline __attribute__((always_inline)) f32x16 dot(const bf16* a, const bf16* b, int64_t dim) {
#if GAPLESS_BF16_DOT
  __m512 total = _mm512_setzero_ps();
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + 32 <= dim; d += 32)
    total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(a + d), (__m512bh)_mm512_loadu_si512(b + d));
  f32x16 rest = d < dim ? wide_dot(a + d, b + d, dim - d) : f32x16{};
  return (f32x16)total + rest;
#else
  return wide_dot(a, b, dim);
#endif
}

// Lane i: the sum of x[i].
inline f32x16 sums(const f32x16* x) {
#ifdef __AVX512F__
  __m512 four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512 a = (__m512)x[4 * i], b = (__m512)x[4 * i + 1], c = (__m512)x[4 * i + 2], d = (__m512)x[4 * i + 3];
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    four[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  __m512 low = _mm512_add_ps(
      _mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xDD));
  __m512 high = _mm512_add_ps(
      _mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xDD));
  return (f32x16)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
#else
  f32x16 out;
  for (int i = 0; i < LANES; i++) out[i] = sum(x[i]);
  return out;
#endif
}

// Weighted values of dims d.. of VECTORS * 16: added to each query's. A single vector may have but `rest` of them.
template <typename T, int ROWS, int VECTORS>
void add_values(
    const Block<T>& block, int64_t offset, int64_t d, int rest, const float (*weights)[BLOCK], State* states) {
  f32x16 values[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) values[r][v] = load(states[r].values + d + v * LANES);
  for (int i = 0; i < block.count; i++) {
    const T* from = block.keys[i] + offset + d;
    if (i < block.next_count) ask(block.next[i] + offset + d, VECTORS * LANES);
    f32x16 value[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) value[v] = VECTORS == 1 ? load_some(from, rest) : load(from + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) values[r][v] += weights[r][i] * value[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(states[r].values + d + v * LANES, values[r][v]);
}

// ROWS queries over a block of keys; query r reads the first limits[r] of them, which is one or more for some r.
// DIM: the head's size where it is known beforehand, else 0.
template <typename T, int ROWS, int DIM>
void attend(
    const Block<T>& block, int64_t head_offset, int64_t value_offset, int64_t real_dim, const T* const* queries,
    const int* limits, float scale, State* states) {
  const int64_t dim = DIM ? DIM : real_dim;
  alignas(64) float weights[ROWS][BLOCK];
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 tops[ROWS];
  for (int r = 0; r < ROWS; r++) tops[r] = all(NONE);
  for (int low = 0; low < block.count; low += LANES) {
    f32x16 parts[ROWS][LANES];
    int count = std::min(LANES, block.count - low);
    for (int i = low; i < low + count; i++) {
      if (i < block.next_count) ask(block.next[i] + head_offset, dim);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) parts[r][i - low] = dot(block.keys[i] + head_offset, queries[r], dim);
    }
    for (int r = 0; r < ROWS; r++) std::fill_n(parts[r] + count, LANES - count, f32x16{});
    for (int r = 0; r < ROWS; r++) {
      f32x16 scores = sums(parts[r]) * scale;
      scores = lane + low < limits[r] ? scores : all(NONE);
      store(&weights[r][low], scores);
      // A score that is no number must reach the result: max drops it, so the sum of weights carries it there.
      tops[r] = max(scores, tops[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float top = std::max(states[r].top, largest(tops[r]));
    float shift = top == NONE ? 0.0f : top;
    if (top > states[r].top) {
      f32x16 factor = exp(all(states[r].top - shift));
      states[r].weight *= factor;
      for (int64_t d = 0; d < dim; d += LANES) store(states[r].values + d, load(states[r].values + d) * factor);
      states[r].top = top;
    }
    for (int low = 0; low < block.count; low += LANES) {
      f32x16 weight = exp(load(&weights[r][low]) - shift);
      store(&weights[r][low], weight);
      states[r].weight += weight;
    }
  }
  int64_t d = 0, offset = head_offset + value_offset;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<T, ROWS, 4>(block, offset, d, 4 * LANES, weights, states);
  for (; d < dim; d += LANES) add_values<T, ROWS, 1>(block, offset, d, int(dim - d), weights, states);
}

template <typename T, int DIM>
auto of_rows(int count) {
  if (count == 4) return attend<T, 4, DIM>;
  if (count == 3) return attend<T, 3, DIM>;
  return count == 2 ? attend<T, 2, DIM> : attend<T, 1, DIM>;
}

template <typename T>
void attend_some(
    int count, const Block<T>& block, int64_t head, const Paged<T>& kv, const T* const* queries, const int* limits,
    float scale, State* states) {
  auto* chosen = kv.dim == 128 ? of_rows<T, 128>(count) : kv.dim == 64 ? of_rows<T, 64>(count) : of_rows<T, 0>(count);
  chosen(block, head * kv.dim, kv.value_offset(), kv.dim, queries, limits, scale, states);
}

int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

void reset(State* states, int64_t count, float* values, int64_t dim) {
  std::fill_n(values, count * padded(dim), 0.0f);
  for (int64_t i = 0; i < count; i++) states[i] = {NONE, f32x16{}, values + i * padded(dim)};
}

template <typename T>
void finish(const State& state, int64_t dim, T* out) {
  float scale = 1.0f / sum(state.weight);
  for (int64_t d = 0; d < dim; d += LANES) store_some(out + d, load(state.values + d) * scale, int(dim - d));
}

// Scratch of a thread, kept from call to call.
float* scratch(size_t size) {
  static thread_local std::vector<float> kept;
  if (kept.size() < size) kept.resize(size);
  return kept.data();
}

// Keys start..end of one row, and the KV heads low..high with all their queries: the unit of a thread's work. Heads lie
// next to each other in memory, so a block of keys is read for one head after the other.
struct Span {
  int64_t row, start, end, low, high;
};

template <typename T>
void attend_span(
    const Queries<T>& q, const Span& span, const Paged<T>& kv, const int32_t* pages, float scale, State* states) {
  int64_t grouped = q.heads / kv.kv_heads;
  const T* row = q.data + span.row * q.token_stride;
  each_block(kv, pages, span.start, span.end, [&](const Block<T>& block, int64_t) {
    for (int64_t head = span.low; head < span.high; head++)
      for (int64_t g = head * grouped; g < (head + 1) * grouped; g += GROUP) {
        int count = int(std::min<int64_t>(GROUP, (head + 1) * grouped - g));
        const T* queries[GROUP];
        int limits[GROUP];
        for (int i = 0; i < count; i++) queries[i] = row + (g + i) * kv.dim, limits[i] = block.count;
        attend_some(count, block, head, kv, queries, limits, scale, states + g - span.low * grouped);
      }
  });
}

// Sums of several spans of keys become one, in the order of the spans.
void merge(State& into, const State& from, int64_t dim) {
  float top = std::max(into.top, from.top);
  float shift = top == NONE ? 0.0f : top;
  f32x16 a = exp(all(into.top - shift)), b = exp(all(from.top - shift));
  into.top = top;
  into.weight = into.weight * a + from.weight * b;
  for (int64_t d = 0; d < dim; d += LANES)
    store(into.values + d, load(into.values + d) * a + load(from.values + d) * b);
}

// Keys are cut at fixed places; heads are shared out only when there are too few rows for the threads, which changes
// no result.
std::vector<Span> find_spans(int64_t batch, int64_t heads, const int64_t* kv_lens, int64_t wanted) {
  int64_t cuts = 0;
  for (int64_t row = 0; row < batch; row++) cuts += (kv_lens[row] + SPLIT - 1) / SPLIT;
  int64_t parts = std::clamp<int64_t>((wanted + cuts - 1) / cuts, 1, heads);
  std::vector<Span> found;
  found.reserve(cuts * parts);
  for (int64_t row = 0; row < batch; row++)
    for (int64_t part = 0; part < parts; part++)
      for (int64_t start = 0; start < kv_lens[row]; start += SPLIT)
        found.push_back(
            {row, start, std::min(start + SPLIT, kv_lens[row]), heads * part / parts, heads * (part + 1) / parts});
  return found;
}

}  // namespace

template <typename T>
void decode_attention(
    const Queries<T>& q, int64_t batch, const Paged<T>& kv, const int64_t* rows, const int64_t* kv_lens, float scale,
    T* out) {
  int64_t grouped = q.heads / kv.kv_heads, dim = kv.dim;
  bool worth = std::accumulate(kv_lens, kv_lens + batch, int64_t(0)) * q.heads * dim > WORTH;
  std::vector<Span> spans = find_spans(batch, kv.kv_heads, kv_lens, worth ? 4 * omp_get_max_threads() : 1);
  std::vector<int64_t> first(spans.size() + 1, 0);  // of each span's queries
  for (size_t i = 0; i < spans.size(); i++) first[i + 1] = first[i] + (spans[i].high - spans[i].low) * grouped;
  std::vector<State> states(first.back());
  float* values = scratch(first.back() * padded(dim));
  share(int64_t(spans.size()), worth, [&](int64_t i, bool) {
    State* mine = &states[first[i]];
    reset(mine, first[i + 1] - first[i], values + first[i] * padded(dim), dim);
    attend_span(q, spans[i], kv, kv.table + rows[spans[i].row] * kv.table_width, scale, mine);
  });
  for (size_t i = 0, next; i < spans.size(); i = next) {
    const Span& span = spans[i];
    for (next = i + 1; next < spans.size() && spans[next].start > 0;) next++;
    for (int64_t g = 0; g < first[i + 1] - first[i]; g++) {
      State& whole = states[first[i] + g];
      for (size_t part = i + 1; part < next; part++) merge(whole, states[first[part] + g], dim);
      finish(whole, dim, out + (span.row * q.heads + span.low * grouped + g) * dim);
    }
  }
}

namespace {

struct Tile {
  int64_t chunk, first, count;  // queries first.. of the chunk
};

// Queries of a tile with all heads that share `head`: a block of keys is fetched once for them.
template <typename T>
void attend_tile(
    const Queries<T>& q, const Paged<T>& kv, const int32_t* pages, int64_t head, int64_t token, int64_t position,
    int64_t count, float scale, T* out) {
  int64_t grouped = q.heads / kv.kv_heads, dim = kv.dim, size = count * grouped;
  std::vector<State> states(size);
  reset(states.data(), size, scratch(size * padded(dim)), dim);
  // An inert row has one entry, whatever its chunk: each of its queries reads that.
  int64_t end = std::max<int64_t>(position + count, 1);
  each_block(kv, pages, 0, end, [&](Block<T>& block, int64_t low) {
    int all = block.count;
    for (int64_t i = 0; i < size; i += GROUP) {
      int some = int(std::min<int64_t>(GROUP, size - i)), most = 0;
      const T* queries[GROUP];
      int limits[GROUP];
      for (int j = 0; j < some; j++) {
        int64_t query = (i + j) / grouped, shared = (i + j) % grouped;
        queries[j] = q.data + (token + query) * q.token_stride + (head * grouped + shared) * dim;
        limits[j] = int(std::clamp<int64_t>(std::max<int64_t>(position + query + 1, 1) - low, 0, all));
        most = std::max(most, limits[j]);
      }
      block.count = most;
      if (most) attend_some(some, block, head, kv, queries, limits, scale, &states[i]);
      block.next_count = 0;
    }
  });
  for (int64_t i = 0; i < size; i++)
    finish(states[i], dim, out + ((token + i / grouped) * q.heads + head * grouped + i % grouped) * dim);
}

}  // namespace

template <typename T>
void prefill_attention(
    const Queries<T>& q, int64_t chunks, const Paged<T>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, T* out) {
  std::vector<Tile> tiles;
  int64_t products = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    int64_t size = starts[chunk + 1] - starts[chunk];
    products += size * kv_lens[chunk] * q.heads * kv.dim;
    // The last tiles have the most keys: they come first, so that threads end together.
    for (int64_t first = (size - 1) / QUERY_TILE * QUERY_TILE; first >= 0; first -= QUERY_TILE)
      tiles.push_back({chunk, first, std::min(QUERY_TILE, size - first)});
  }
  share(int64_t(tiles.size()) * kv.kv_heads, products > WORTH, [&](int64_t i, bool) {
    const Tile& tile = tiles[i / kv.kv_heads];
    int64_t size = starts[tile.chunk + 1] - starts[tile.chunk];
    const int32_t* pages = kv.table + rows[tile.chunk] * kv.table_width;
    int64_t position = kv_lens[tile.chunk] - size + tile.first;
    attend_tile(
        q, kv, pages, i % kv.kv_heads, starts[tile.chunk] + tile.first, position, tile.count, scale, out);
  });
}

template void decode_attention(
    const Queries<float>&, int64_t, const Paged<float>&, const int64_t*, const int64_t*, float, float*);
template void decode_attention(
    const Queries<bf16>&, int64_t, const Paged<bf16>&, const int64_t*, const int64_t*, float, bf16*);
template void prefill_attention(
    const Queries<float>&, int64_t, const Paged<float>&, const int64_t*, const int64_t*, const int64_t*, float, float*);
template void prefill_attention(
    const Queries<bf16>&, int64_t, const Paged<bf16>&, const int64_t*, const int64_t*, const int64_t*, float, bf16*);

}  // namespace gapless
