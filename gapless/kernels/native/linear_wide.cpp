#include "linear.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace gapless {
namespace {

constexpr int MOST_ROWS = 6;
// Weights, times rows / 8, from which a second thread helps.
constexpr int64_t WORTH = 1 << 17;

template <typename T, typename W>
struct Strip {
  const T* x;
  int64_t x_stride;
  const W* weight;
  int64_t k;
  const T* bias;
  T* out;
  int64_t out_stride;
  int64_t columns;
};

// Vectors of columns whose sums are kept at a time: without AVX-512 there are registers for half as many, of half the
// width. Sums without a register go to memory and back with each input.
constexpr int together(int rows, int vectors) {
  if (GAPLESS_AVX512 || rows == 1) return vectors;
  return rows == 2 && vectors % 2 == 0 ? 2 : 1;
}

// ROWS x (VECTORS * 16) outputs.
template <typename T, typename W, int ROWS, int VECTORS>
void multiply(const Strip<T, W>& strip) {
  constexpr int SOME = together(ROWS, VECTORS), WIDE = SOME * PARTS;
  for (int first = 0; first < VECTORS; first += SOME) {
    Floats sums[ROWS][WIDE] = {};
    const W* weight = strip.weight + first * LANES;
    for (int64_t i = 0; i < strip.k; i++, weight += VECTORS * LANES) {
      Floats w[WIDE];
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) w[v] = load_floats(weight + v * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Floats x = Floats{} + to_float(strip.x[r * strip.x_stride + i]);
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) sums[r][v] += x * w[v];
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < SOME; v++) {
      int64_t column = (first + v) * LANES;
      int count = int(std::clamp<int64_t>(strip.columns - column, 0, LANES));
      f32x16 bias = strip.bias && count ? load_some(strip.bias + column, count) : f32x16{};
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        f32x16 sum;
        std::memcpy(&sum, &sums[r][v * PARTS], sizeof(sum));
        store_some(strip.out + r * strip.out_stride + column, sum + bias, count);
      }
    }
  }
}

template <int VECTORS, typename T, typename W>
void of_rows(int64_t rows, const Strip<T, W>& strip) {
  static constexpr void (*all_rows[MOST_ROWS])(const Strip<T, W>&) = {
      multiply<T, W, 1, VECTORS>, multiply<T, W, 2, VECTORS>, multiply<T, W, 3, VECTORS>,
      multiply<T, W, 4, VECTORS>, multiply<T, W, 5, VECTORS>, multiply<T, W, 6, VECTORS>};
  all_rows[rows - 1](strip);
}

template <typename T, typename W>
void multiply_some(int64_t rows, int64_t vectors, const Strip<T, W>& strip) {
  if (vectors == 4) return of_rows<4>(rows, strip);
  if (vectors == 3) return of_rows<3>(rows, strip);
  return vectors == 2 ? of_rows<2>(rows, strip) : of_rows<1>(rows, strip);
}

int64_t width_at(int64_t first, int64_t n) { return std::min(TILE, round_up(n, LANES) - first); }

}  // namespace

template <typename T>
void pack_wide(const T* weight, int64_t n, int64_t k, T* packed) {
  share((n + TILE - 1) / TILE, n * k > (1 << 16), [&](int64_t tile, bool) {
    int64_t first = tile * TILE, width = width_at(first, n);
    T* to = packed + first * k;
    for (int64_t i = 0; i < k; i++)
      for (int64_t column = 0; column < width; column++)
        to[i * width + column] = first + column < n ? weight[(first + column) * k + i] : T{};
  });
}

template <typename T, typename W>
void linear_wide(
    const T* x, int64_t x_stride, int64_t m, const W* packed, int64_t n, int64_t k, const T* bias, T* out) {
  share((n + TILE - 1) / TILE, n * k * (m + 7) / 8 > WORTH, [&](int64_t tile, bool) {
    int64_t first = tile * TILE, passes = (m + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t pass = 0, start = 0; pass < passes; pass++) {
      int64_t end = m * (pass + 1) / passes;
      multiply_some<T, W>(
          end - start, width_at(first, n) / LANES,
          {x + start * x_stride, x_stride, packed + first * k, k, bias ? bias + first : nullptr,
           out + start * n + first, n, n - first});
      start = end;
    }
  });
}

template void pack_wide(const float*, int64_t, int64_t, float*);
template void pack_wide(const bf16*, int64_t, int64_t, bf16*);
template void linear_wide(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const float*, float*);
template void linear_wide(const float*, int64_t, int64_t, const bf16*, int64_t, int64_t, const float*, float*);
template void linear_wide(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const bf16*, bf16*);

}  // namespace gapless
