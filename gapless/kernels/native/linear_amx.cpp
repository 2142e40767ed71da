// The product of linear.h on AMX. A tile of x is 16 rows of 32 inputs, one of the weight 32 inputs of 16 columns, which
// lie in the packed weight as the unit wants them. Every 32 inputs an output's sum gets the even products' sum plus the
// odd ones', for any number of rows.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "tiled_rows.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

constexpr int64_t INPUTS = 32, MOST_ROWS = MOST_TILED;
// Prefetch distance of weights for up to 16 rows, and the least size that it pays for: smaller matrices are in a cache.
constexpr int64_t AHEAD = 8192, IN_MEMORY = 1 << 20;
// Least weights, times rows / 32, with a second thread.
constexpr int64_t WORTH = 1 << 18;

struct Factors {
  const char *x, *weight;
  int64_t x_stride, weight_stride;  // bytes
};

Factors factors(const bf16* x, int64_t x_stride, const bf16* weight, int64_t width) {
  return {reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(weight), x_stride * 2, width * 4};
}

struct Part {
  Factors whole, rest;  // up to the last multiple of 32 inputs; the rest, with zeros up to 32
  int64_t steps;
  bool has_rest;
  const char* next;  // what to ask memory for meanwhile
  int64_t lines;     // of 64 bytes, in each step
  float* sums;       // [MOST_ROWS, TILE]
};

template <int TALL, int COLUMN>
void multiply_column(const Factors& from) {
  constexpr int TO = TALL * COLUMN, BY = WEIGHT + COLUMN % 2;
  tile_load<BY>(from.weight + 64 * COLUMN, from.weight_stride);
  tile_multiply<TO, X, BY>();
  if constexpr (TALL == 2) tile_multiply<TO + 1, X + 1, BY>();
}

template <int TALL, int... COLUMNS>
void multiply_step(const Factors& from) {
  tile_load<X>(from.x, from.x_stride);
  if constexpr (TALL == 2) tile_load<X + 1>(from.x + TILE_ROWS * from.x_stride, from.x_stride);
  (multiply_column<TALL, COLUMNS>(from), ...);
}

template <int TALL, int COLUMN>
void store_column(float* sums) {
  constexpr int FROM = TALL * COLUMN;
  tile_store<FROM>(sums + LANES * COLUMN, TILE * sizeof(float));
  if constexpr (TALL == 2) tile_store<FROM + 1>(sums + TILE_ROWS * TILE + LANES * COLUMN, TILE * sizeof(float));
}

template <int TALL, int... COLUMNS>
void multiply_all(const Part& part) {
  (tile_zero<TALL * COLUMNS>(), ...);
  if constexpr (TALL == 2) (tile_zero<TALL * COLUMNS + 1>(), ...);
  Factors from = part.whole;
  const char* next = part.next;
  for (int64_t i = 0; i < part.steps; i++) {
    // Few rows need the weights themselves soon, many rows the next columns', which only the larger cache holds.
    for (int64_t line = 0; line < part.lines; line++, next += 64) __builtin_prefetch(next, 0, TALL == 1 ? 3 : 2);
    multiply_step<TALL, COLUMNS...>(from);
    from.x += INPUTS * sizeof(bf16);
    from.weight += INPUTS / 2 * from.weight_stride;
  }
  if (part.has_rest) multiply_step<TALL, COLUMNS...>(part.rest);
  (store_column<TALL, COLUMNS>(part.sums), ...);
}

// Sums of up to 16 rows by the whole width, or of up to 32 by its halves one after the other.
void multiply(Part part, int64_t rows, int64_t vectors) {
  using Multiply = void (*)(const Part&);
  static constexpr Multiply low[] = {
      multiply_all<1, 0>, multiply_all<1, 0, 1>, multiply_all<1, 0, 1, 2>, multiply_all<1, 0, 1, 2, 3>};
  static constexpr Multiply tall[] = {multiply_all<2, 0>, multiply_all<2, 0, 1>};
  if (rows <= TILE_ROWS) return low[vectors - 1](part);
  for (int64_t done = 0; done < vectors; done += 2) {
    tall[std::min<int64_t>(vectors - done, 2) - 1](part);
    part.whole.weight += 2 * 64;
    part.rest.weight += 2 * 64;
    part.next += part.steps * part.lines * 64;
    part.sums += 2 * LANES;
  }
}

struct Product {
  const bf16* x;
  int64_t x_stride, m;
  const bf16* packed;
  int64_t n, k;
  const bf16* bias;
  bf16* out;
};

// The inputs past the last multiple of 32, of x and of the weight, with zeros up to 32.
struct Rest {
  alignas(64) bf16 x[MOST_ROWS * INPUTS];
  alignas(64) bf16 weight[INPUTS * TILE];

  void take_weight(const bf16* from, int64_t count, int64_t width) {
    std::memset(x, 0, sizeof(x));
    std::memcpy(weight, from, count * width * sizeof(bf16));
    std::memset(weight + count * width, 0, (INPUTS - count) * width * sizeof(bf16));
  }
  void take_x(const bf16* from, int64_t stride, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; r++) std::memcpy(x + r * INPUTS, from + r * stride, count * sizeof(bf16));
  }
};

// Prefetches for the steps of a block of rows: with few rows the lines a little ahead of their own; with many rows the
// next 64 columns, a share in each of their passes.
void look_ahead(Part& part, const Product& all, int64_t low, int64_t rows, int64_t width, bool last) {
  if (rows <= TILE_ROWS) {
    part.next = part.whole.weight + AHEAD;
    part.lines = all.n * all.k > IN_MEMORY ? width : 0;
    return;
  }
  int64_t halves = (width + 31) / 32, passes = std::max<int64_t>(all.m / MOST_ROWS, 1) * halves;
  part.lines = last ? 0 : (width + passes - 1) / passes;
  int64_t asked = low / MOST_ROWS * halves * part.steps * part.lines * 64;
  part.next = part.whole.weight + all.k * width * 2 + asked;
}

// All rows by the 64 columns from `first` on.
void multiply_columns(const Product& all, int64_t first, bool last) {
  const PackedPlace<bf16> place{all.n, all.k};
  const int64_t width = place.width(first), whole = all.k / INPUTS * INPUTS, left = all.k - whole;
  const bf16* weight = all.packed + place.tile(first);
  alignas(64) float sums[MOST_ROWS * TILE];
  Rest rest;
  if (left) rest.take_weight(weight + whole * width, left, width);
  for (int64_t low = 0, shaped = 0; low < all.m; low += MOST_ROWS) {
    const int64_t rows = std::min(MOST_ROWS, all.m - low);
    const bf16* x = all.x + low * all.x_stride;
    if (left) rest.take_x(x + whole, all.x_stride, rows, left);
    if (rows != shaped) configure(shaped = rows, 64);
    Part part{
        factors(x, all.x_stride, weight, width), factors(rest.x, INPUTS, rest.weight, width), whole / INPUTS, left > 0,
        nullptr, 0, sums};
    look_ahead(part, all, low, rows, width, last);
    multiply(part, rows, width / LANES);
    write_tile(sums, rows, std::min(TILE, all.n - first), all.bias ? all.bias + first : nullptr,
               all.out + low * all.n + first, all.n);
  }
  tile_release();
}

}  // namespace

void linear_amx(
    const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out) {
  const Product all{x, x_stride, m, packed, n, k, bias, out};
  share((n + TILE - 1) / TILE, n * k * (m + 31) / 32 / WORTH, [&](int64_t tile, bool last) {
    multiply_columns(all, tile * TILE, last);
  });
}

#else

void linear_amx(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const bf16*, bf16*) {
  __builtin_unreachable();
}

#endif

}  // namespace gapless
