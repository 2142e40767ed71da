// The attention of prompts on AMX. A row is one query with one of its heads; rows that share a KV head are worked
// together, and a block of keys is fetched once for many of them. Blocks lie at fixed positions and no row of a tile
// touches another, so a query's result depends neither on its chunk nor on its neighbours.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "amx.h"
#include "linear.h"
#include "parallel.h"
#include "tiles.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

constexpr int64_t KEYS = 64, GROUP = 32;  // keys and rows at a time
constexpr int64_t STEP = 32;              // what a multiplication of tiles sums over: dims or keys
constexpr int64_t MOST_ROWS = 128;        // for which a block of keys is fetched once
constexpr int64_t MOST_DIM = 256;
// Products of a call from which a second thread helps.
constexpr int64_t WORTH = 1 << 20;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// What a thread needs, kept from call to call.
struct alignas(64) Memory {
  int64_t limits[MOST_ROWS];           // how many keys each row reads, never less than the row before
  bf16 queries[MOST_ROWS * MOST_DIM];  // [rows, dim]
  bf16 keys[KEYS * MOST_DIM];          // [dim / 2, KEYS] pairs of dims
  bf16 values[KEYS * MOST_DIM];        // [KEYS / 2, dim] pairs of keys
  float scores[GROUP * KEYS];
  bf16 weights[GROUP * KEYS];
  float products[GROUP * STEP];  // weights by values of some dims
  float factors[GROUP];
  // So far, of each row: largest score, sum of weights by lane, weighted values [dim].
  float tops[MOST_ROWS];
  f32x16 totals[MOST_ROWS];
  float sums[MOST_ROWS * MOST_DIM];
  bool apart;  // the rows of this block must be worked one by one: see `fetch`
};

// Rows first.. of a chunk, whose queries begin at `token` of q and at `position` of the row's keys.
struct Unit {
  const Queries<bf16>& q;
  const Paged<bf16>& kv;
  const int32_t* pages;
  int64_t head, token, position, first, count;
  float scale;

  int64_t grouped() const { return q.heads / kv.kv_heads; }
  int64_t query(int64_t row) const { return (first + row) / grouped(); }
  int64_t query_head(int64_t row) const { return head * grouped() + (first + row) % grouped(); }
};

void configure() {
  alignas(64) uint8_t shapes[64] = {1};
  for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
  tile_configure(shapes);
}

// to [32, 32] = x [32, 32 * steps] @ the 32 columns from `pairs` on. Strides count elements; a pair is two.
void multiply(
    const bf16* x, int64_t x_stride, const bf16* pairs, int64_t pairs_stride, int64_t steps, float* to,
    int64_t to_stride) {
  const int64_t wide = x_stride * sizeof(bf16), paired = pairs_stride * sizeof(bf16), out = to_stride * sizeof(float);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (; steps; steps--, x += STEP, pairs += STEP / 2 * pairs_stride) {
    tile_load<4>(x, wide), tile_load<5>(x + 16 * x_stride, wide);
    tile_load<6>(pairs, paired), tile_load<7>(pairs + 2 * LANES, paired);
    tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
  }
  tile_store<0>(to, out), tile_store<1>(to + LANES, out);
  tile_store<2>(to + 16 * to_stride, out), tile_store<3>(to + 16 * to_stride + LANES, out);
}

// Sixteen keys' dims 0..32 in pairs: those of a pair next to each other for all keys.
void pair_dims(const bf16* const* keys, int64_t dim, bf16* pairs) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr uint16_t UPPER[] = {0xAAAA, 0xCCCC, 0xF0F0, 0xFF00};
  __m512i rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(keys[i] + dim);
  // Bit by bit, the number of the row and that of the lane change places.
#pragma GCC unroll 4
  for (int bit = 0; bit < 4; bit++) {
    const __m512i other = _mm512_xor_si512(lanes, _mm512_set1_epi32(1 << bit));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i >> bit & 1) continue;
      __m512i a = rows[i], b = rows[i + (1 << bit)];
      rows[i] = _mm512_mask_permutexvar_epi32(a, UPPER[bit], other, b);
      rows[i + (1 << bit)] = _mm512_mask_permutexvar_epi32(b, uint16_t(~UPPER[bit]), other, a);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_si512(pairs + i * 2 * KEYS, rows[i]);
}

void pair_keys(const bf16* one, const bf16* two, int64_t dim, bf16* pairs) {
  auto wide = [](const bf16* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  for (int64_t d = 0; d < dim; d += LANES)
    _mm512_store_si512(pairs + 2 * d, _mm512_or_si512(wide(one + d), _mm512_slli_epi32(wide(two + d), 16)));
}

// Whether one of them, a multiple of 32 if any, is infinite or no number.
bool any_wild(const bf16* values, int64_t count) {
  const __m512i least = _mm512_set1_epi16(int16_t(0xFF00));  // all ones in the exponent, without the sign
  __mmask32 found = 0;
  for (int64_t i = 0; i < count; i += 2 * LANES)
    found |= _mm512_cmpge_epu16_mask(_mm512_slli_epi16(_mm512_load_si512(values + i), 1), least);
  return found;
}

// Keys and values of a block, with zeros after the last that the unit reads: what is there may be no number. So may
// a value that some rows read and rows before them do not, whose weight of zero would not hide it.
void fetch(const Unit& unit, int64_t start, Memory& memory) {
  static constexpr bf16 zeros[MOST_DIM] = {};
  const int64_t dim = unit.kv.dim, count = std::min(memory.limits[unit.count - 1] - start, KEYS);
  const bf16 *keys[KEYS], *values[KEYS];
  for (int64_t i = 0; i < KEYS; i++) {
    keys[i] = i < count ? unit.kv.key(unit.pages, start + i, unit.head) : zeros;
    values[i] = i < count ? keys[i] + unit.kv.value_offset() : zeros;
  }
  for (int64_t i = 0; i < round_up(count, STEP); i += 16) {
    for (int64_t d = 0; d < dim; d += STEP) pair_dims(keys + i, d, memory.keys + d * KEYS + 2 * i);
    for (int64_t j = i; j < i + 16; j += 2) pair_keys(values[j], values[j + 1], dim, memory.values + j * dim);
  }
  const int64_t unread = std::max<int64_t>(memory.limits[0] - start, 0) / 2 * 2;  // by some, from here on
  memory.apart = any_wild(memory.values + unread * dim, (round_up(count, 2) - unread) * dim);
}

// Zeros in place of the block's values from `count` on.
void forget(bf16* values, int64_t count, int64_t dim) {
  for (int64_t key = count; key < KEYS; key++)
    for (int64_t d = 0; d < dim; d++) values[(key / 2 * dim + d) * 2 + key % 2] = {};
}

// A row's weights of `count` keys, of which it reads the first `limit`. Returns the factor of its sums so far.
float weigh(const float* scores, int64_t count, int64_t limit, float scale, float& top, f32x16& total, bf16* weights) {
  f32x16 found[KEYS / LANES], most = all(NONE);
  for (int64_t i = 0; i < count; i += LANES) {
    f32x16& score = found[i / LANES] = pick(upto(limit - 1, i), load(scores + i) * scale, all(NONE));
    // A score that is no number must reach the result: max drops it, so the sum of weights carries it there.
    most = max(score, most);
  }
  float before = top, shift = 0;
  top = std::max(before, largest(most));
  if (top != NONE) shift = top;
  float factor = top > before ? exp(all(before - shift))[0] : 1.0f;
  total *= factor;
  for (int64_t i = 0; i < count; i += LANES) {
    store(weights + i, exp(found[i / LANES] - shift));
    total += load(weights + i);
  }
  return factor;
}

// Brings the sums of rows first..last, of the 32 from `low` on, up to this block.
void add_values(int64_t low, int64_t first, int64_t last, int64_t dim, int64_t steps, Memory& memory) {
  for (int64_t d = 0; d < dim; d += STEP) {
    multiply(memory.weights, KEYS, memory.values + 2 * d, 2 * dim, steps, memory.products, STEP);
    for (int64_t row = first; row <= last; row++)
      for (int64_t v = 0; v < STEP; v += LANES) {
        float* sum = memory.sums + row * dim + d + v;
        store(sum, load(sum) * memory.factors[row - low] + load(memory.products + (row - low) * STEP + v));
      }
  }
}

// Up to 32 rows, of which the last reads some of the block's keys.
void attend(const Unit& unit, int64_t low, int64_t high, int64_t start, Memory& memory) {
  const int64_t dim = unit.kv.dim, steps = (std::min(memory.limits[high - 1] - start, KEYS) + STEP - 1) / STEP;
  for (int64_t i = 0; i < steps; i++)
    multiply(
        memory.queries + low * dim, dim, memory.keys + i * 2 * STEP, 2 * KEYS, dim / STEP, memory.scores + i * STEP,
        KEYS);
  int64_t first = low;  // that reads some of them; those before it stay as they are
  while (memory.limits[first] <= start) first++;
  for (int64_t row = first, at = first - low; row < high; row++, at++)
    memory.factors[at] = weigh(
        memory.scores + at * KEYS, steps * STEP, memory.limits[row] - start, unit.scale, memory.tops[row],
        memory.totals[row], memory.weights + at * KEYS);
  if (!memory.apart) return add_values(low, first, high - 1, dim, steps, memory);
  for (int64_t row = high - 1; row >= first; row--) {  // the last first: it reads most
    forget(memory.values, memory.limits[row] - start, dim);
    add_values(low, row, row, dim, steps, memory);
  }
}

void begin(const Unit& unit, Memory& memory) {
  const int64_t dim = unit.kv.dim;
  std::fill_n(memory.tops, unit.count, NONE);
  std::fill_n(memory.totals, unit.count, f32x16{});
  std::fill_n(memory.sums, unit.count * dim, 0.0f);
  for (int64_t row = 0; row < unit.count; row++) {
    const bf16* from = unit.q.data + (unit.token + unit.query(row)) * unit.q.token_stride;
    std::copy_n(from + unit.query_head(row) * dim, dim, memory.queries + row * dim);
    // An inert row has one entry, whatever its chunk: each of its queries reads that.
    memory.limits[row] = std::max<int64_t>(unit.position + unit.query(row) + 1, 1);
  }
}

void finish(const Unit& unit, const Memory& memory, bf16* out) {
  const int64_t dim = unit.kv.dim;
  for (int64_t row = 0; row < unit.count; row++) {
    bf16* to = out + ((unit.token + unit.query(row)) * unit.q.heads + unit.query_head(row)) * dim;
    float scale = 1.0f / sum(memory.totals[row]);
    for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(memory.sums + row * dim + d) * scale);
  }
}

void attend_unit(const Unit& unit, bf16* out) {
  static thread_local std::unique_ptr<Memory> kept = std::make_unique<Memory>();
  Memory& memory = *kept;
  begin(unit, memory);
  configure();
  for (int64_t start = 0; start < memory.limits[unit.count - 1]; start += KEYS) {
    fetch(unit, start, memory);
    for (int64_t low = (unit.count - 1) / GROUP * GROUP; low >= 0; low -= GROUP) {
      const int64_t high = std::min(low + GROUP, unit.count);
      if (memory.limits[high - 1] > start) attend(unit, low, high, start, memory);
    }
  }
  tile_release();
  finish(unit, memory, out);
}

}  // namespace

bool amx_attends(int64_t dim) { return dim % STEP == 0 && dim <= MOST_DIM && amx_missing().empty(); }

void prefill_attention_amx(
    const Queries<bf16>& q, int64_t chunks, const Paged<bf16>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, bf16* out) {
  std::vector<Unit> units;
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
  share(int64_t(units.size()), products > WORTH, [&](int64_t i, bool) { attend_unit(units[i], out); });
}

#else

bool amx_attends(int64_t) { return false; }

void prefill_attention_amx(
    const Queries<bf16>&, int64_t, const Paged<bf16>&, const int64_t*, const int64_t*, const int64_t*, float, bf16*) {
  __builtin_unreachable();
}

#endif

}  // namespace gapless
