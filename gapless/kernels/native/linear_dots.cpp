// The product of linear.h by the dot product of bfloat16: vdpbf16ps of AVX-512, bfdot of ARM.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace gapless {

#if GAPLESS_BF16_DOT

namespace {

constexpr int MOST_ROWS = 6;
// Inputs of a tile that are multiplied with all rows before the next ones. Few rows wait for memory: short blocks
// spread the asking for the next one evenly. Many rows wait for the arithmetic: long ones seldom store
// their unfinished sums.
constexpr int64_t SHALLOW = 128, DEEP = 1024, MANY_ROWS = 24;
// Rows whose unfinished sums are kept between two such blocks.
constexpr int64_t BLOCK_ROWS = 96;
// Prefetch distance of weights for few rows, and the least size that it pays for: smaller matrices are in a cache. One
// row alone prefetches on Intel only: 12 to 16 % less on a Xeon, more on AMD (docs/concepts/kernels.md).
constexpr int64_t AHEAD = 4096, AHEAD_OF_ONE = 16384, IN_MEMORY = 1 << 20;
const bool ONE_TOO = __builtin_cpu_is("intel");

// Tiles that one row takes together: a sum continues only 12 cycles after its last product (6 on AMD).
constexpr int64_t ABREAST = 3;

// Least weights, times rows / 8, with a second thread.
constexpr int64_t WORTH = 1 << 18;

struct Part {
  const bf16* x;
  int64_t x_stride;
  const bf16* weight;
  int64_t pairs;
  float* sums;  // [rows, TILE]: of the inputs before, and for the later ones
  bool first, last;
  const char* next;  // what to ask memory for meanwhile; null for nothing
  const bf16* bias;
  bf16* out;
  int64_t out_stride;
  int64_t columns;
};

// ROWS x (VECTORS * 16) outputs. NEXT: lines asked for per pair of inputs.
template <int ROWS, int VECTORS, int NEXT>
void multiply(const Part& part) {
  __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      sums[r][v] = part.first ? _mm512_setzero_ps() : _mm512_loadu_ps(part.sums + r * TILE + v * LANES);
  const bf16* x = part.x;
  const char* weight = reinterpret_cast<const char*>(part.weight);
  const char* next = part.next;
  const int64_t stride = part.x_stride;
  for (int64_t i = 0; i < part.pairs; i++) {
    __m512i w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = _mm512_loadu_si512(weight + 64 * v);
#pragma GCC unroll 8
    for (int line = 0; line < NEXT; line++) _mm_prefetch(next + 64 * line, ROWS == 1 ? _MM_HINT_T0 : _MM_HINT_T1);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride, sizeof(pair));
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, (__m512bh)w[v]);
    }
    x += 2;
    weight += 64 * VECTORS;
    next += 64 * NEXT;
  }
  if (!part.last) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(part.sums + r * TILE + v * LANES, sums[r][v]);
    return;
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    int count = std::clamp<int64_t>(part.columns - v * LANES, 0, LANES);
    f32x16 bias = part.bias && count ? load_some(part.bias + v * LANES, count) : f32x16{};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      store_some(part.out + r * part.out_stride + v * LANES, (f32x16)sums[r][v] + bias, count);
  }
}

// One row by ABREAST whole tiles.
void multiply_row(const Part& part) {
  constexpr int VECTORS = TILE / LANES;
  __m512 sums[ABREAST * VECTORS];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const char* weight = reinterpret_cast<const char*>(part.weight);
  const int64_t tile = part.pairs * 2 * TILE * sizeof(bf16);
  for (int64_t i = 0; i < part.pairs; i++, weight += 64 * VECTORS) {
    int32_t pair;
    std::memcpy(&pair, part.x + 2 * i, sizeof(pair));
    __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
    for (int v = 0; v < ABREAST * VECTORS; v++) {
      __m512i w = _mm512_loadu_si512(weight + v / VECTORS * tile + 64 * (v % VECTORS));
      sums[v] = _mm512_dpbf16_ps(sums[v], both, (__m512bh)w);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < ABREAST * VECTORS; v++) {
    f32x16 bias = part.bias ? load(part.bias + v * LANES) : f32x16{};
    store(part.out + v * LANES, (f32x16)sums[v] + bias);
  }
}

using Multiply = void (*)(const Part&);

template <int VECTORS, int NEXT>
Multiply of_rows(int rows) {
  static constexpr Multiply all[MOST_ROWS] = {
      multiply<1, VECTORS, NEXT>, multiply<2, VECTORS, NEXT>, multiply<3, VECTORS, NEXT>,
      multiply<4, VECTORS, NEXT>, multiply<5, VECTORS, NEXT>, multiply<6, VECTORS, NEXT>};
  return all[rows - 1];
}

Multiply find(int rows, int64_t vectors, int next) {
  if (vectors == 4) {
    if (next == 4) return of_rows<4, 4>(rows);
    if (next == 2) return of_rows<4, 2>(rows);
    return next == 1 ? of_rows<4, 1>(rows) : of_rows<4, 0>(rows);
  }
  return vectors == 3 ? of_rows<3, 0>(rows) : vectors == 2 ? of_rows<2, 0>(rows) : of_rows<1, 0>(rows);
}

// One tile of columns for up to BLOCK_ROWS rows: the rows go in passes of up to six over each block of inputs.
// While that is computed, a share in each pass, the next block of weights comes from memory.
void tile_rows(const Part& whole, int64_t rows, int64_t width, int64_t k, bool more, bool in_memory, float* sums) {
  int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS, vectors = width / LANES;
  int64_t block = passes == 1 ? k : rows < MANY_ROWS ? SHALLOW : DEEP;
  int64_t ahead = rows == 1 ? AHEAD_OF_ONE : AHEAD;
  for (int64_t done = 0; done < k; done += block) {
    Part part = whole;
    int64_t deep = std::min(block, k - done);
    part.weight += done * width;
    part.pairs = deep / 2;
    part.first = done == 0;
    part.last = done + deep == k;
    const char* next = reinterpret_cast<const char*>(part.weight) + (passes == 1 ? ahead : deep * width * 2);
    int few = in_memory && (rows > 1 || ONE_TOO) ? 4 : 0;
    int lines = passes == 1 ? few : part.last && !more ? 0 : passes <= 3 ? 2 : 1;
    for (int64_t pass = 0, start = 0; pass < passes; pass++) {
      int64_t end = rows * (pass + 1) / passes;
      part.next = next + pass * part.pairs * 64 * lines;
      part.x = whole.x + start * whole.x_stride + done;
      part.sums = sums + start * TILE;
      part.out = whole.out + start * whole.out_stride;
      find(end - start, vectors, pass * lines < 4 ? lines : 0)(part);
      start = end;
    }
  }
}

}  // namespace

void linear_dots(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out) {
  PackedPlace<bf16> place{n, k};
  int64_t tiles = (n + TILE - 1) / TILE;
  const int64_t worth = n * k * (m + 7) / 8 / WORTH;
  bool alone = threads_for(worth) == 1, in_memory = n * k > IN_MEMORY;
  int64_t together = m == 1 && alone && !in_memory ? n / TILE / ABREAST : 0, others = tiles - together * ABREAST;
  share(together + others, worth, [&](int64_t index, bool last) {
    int64_t first = (index < together ? index * ABREAST : index + together * (ABREAST - 1)) * TILE;
    if (index < together) {
      Part part{};
      part.x = x;
      part.weight = packed + place.tile(first);
      part.pairs = k / 2;
      part.bias = bias ? bias + first : nullptr;
      part.out = out + first;
      return multiply_row(part);
    }
    alignas(64) float sums[BLOCK_ROWS * TILE];
    for (int64_t low = 0; low < m; low += BLOCK_ROWS) {
      int64_t rows = std::min(BLOCK_ROWS, m - low);
      Part part{};
      part.x = x + low * x_stride;
      part.x_stride = x_stride;
      part.weight = packed + place.tile(first);
      part.bias = bias ? bias + first : nullptr;
      part.out = out + low * n + first;
      part.out_stride = n;
      part.columns = n - first;
      tile_rows(part, rows, place.width(first), k, !last && low + rows == m, in_memory, sums);
    }
  });
}

#elif GAPLESS_NEON_BF16

namespace {

// With 16 columns, 24 sums of 32 registers.
constexpr int MOST_ROWS = 6;
// Least weights, times rows / 8, with a second thread.
constexpr int64_t WORTH = 1 << 18;

struct Part {
  const bf16* x;
  int64_t x_stride;
  const bf16* weight;  // of a tile
  int64_t pairs, width;
  const bf16* bias;
  bf16* out;
  int64_t out_stride;
  int64_t columns;
};

// ROWS x (VECTORS * 16) outputs, from this column of the tile on. bfdot sums the two products of a pair before it adds
// them, and rounds to odd between (Arm ARM, BFDotAdd).
template <int ROWS, int VECTORS>
void multiply(const Part& part, int64_t column) {
  f32x16 sums[ROWS][VECTORS] = {};
  const bf16* weight = part.weight + 2 * column;
  for (int64_t i = 0; i < part.pairs; i++, weight += 2 * part.width) {
    bfloat16x8_t w[VECTORS * PARTS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS * PARTS; v++)
      w[v] = vld1q_bf16(reinterpret_cast<const bfloat16_t*>(weight + 2 * v * WIDTH));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      uint32_t pair;
      std::memcpy(&pair, part.x + r * part.x_stride + 2 * i, sizeof(pair));
      const bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS * PARTS; v++) {
        Floats& sum = sums[r][v / PARTS].parts[v % PARTS];
        sum = vbfdotq_f32(sum, w[v], both);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const int64_t place = column + v * LANES;
    const int count = std::clamp<int64_t>(part.columns - place, 0, LANES);
    const f32x16 bias = part.bias && count ? load_some(part.bias + place, count) : f32x16{};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
      store_some(part.out + r * part.out_stride + place, sums[r][v] + bias, count);
  }
}

using Multiply = void (*)(const Part&, int64_t);
constexpr Multiply OF_ROWS[MOST_ROWS] = {multiply<1, 1>, multiply<2, 1>, multiply<3, 1>,
                                         multiply<4, 1>, multiply<5, 1>, multiply<6, 1>};

}  // namespace

void linear_dots(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out) {
  const PackedPlace<bf16> place{n, k};
  share((n + TILE - 1) / TILE, n * k * (m + 7) / 8 / WORTH, [&](int64_t tile, bool) {
    const int64_t first = tile * TILE, width = place.width(first), passes = (m + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t start = m * pass / passes, rows = m * (pass + 1) / passes - start;
      const Part part{x + start * x_stride, x_stride, packed + place.tile(first), k / 2, width,
                      bias ? bias + first : nullptr, out + start * n + first, n, n - first};
      if (rows == 1 && width == TILE) {  // one row: fewer sums than 16 registers would wait for each other
        multiply<1, TILE / LANES>(part, 0);
        continue;
      }
      for (int64_t column = 0; column < width; column += LANES) OF_ROWS[rows - 1](part, column);
    }
  });
}

#else

void linear_dots(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const bf16*, bf16*) {
  __builtin_unreachable();
}

#endif

}  // namespace gapless
