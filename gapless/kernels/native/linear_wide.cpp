#include "linear.h"

#include <algorithm>

#include "parallel.h"

namespace gapless {
namespace {

constexpr int MOST_ROWS = 6;
// Weights, times rows / 8, from which a second thread helps.
constexpr int64_t WORTH = 1 << 17;

template <typename T>
struct Strip {
  const T* x;
  int64_t x_stride;
  const T* weight;
  int64_t k;
  const T* bias;
  T* out;
  int64_t out_stride;
  int64_t columns;
};

// ROWS x (VECTORS * 16) outputs.
template <typename T, int ROWS, int VECTORS>
void multiply(const Strip<T>& strip) {
  f32x16 sums[ROWS][VECTORS] = {};
  const T* weight = strip.weight;
  for (int64_t i = 0; i < strip.k; i++, weight += VECTORS * LANES) {
    f32x16 w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = load(weight + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      f32x16 x = all(to_float(strip.x[r * strip.x_stride + i]));
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; v++) {
    int count = int(std::clamp<int64_t>(strip.columns - v * LANES, 0, LANES));
    f32x16 bias = strip.bias && count ? load_some(strip.bias + v * LANES, count) : f32x16{};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) store_some(strip.out + r * strip.out_stride + v * LANES, sums[r][v] + bias, count);
  }
}

template <typename T, int VECTORS>
void of_rows(int64_t rows, const Strip<T>& strip) {
  static constexpr void (*all_rows[MOST_ROWS])(const Strip<T>&) = {
      multiply<T, 1, VECTORS>, multiply<T, 2, VECTORS>, multiply<T, 3, VECTORS>,
      multiply<T, 4, VECTORS>, multiply<T, 5, VECTORS>, multiply<T, 6, VECTORS>};
  all_rows[rows - 1](strip);
}

template <typename T>
void multiply_some(int64_t rows, int64_t vectors, const Strip<T>& strip) {
  if (vectors == 4) return of_rows<T, 4>(rows, strip);
  if (vectors == 3) return of_rows<T, 3>(rows, strip);
  return vectors == 2 ? of_rows<T, 2>(rows, strip) : of_rows<T, 1>(rows, strip);
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

template <typename T>
void linear_wide(
    const T* x, int64_t x_stride, int64_t m, const T* packed, int64_t n, int64_t k, const T* bias, T* out) {
  share((n + TILE - 1) / TILE, n * k * (m + 7) / 8 > WORTH, [&](int64_t tile, bool) {
    int64_t first = tile * TILE, passes = (m + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t pass = 0, start = 0; pass < passes; pass++) {
      int64_t end = m * (pass + 1) / passes;
      multiply_some<T>(
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
template void linear_wide(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const bf16*, bf16*);

}  // namespace gapless
