// The product of bytes.h on AMX: 16 rows of a unit of x by a unit of 16 outputs a time. Weights are stored as AMX takes
// them; nibbles become bytes before.
#include "bytes.h"

#include <algorithm>
#include <cstring>

#include "tiled_rows.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

constexpr int64_t STRIDE = 4 * TILE;

struct Unit {
  const int8_t* x;
  int64_t x_stride;
  const uint8_t* weight;  // [unit / 4][TILE][4]
  int32_t* sums;          // [rows, TILE]
};

template <int COLUMN>
void column_of_few(const Unit& from) {
  constexpr int BY = WEIGHT + COLUMN % 2;
  tile_zero<COLUMN>();
  tile_load<BY>(from.weight + 64 * COLUMN, STRIDE);
  tile_multiply_bytes<COLUMN, X, BY>();
  tile_store<COLUMN>(from.sums + LANES * COLUMN, TILE * sizeof(int32_t));
}

template <int COLUMN>
void column_of_many(const Unit& from) {
  constexpr int BY = WEIGHT + COLUMN % 2, TO = COLUMN % 2 * 2;
  tile_zero<TO>(), tile_zero<TO + 1>();
  tile_load<BY>(from.weight + 64 * COLUMN, STRIDE);
  tile_multiply_bytes<TO, X, BY>();
  tile_multiply_bytes<TO + 1, X + 1, BY>();
  tile_store<TO>(from.sums + LANES * COLUMN, TILE * sizeof(int32_t));
  tile_store<TO + 1>(from.sums + TILE_ROWS * TILE + LANES * COLUMN, TILE * sizeof(int32_t));
}

void multiply_unit(const Unit& from, int64_t rows) {
  tile_load<X>(from.x, from.x_stride);
  if (rows <= TILE_ROWS) {
    column_of_few<0>(from), column_of_few<1>(from), column_of_few<2>(from), column_of_few<3>(from);
  } else {
    tile_load<X + 1>(from.x + TILE_ROWS * from.x_stride, from.x_stride);
    column_of_many<0>(from), column_of_many<1>(from), column_of_many<2>(from), column_of_many<3>(from);
  }
}

// [unit / 8][TILE][4] nibbles to [unit / 4][TILE][4] bytes.
void widen(const uint8_t* from, int64_t unit, uint8_t* to) {
  for (int64_t i = 0; i < unit; i += 8, from += STRIDE, to += 2 * STRIDE)
    for (int64_t v = 0; v < STRIDE; v += sizeof(Ints)) {
      Ints both;
      std::memcpy(&both, from + v, sizeof(both));
      const Ints low = both & 0x0F0F0F0F, high = both >> 4 & 0x0F0F0F0F;
      std::memcpy(to + v, &low, sizeof(low));
      std::memcpy(to + STRIDE + v, &high, sizeof(high));
    }
}

template <bool ZEROS, typename Scale>
void add_units(const BytePart& part, int64_t rows, int64_t u, const uint8_t* head, const int32_t* sums) {
  constexpr int VECTORS = TILE / WIDTH;
  const int32_t middle = part.form.nibbles ? MIDDLE_NIBBLE : MIDDLE;
  Floats scales[VECTORS], zeros[VECTORS];  // whole numbers below 2^24 are exact as floats
  for (int v = 0; v < VECTORS; v++) {
    scales[v] = load_floats(reinterpret_cast<const Scale*>(head) + v * WIDTH);
    const Ints own = ZEROS ? load_zeros(head + TILE * sizeof(Scale) + v * WIDTH) : Ints{} + middle;
    zeros[v] = __builtin_convertvector(own, Floats);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (part.row + r) * part.x.units + u;
    const float scale = part.x.scales[at], sum = float(part.x.sums[at]);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      float* to = part.results + r * TILE + v * WIDTH;
      Ints found;
      std::memcpy(&found, sums + r * TILE + v * WIDTH, sizeof(found));
      const Floats whole = __builtin_convertvector(found, Floats) - zeros[v] * sum;
      store_floats(to, add_unit(load_floats(to), whole, scales[v], scale));
    }
  }
}

auto find(const ByteForm& form) {
  if (form.zeros) return form.narrow ? add_units<true, f16> : add_units<true, float>;
  return form.narrow ? add_units<false, f16> : add_units<false, float>;
}

}  // namespace

void multiply_bytes_amx(const BytePart& part, int64_t rows) {
  const ByteForm& form = part.form;
  const int64_t unit = form.unit(), bytes = form.bytes(unit), span = form.span() / unit;
  const auto add = find(form);
  alignas(64) int32_t sums[AMX_BLOCK * TILE];
  alignas(64) uint8_t wide[64 * TILE];
  std::fill_n(part.results, rows * TILE, 0.0f);
  configure(rows, unit);
  const uint8_t *at = part.tile, *head = nullptr;
  for (int64_t u = 0; u < part.x.units; u++, at += bytes) {
    if (u % span == 0) head = at, at += form.head();
    for (int64_t line = 0; part.ahead && line < bytes; line += 64) __builtin_prefetch(at + part.ahead + line);
    if (form.nibbles) widen(at, unit, wide);
    const int8_t* x = part.x.steps.data() + part.row * part.x.width + u * unit;
    multiply_unit({x, part.x.width, form.nibbles ? wide : at, sums}, rows);
    add(part, rows, u, head, sums);
  }
}

void end_bytes_amx() { tile_release(); }

#else

void multiply_bytes_amx(const BytePart&, int64_t) { __builtin_unreachable(); }
void end_bytes_amx() { __builtin_unreachable(); }

#endif

}  // namespace gapless
