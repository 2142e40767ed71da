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

constexpr int32_t MIDDLE = 128;

constexpr int MOST_ROWS = 3;
constexpr int32_t STEPS = 127;
constexpr float LEAST = 1e-30f;  // a smaller maximum rounds to zero
// Least weights, times rows / 8, with a second thread.
constexpr int64_t WORTH = 1 << 19;
// Tiles that one row takes together: a sum continues some cycles after its last product.
constexpr int64_t ABREAST = GAPLESS_AVX512 ? 3 : 1;

// Registers of columns whose sums are kept at a time.
constexpr int together(int rows) { return GAPLESS_AVX512 || rows == 1 ? TILE / WIDTH : rows == 2 ? 4 : 2; }

// Products of four bytes each, added to sums. `OFFSET` is what a weight's byte has too much in them.
#if defined(__AVX512VNNI__) && GAPLESS_AVX512
constexpr int32_t OFFSET = MIDDLE;
typedef Ints Bytes;
inline Bytes prepared(Ints w) { return w; }
inline Ints add_products(Ints sums, const Bytes& w, Ints x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__) && !defined(GAPLESS_PLAIN)
constexpr int32_t OFFSET = MIDDLE;
typedef Ints Bytes;
inline Bytes prepared(Ints w) { return w; }
inline Ints add_products(Ints sums, const Bytes& w, Ints x) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
}
#elif GAPLESS_BYTES == 32
// Sums of two products have 16 bits: 127 x 127 twice fits, 255 x 127 twice would not.
constexpr int32_t OFFSET = 0;
struct Bytes {
  __m256i magnitude, sign;
};
inline Bytes prepared(Ints w) {
  const __m256i sign = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(char(MIDDLE)));
  return {_mm256_abs_epi8(sign), sign};
}
inline Ints add_products(Ints sums, const Bytes& w, Ints x) {
  const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8((__m256i)x, w.sign));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr int32_t OFFSET = 0;
typedef int8x16_t Bytes;
inline Bytes prepared(Ints w) { return vreinterpretq_s8_u32(bits_of<uint32x4_t>(w) ^ 0x80808080u); }
inline Ints add_products(Ints sums, const Bytes& w, Ints x) {
  return (Ints)vdotq_s32((int32x4_t)sums, w, bits_of<int8x16_t>(x));
}
#endif

float largest_of(const float* x, int64_t count) {
  f32x16 top{};
  for (int64_t i = 0; i < count; i += LANES) {
    f32x16 some = load_some(x + i, int(std::min<int64_t>(LANES, count - i)));
    top = max(max(some, -some), top);
  }
  return largest(top);
}

// Rows of x in whole numbers. For each group of inputs, `scales` has the value of one unit; `sums` adds them up.
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
    int32_t sum = 0;
    bool odd = false;
    for (int64_t i = 0; i < INPUT_GROUP; i++) {
      odd |= from[i] != from[i];
      const int32_t whole = int32_t(__builtin_rintf(from[i] * per_unit));
      const int8_t narrow = int8_t(std::clamp(whole, -STEPS, STEPS));
      steps[group * INPUT_GROUP + i] = narrow;
      sum += narrow;
    }
    scales[group] = odd ? std::numeric_limits<float>::quiet_NaN() : top / STEPS;
    sums[group] = sum;
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

// ROWS rows by WIDE registers of columns from `first` on, which may reach into the next tiles.
template <typename T, int ROWS, int WIDE>
void multiply(const Part<T>& part, int64_t first) {
  const int64_t width = part.x.width, groups = part.x.groups, tile = width * TILE;
  const int8_t* x = part.x.steps.data() + part.row * width;
  const uint8_t* weight = part.weight + 4 * first;
  Floats found[ROWS][WIDE] = {};
  for (int64_t g = 0; g < groups; g++) {
    Ints sums[ROWS][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) sums[r][v] = Ints{} - OFFSET * part.x.sums[(part.row + r) * groups + g];
    for (int64_t i = g * INPUT_GROUP; i < (g + 1) * INPUT_GROUP; i += 4, weight += 4 * TILE) {
      Ints four[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        int32_t bytes;
        std::memcpy(&bytes, x + r * width + i, sizeof(bytes));
        four[r] = Ints{} + bytes;
      }
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) {
        Ints w;
        std::memcpy(&w, weight + v * WIDTH / TILE * tile + 4 * (v * WIDTH % TILE), sizeof(w));
        const Bytes factor = prepared(w);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][v] = add_products(sums[r][v], factor, four[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++)
        found[r][v] += __builtin_convertvector(sums[r][v], Floats) * part.x.scales[(part.row + r) * groups + g];
  }
  float results[ROWS][WIDE * WIDTH];
  std::memcpy(results, found, sizeof(found));
  for (int64_t c = 0; c < WIDE * WIDTH && first + c < part.columns; c += std::min(LANES, WIDE * WIDTH)) {
    const int count = int(std::min<int64_t>({part.columns - first - c, LANES, WIDE * WIDTH}));
    const f32x16 scales = load_some(part.scales + first + c, count);
    const f32x16 bias = part.bias ? load_some(part.bias + first + c, count) : f32x16{};
    for (int r = 0; r < ROWS; r++)
      store_some(
          part.out + r * part.out_stride + first + c, load_some(results[r] + c, count) * scales + bias, count);
  }
}

// All columns of a tile, or of ABREAST tiles.
template <typename T, int ROWS, int WIDE>
void multiply_all(const Part<T>& part) {
  constexpr int64_t COLUMNS = std::max<int64_t>(TILE, WIDE * WIDTH);
  for (int64_t first = 0; first < COLUMNS; first += WIDE * WIDTH) multiply<T, ROWS, WIDE>(part, first);
}

template <typename T>
auto find(int64_t rows, int64_t tiles) {
  static constexpr void (*all[MOST_ROWS])(const Part<T>&) = {
      multiply_all<T, 1, together(1)>, multiply_all<T, 2, together(2)>, multiply_all<T, 3, together(3)>};
  return tiles == ABREAST && rows == 1 ? multiply_all<T, 1, int(ABREAST) * together(1)> : all[rows - 1];
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
  const int64_t worth = n * k * (m + 7) / 8 / WORTH;
  const bool alone = threads_for(worth) == 1;
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
template void linear_bytes(
    const f16*, int64_t, int64_t, const uint8_t*, const float*, int64_t, int64_t, const f16*, f16*);

}  // namespace gapless
