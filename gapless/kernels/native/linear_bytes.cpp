#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

namespace gapless {

#if GAPLESS_BYTE_DOT

namespace {

constexpr int MOST_ROWS = 3;
constexpr int VECTORS = TILE / LANES;
constexpr int32_t STEPS = 127, MIDDLE = 128;
constexpr float LEAST = 1e-30f;  // what is smaller everywhere rounds to zero
// Weights, times rows / 8, from which a second thread helps.
constexpr int64_t WORTH = 1 << 19;

float largest_of(const float* x, int64_t count) {
  f32x16 top{};
  for (int64_t i = 0; i < count; i += LANES) {
    f32x16 some = load_some(x + i, int(std::min<int64_t>(LANES, count - i)));
    top = max(max(some, -some), top);
  }
  return largest(top);
}

// Rows of x in whole numbers. For each group of inputs, `scales` says what one of them stands for; `sums` adds them up.
struct Rounded {
  int64_t width, groups;
  std::vector<int8_t> steps;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  template <typename T>
  Rounded(const T* x, int64_t stride, int64_t m, int64_t k)
      : width(round_up(k, INPUT_GROUP)), groups(width / INPUT_GROUP), steps(m * width), scales(m * groups),
        sums(m * groups) {
    for (int64_t r = 0; r < m; r++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t count = std::min(INPUT_GROUP, k - g * INPUT_GROUP);
        float some[INPUT_GROUP] = {};
        for (int64_t i = 0; i < count; i++) some[i] = to_float(x[r * stride + g * INPUT_GROUP + i]);
        round(some, r * groups + g);
      }
  }

 private:
  void round(const float* from, int64_t group) {
    const float top = largest_of(from, INPUT_GROUP), per_unit = top > LEAST ? STEPS / top : 0;
    __m512i sum = _mm512_setzero_si512();
    i32x16 odd{};
    for (int64_t i = 0; i < INPUT_GROUP; i += LANES) {
      f32x16 some = load(from + i);
      odd |= ~same(some, some);
      __m128i narrow = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(some * per_unit)));
      sum = _mm512_add_epi32(sum, _mm512_cvtepi8_epi32(narrow));
      std::memcpy(steps.data() + group * INPUT_GROUP + i, &narrow, sizeof(narrow));
    }
    scales[group] = any(odd) ? std::numeric_limits<float>::quiet_NaN() : top / STEPS;
    sums[group] = _mm512_reduce_add_epi32(sum);
  }
};

template <typename T>
struct Part {
  const Rounded& x;
  int64_t row;
  const uint8_t* weight;
  const float* scales;
  const T* bias;
  T* out;
  int64_t out_stride;
  int64_t columns;
};

// ROWS rows by TILES tiles. A sum goes on some cycles after its last product, so one row takes several tiles.
template <typename T, int ROWS, int TILES>
void multiply(const Part<T>& part) {
  constexpr int WIDE = TILES * VECTORS;
  const int64_t width = part.x.width, groups = part.x.groups, tile = width * TILE;
  const int8_t* x = part.x.steps.data() + part.row * width;
  const uint8_t* weight = part.weight;
  f32x16 found[ROWS][WIDE] = {};
  for (int64_t g = 0; g < groups; g++) {
    __m512i sums[ROWS][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) sums[r][v] = _mm512_set1_epi32(-MIDDLE * part.x.sums[(part.row + r) * groups + g]);
    for (int64_t i = g * INPUT_GROUP; i < (g + 1) * INPUT_GROUP; i += 4, weight += 4 * TILE) {
      __m512i four[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        int32_t bytes;
        std::memcpy(&bytes, x + r * width + i, sizeof(bytes));
        four[r] = _mm512_set1_epi32(bytes);
      }
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) {
        __m512i w = _mm512_loadu_si512(weight + v / VECTORS * tile + 64 * (v % VECTORS));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], w, four[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++)
        found[r][v] += (f32x16)_mm512_cvtepi32_ps(sums[r][v]) * part.x.scales[(part.row + r) * groups + g];
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) {
      int count = int(std::clamp<int64_t>(part.columns - v * LANES, 0, LANES));
      f32x16 result = found[r][v] * load(part.scales + v * LANES);
      if (part.bias && count) result += load_some(part.bias + v * LANES, count);
      store_some(part.out + r * part.out_stride + v * LANES, result, count);
    }
}

template <typename T>
using Multiply = void (*)(const Part<T>&);

// Tiles that one row takes together.
constexpr int64_t ABREAST = 3;

template <typename T>
Multiply<T> find(int64_t rows, int64_t tiles) {
  static constexpr Multiply<T> all[MOST_ROWS] = {multiply<T, 1, 1>, multiply<T, 2, 1>, multiply<T, 3, 1>};
  return tiles == ABREAST ? multiply<T, 1, ABREAST> : all[rows - 1];
}

}  // namespace

void pack_bytes(const float* weight, int64_t n, int64_t k, uint8_t* packed, float* scales) {
  const int64_t width = round_up(k, INPUT_GROUP);
  std::memset(packed, MIDDLE, byte_elements(n, k));
  std::fill_n(scales, round_up(n, TILE), 0.0f);
  for (int64_t column = 0; column < n; column++) {
    const float* row = weight + column * k;
    const float top = largest_of(row, k), per_unit = top > LEAST ? STEPS / top : 0;
    scales[column] = top / STEPS;
    uint8_t* to = packed + column / TILE * TILE * width + 4 * (column % TILE);
    for (int64_t i = 0; i < k; i++) to[i / 4 * 4 * TILE + i % 4] = uint8_t(MIDDLE + std::lrint(row[i] * per_unit));
  }
}

template <typename T>
void linear_bytes(
    const T* x, int64_t x_stride, int64_t m, const uint8_t* packed, const float* scales, int64_t n, int64_t k,
    const T* bias, T* out) {
  const Rounded rows(x, x_stride, m, k);
  const bool worth = n * k * (m + 7) / 8 > WORTH, alone = !worth || threads_here() == 1;
  const int64_t tiles = (n + TILE - 1) / TILE, passes = (m + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t some = m == 1 && alone ? ABREAST : 1, groups = tiles / some, units = groups + tiles % some;
  share(units, worth, [&](int64_t unit, bool) {
    const int64_t tile = unit < groups ? unit * some : unit + groups * (some - 1), first = tile * TILE;
    for (int64_t pass = 0, start = 0; pass < passes; pass++) {
      const int64_t end = m * (pass + 1) / passes;
      find<T>(end - start, unit < groups ? some : 1)(
          {rows, start, packed + first * rows.width, scales + first, bias ? bias + first : nullptr,
           out + start * n + first, n, n - first});
      start = end;
    }
  });
}

#else

void pack_bytes(const float*, int64_t, int64_t, uint8_t*, float*) { __builtin_unreachable(); }

template <typename T>
void linear_bytes(const T*, int64_t, int64_t, const uint8_t*, const float*, int64_t, int64_t, const T*, T*) {
  __builtin_unreachable();
}

#endif

template void linear_bytes(
    const float*, int64_t, int64_t, const uint8_t*, const float*, int64_t, int64_t, const float*, float*);
template void linear_bytes(
    const bf16*, int64_t, int64_t, const uint8_t*, const float*, int64_t, int64_t, const bf16*, bf16*);

}  // namespace gapless
