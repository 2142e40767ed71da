#include "fp8.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "parallel.h"
#include "tiled_rows.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

constexpr int64_t INPUTS = 32, BLOCK = MOST_TILED, MOST_DEEP = 128;
// Bytes of a pair of inputs of a tile in bfloat16, and in e4m3.
constexpr int64_t STRIDE = 4 * TILE, NARROW_STRIDE = 2 * TILE;
// Rows whose sums are kept while a tile is widened once.
constexpr int64_t KEPT_ROWS = 128;
constexpr int64_t AHEAD = 8192, WORTH = 1 << 18, PACK_WORTH = 1 << 16;

// e4m3 without NaN to bfloat16, which holds all of them; AMX takes no denormal ones, and none come out.
inline __m512i widened(__m256i bytes) {
  alignas(64) static constexpr uint16_t LEAST[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
  const __m512i x = _mm512_cvtepu8_epi16(bytes);
  const __m512i size = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x7F0));
  const __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x80));
  const __m512i whole = _mm512_mask_permutexvar_epi16(
      _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7)), small, x, _mm512_load_si512(LEAST));
  // whole | x << 8 & 0x8000
  return _mm512_ternarylogic_epi64(whole, _mm512_slli_epi16(x, 8), _mm512_set1_epi16(int16_t(0x8000)), 0xF8);
}

// The inputs of a tile of AMX.
void widen(const uint8_t* from, bool ahead, uint8_t* to) {
  for (int64_t i = 0; i < INPUTS; i += 2, from += NARROW_STRIDE, to += STRIDE) {
    if (ahead) __builtin_prefetch(from + AHEAD), __builtin_prefetch(from + AHEAD + 64);
    for (int64_t v = 0; v < 4; v++)
      _mm512_store_si512(to + 64 * v, widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * v))));
  }
}

template <int COLUMN>
void column_of_few(const uint8_t* weight) {
  tile_load<WEIGHT + COLUMN % 2>(weight + 64 * COLUMN, STRIDE);
  tile_multiply<COLUMN, X, WEIGHT + COLUMN % 2>();
}

template <int COLUMN>
void column_of_many(const uint8_t* weight) {
  tile_load<WEIGHT + COLUMN>(weight + 64 * COLUMN, STRIDE);
  tile_multiply<2 * COLUMN, X, WEIGHT + COLUMN>();
  tile_multiply<2 * COLUMN + 1, X + 1, WEIGHT + COLUMN>();
}

// Some rows by a part of a tile: sums [rows, TILE].
struct Part {
  const bf16* x;
  int64_t x_stride, rows, inputs;
  const uint8_t* narrow;  // the weight; null if `wide` holds it
  bool ahead;
  uint8_t* wide;
  float* sums;

  const uint8_t* weight(int64_t i) const {
    uint8_t* to = wide + i / 2 * STRIDE;
    if (narrow) widen(narrow + i * TILE, ahead, to);
    return to;
  }
};

void multiply_few(const Part& part) {
  constexpr int64_t LINE = TILE * sizeof(float);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < part.inputs; i += INPUTS) {
    const uint8_t* from = part.weight(i);
    tile_load<X>(part.x + i, part.x_stride * sizeof(bf16));
    column_of_few<0>(from), column_of_few<1>(from), column_of_few<2>(from), column_of_few<3>(from);
  }
  tile_store<0>(part.sums, LINE), tile_store<1>(part.sums + LANES, LINE);
  tile_store<2>(part.sums + 2 * LANES, LINE), tile_store<3>(part.sums + 3 * LANES, LINE);
}

// The half of a tile from column `first` on.
void multiply_many(const Part& part, int64_t first) {
  constexpr int64_t LINE = TILE * sizeof(float);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < part.inputs; i += INPUTS) {
    const uint8_t* from = part.weight(i) + 4 * first;
    tile_load<X>(part.x + i, part.x_stride * sizeof(bf16));
    tile_load<X + 1>(part.x + TILE_ROWS * part.x_stride + i, part.x_stride * sizeof(bf16));
    column_of_many<0>(from), column_of_many<1>(from);
  }
  float *top = part.sums + first, *low = top + TILE_ROWS * TILE;
  tile_store<0>(top, LINE), tile_store<1>(low, LINE);
  tile_store<2>(top + LANES, LINE), tile_store<3>(low + LANES, LINE);
}

void multiply(Part part) {
  if (part.rows <= TILE_ROWS) return multiply_few(part);
  multiply_many(part, 0);
  part.narrow = nullptr;
  multiply_many(part, TILE / 2);
}

struct Rows {
  const bf16* x;
  int64_t stride, count;
};

// Up to KEPT_ROWS rows by one tile: results [rows, TILE].
void multiply_tile(const Fp8Form& form, const Rows& rows, const uint8_t* tile, bool ahead, float* results) {
  alignas(64) uint8_t wide[MOST_DEEP / 2 * STRIDE];
  alignas(64) float sums[BLOCK * TILE];
  std::fill_n(results, rows.count * TILE, 0.0f);
  int64_t shaped = 0;
  for (int64_t start = 0; start < form.width(); start += form.span()) {
    const float* scales = reinterpret_cast<const float*>(tile);
    tile += form.head();
    const int64_t end = std::min(start + form.span(), form.width());
    for (int64_t i = start, deep; i < end; i += deep, tile += deep * TILE) {
      deep = std::min(MOST_DEEP, end - i);
      for (int64_t low = 0; low < rows.count; low += BLOCK) {
        const int64_t some = std::min(BLOCK, rows.count - low);
        if (some != shaped) configure(shaped = some, 64);
        multiply({rows.x + low * rows.stride + i, rows.stride, some, deep, low ? nullptr : tile, ahead, wide, sums});
        for (int64_t r = 0; r < some; r++)
          for (int64_t v = 0; v < TILE; v += LANES) {
            float* to = results + (low + r) * TILE + v;
            store(to, load(to) + load(sums + r * TILE + v) * load(scales + v));
          }
      }
    }
  }
}

}  // namespace

void pack_fp8(const Fp8Form& form, const uint8_t* weight, const float* scales, uint8_t* packed) {
  const int64_t span = form.span(), groups = (form.k + span - 1) / span;
  share(form.tiles(), form.n * form.k / PACK_WORTH, [&](int64_t index, bool) {
    uint8_t* to = packed + index * form.tile();
    std::memset(to, 0, form.tile());
    const int64_t columns = std::min(TILE, form.n - index * TILE);
    for (int64_t start = 0; start < form.k; start += span, to += form.head() + span * TILE) {
      for (int64_t c = 0; c < columns; c++)
        reinterpret_cast<float*>(to)[c] = scales[(index * TILE + c) * groups + start / span];
      for (int64_t i = start; i < std::min(form.k, start + span); i += INPUTS)
        for (int64_t c = 0; c < columns; c++) {
          const uint8_t* from = weight + (index * TILE + c) * form.k;
          for (int64_t j = i; j < std::min({form.k, start + span, i + INPUTS}); j++) {
            const bool number = (from[j] & 127) != 127;
            if (!number) reinterpret_cast<float*>(to)[c] = std::numeric_limits<float>::quiet_NaN();
            to[form.head() + (j - start) / 2 * NARROW_STRIDE + 2 * c + j % 2] = number ? from[j] : 0;
          }
        }
    }
  });
}

void linear_fp8(
    const Fp8Form& form, const bf16* x, int64_t x_stride, int64_t m, const uint8_t* packed, const bf16* bias,
    bf16* out) {
  const int64_t n = form.n, tile = form.tile();
  const bool ahead = form.tiles() * tile > 1 << 20;
  share(form.tiles(), n * form.k * (m + 31) / 32 / WORTH, [&](int64_t index, bool last) {
    const int64_t first = index * TILE, columns = std::min(TILE, n - first);
    alignas(64) float results[KEPT_ROWS * TILE];
    for (int64_t low = 0; low < m; low += KEPT_ROWS) {
      const int64_t count = std::min(KEPT_ROWS, m - low);
      multiply_tile(form, {x + low * x_stride, x_stride, count}, packed + index * tile, ahead && !low, results);
      write_tile(results, count, columns, bias ? bias + first : nullptr, out + low * n + first, n);
    }
    if (last) tile_release();
  });
}

#else

void pack_fp8(const Fp8Form&, const uint8_t*, const float*, uint8_t*) { __builtin_unreachable(); }
void linear_fp8(const Fp8Form&, const bf16*, int64_t, int64_t, const uint8_t*, const bf16*, bf16*) {
  __builtin_unreachable();
}

#endif

}  // namespace gapless
