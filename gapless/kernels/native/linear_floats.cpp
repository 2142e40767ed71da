// The product of linear.h on any vector unit: weights are widened to float32 in registers.
#include <algorithm>
#include <vector>

#include "linear.h"
#include "parallel.h"

namespace gapless {
namespace {

constexpr int MOST_ROWS = 6;
// Inputs of a tile that are multiplied with all rows before the next ones: they stay in the first cache meanwhile.
constexpr int64_t DEEP = 64;
// Least passes over a block of weights for which widening it once pays.
constexpr int64_t WIDENED = 3;
// Rows whose unfinished sums a thread keeps between two such blocks.
constexpr int64_t BLOCK_ROWS = 192;
// Prefetch distance of one row, in bytes, and the least number of weights that it pays for: smaller matrices are in a
// cache.
constexpr int64_t AHEAD_OF_ONE = 16384, IN_MEMORY = 1 << 20;
// Least weights, times rows / 8, with a second thread.
constexpr int64_t WORTH = 1 << 17;

// Registers of columns whose sums are kept at a time: as many as leave room for the factors. A unit begins a sum's next
// product only when the last is done, so fewer than eight sums leave it idle.
constexpr int together(int rows) {
#if GAPLESS_AVX512
  return TILE / WIDTH;
#elif defined(__aarch64__)
  return rows == 1 ? TILE / WIDTH : 4;
#else
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
#endif
}

// Some registers that divide every tile, however narrow.
constexpr int NARROW = GAPLESS_AVX512 ? 1 : together(MOST_ROWS);

struct Part {
  const float* x;      // [inputs][rows]
  int64_t steps, width;  // of TOGETHER inputs; columns of the tile
  float* sums;         // [rows, TILE]
  bool first;          // no sums so far
  const char* next;    // what to ask memory for meanwhile, or null
};

template <int ROWS, int WIDE>
inline __attribute__((always_inline)) void add(const float* x, const Floats* w, Floats (&sums)[ROWS][WIDE]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    const Floats one = spread(x[r]);
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) sums[r][v] += one * w[v];
  }
}

// The even inputs of pairs, then the odd ones.
template <int ROWS, int WIDE>
inline __attribute__((always_inline)) void step(const float* x, const bf16* weight, Floats (&sums)[ROWS][WIDE]) {
  Floats w[WIDE];
#pragma GCC unroll 16
  for (int v = 0; v < WIDE; v++) w[v] = load_two(weight + 2 * v * WIDTH).a;
  add(x, w, sums);
  asm volatile("" ::: "memory");  // loaded again: there are no registers to keep the pairs in
#pragma GCC unroll 16
  for (int v = 0; v < WIDE; v++) w[v] = load_two(weight + 2 * v * WIDTH).b;
  add(x + ROWS, w, sums);
}

template <int ROWS, int WIDE, typename W>
inline __attribute__((always_inline)) void step(const float* x, const W* weight, Floats (&sums)[ROWS][WIDE]) {
  Floats w[WIDE];
#pragma GCC unroll 16
  for (int v = 0; v < WIDE; v++) w[v] = load_floats(weight + v * WIDTH);
  add(x, w, sums);
}

// ROWS x (WIDE * WIDTH) outputs.
template <typename W, int ROWS, int WIDE>
void multiply(const Part& part, const W* weight) {
  Floats sums[ROWS][WIDE];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++)
      sums[r][v] = part.first ? Floats{} : load_floats(part.sums + r * TILE + v * WIDTH);
  const float* x = part.x;
  const char* next = part.next;
  const int64_t stride = part.width * TOGETHER<W>, steps = part.steps;
  for (int64_t i = 0; i < steps; i++, x += TOGETHER<W> * ROWS, weight += stride) {
    if (next) {
      constexpr int LINES = ROWS == 1 ? TOGETHER<W> * TILE * sizeof(W) / 64 : 1;
#pragma GCC unroll 8
      for (int line = 0; line < LINES; line++, next += 64) __builtin_prefetch(next, 0, ROWS == 1 ? 3 : 2);
    }
    step(x, weight, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) store_floats(part.sums + r * TILE + v * WIDTH, sums[r][v]);
}

// All columns of a tile, for some inputs.
template <typename W, int ROWS>
void multiply_tile(Part part, const W* weight) {
  constexpr int WIDE = together(ROWS);
  const bool narrow = part.width % (WIDE * WIDTH);
  const int64_t columns = (narrow ? NARROW : WIDE) * WIDTH;
  const int64_t asked = part.steps * 64;
  for (int64_t column = 0; column < part.width; column += columns) {
    (narrow ? multiply<W, ROWS, NARROW> : multiply<W, ROWS, WIDE>)(part, weight + column * TOGETHER<W>);
    part.sums += columns;
    if (part.next) part.next += asked;
  }
}

template <typename W>
auto of_rows(int64_t rows) {
  static constexpr void (*all[MOST_ROWS])(Part, const W*) = {
      multiply_tile<W, 1>, multiply_tile<W, 2>, multiply_tile<W, 3>,
      multiply_tile<W, 4>, multiply_tile<W, 5>, multiply_tile<W, 6>};
  return all[rows - 1];
}

// Up to BLOCK_ROWS rows of x, which go in passes of up to MOST_ROWS, each [k, rows] in float32.
struct Passes {
  int64_t rows, k;  // whole steps of inputs
  const float* x;

  int64_t count() const { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
  int64_t start(int64_t pass) const { return rows * pass / count(); }
  int64_t size(int64_t pass) const { return start(pass + 1) - start(pass); }
  const float* of(int64_t pass) const { return x + start(pass) * k; }
};

template <typename T>
Passes widened(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t whole_k) {
  if constexpr (std::is_same_v<T, float>)
    if (rows == 1 && k == whole_k) return {rows, k, x};
  static thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < rows * whole_k) kept.resize(rows * whole_k);
  const Passes passes{rows, whole_k, kept.data()};
  float* to = kept.data();
  share(passes.count(), rows * k / (1 << 16), [&, to](int64_t pass, bool) {
    const int64_t first = passes.start(pass), some = passes.size(pass);
    float* all = to + first * whole_k;
    for (int64_t r = 0; r < some; r++) {
      const T* from = x + (first + r) * x_stride;
      for (int64_t i = 0; i < k; i++) all[i * some + r] = to_float(from[i]);
      for (int64_t i = k; i < whole_k; i++) all[i * some + r] = 0;
    }
  });
  return passes;
}

template <typename T>
void write(const float* sums, int64_t rows, int64_t columns, const T* bias, T* out, int64_t out_stride) {
  for (int64_t v = 0; v < columns; v += LANES) {
    const int count = int(std::min<int64_t>(columns - v, LANES));
    const f32x16 add = bias ? load_some(bias + v, count) : f32x16{};
    for (int64_t r = 0; r < rows; r++) store_some(out + r * out_stride + v, load(sums + r * TILE + v) + add, count);
  }
}

// A block of weights in float32, [inputs, width].
inline void widen(const bf16* block, int64_t inputs, int64_t width, float* to) {
  for (int64_t i = 0; i < inputs; i += 2, to += 2 * width)
    for (int64_t column = 0; column < width; column += WIDTH, block += 2 * WIDTH) {
      const Two pairs = load_two(block);
      store_floats(to + column, pairs.a), store_floats(to + width + column, pairs.b);
    }
}

template <typename W>
void widen(const W* block, int64_t inputs, int64_t width, float* to) {
  for (int64_t i = 0; i < inputs * width; i += WIDTH) store_floats(to + i, load_floats(block + i));
}

// One block of inputs of a tile, for all rows. `next`: what to ask memory for meanwhile, or null.
template <typename W>
void multiply_block(
    const Passes& passes, int64_t done, int64_t inputs, const W* block, int64_t width, const char* next, float* sums) {
  for (int64_t pass = 0; pass < passes.count(); pass++, next = nullptr) {
    const int64_t rows = passes.size(pass);
    of_rows<W>(rows)(
        {passes.of(pass) + done * rows, inputs / TOGETHER<W>, width, sums + passes.start(pass) * TILE, done == 0, next},
        block);
  }
}

// The sums of a tile's columns for all rows. `ask`: prefetch the weights after the present ones.
template <typename W>
void multiply_passes(const Passes& passes, const W* weight, int64_t width, bool ask, float* sums) {
  alignas(64) float wide[DEEP * TILE];
  const bool one = passes.rows == 1;
  const int64_t deep = one ? passes.k : DEEP;
  for (int64_t done = 0; done < passes.k; done += deep) {
    const int64_t inputs = std::min(deep, passes.k - done);
    const W* block = weight + done * width;
    const char* next = !ask ? nullptr : reinterpret_cast<const char*>(block) + (one ? AHEAD_OF_ONE : inputs * width * sizeof(W));
    if (std::is_same_v<W, float> || passes.count() < WIDENED) {
      multiply_block(passes, done, inputs, block, width, next, sums);
    } else {
      widen(block, inputs, width, wide);
      multiply_block(passes, done, inputs, wide, width, next, sums);
    }
  }
}

}  // namespace

template <typename T, typename W>
void linear_floats(const T* x, int64_t x_stride, int64_t m, const W* packed, int64_t n, int64_t k, const T* bias, T* out) {
  const PackedPlace<W> place{n, k};
  const int64_t worth = n * k * (m + 7) / 8 / WORTH;
  const bool in_memory = n * k > IN_MEMORY;
  for (int64_t low = 0; low < m; low += BLOCK_ROWS) {
    const Passes passes =
        widened(x + low * x_stride, x_stride, std::min(BLOCK_ROWS, m - low), k, round_up(k, TOGETHER<W>));
    share((n + TILE - 1) / TILE, worth, [&](int64_t tile, bool) {
      const int64_t first = tile * TILE;
      alignas(64) float sums[BLOCK_ROWS * TILE];
      multiply_passes(passes, packed + place.tile(first), place.width(first), in_memory, sums);
      write(sums, passes.rows, std::min(TILE, n - first), bias ? bias + first : nullptr, out + low * n + first, n);
    });
  }
}

template void linear_floats(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const float*, float*);
template void linear_floats(const float*, int64_t, int64_t, const bf16*, int64_t, int64_t, const float*, float*);
template void linear_floats(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const bf16*, bf16*);
template void linear_floats(const f16*, int64_t, int64_t, const f16*, int64_t, int64_t, const f16*, f16*);
template void linear_floats(const f16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const f16*, f16*);

}  // namespace gapless
