// The attention of prompts on any vector unit: everything as floats, widened once.
#include <array>
#include <utility>

#include "attention_prompt.h"

namespace gapless {
namespace {

#if GAPLESS_AVX512 || defined(__aarch64__)
constexpr int MOST = 12;  // rows for whose sums there are registers
#else
constexpr int MOST = 6;
#endif
constexpr int COLUMNS = 2 * WIDTH;         // of a panel: two registers
constexpr int64_t STRIDE = MOST_DIM + 16;  // of queries; no power of two, whose rows would share sets of the cache

// to [ROWS, COLUMNS] = to * factors, if there are any, + x [ROWS, steps] @ panel [steps, COLUMNS]
template <int ROWS, int64_t X_STRIDE>
void multiply(const float* x, const float* panel, int64_t steps, const float* factors, float* to, int64_t to_stride) {
  Floats sums[ROWS][2] = {};
  if (factors)
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < 2; v++) sums[r][v] = load_floats(to + r * to_stride + v * WIDTH) * factors[r];
#pragma GCC unroll 2
  for (; steps; steps--, x++, panel += COLUMNS) {
    const Floats low = load_floats(panel), high = load_floats(panel + WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] += x[r * X_STRIDE] * low;
      sums[r][1] += x[r * X_STRIDE] * high;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2; v++) store_floats(to + r * to_stride + v * WIDTH, sums[r][v]);
}

// `multiply` of 1 to MOST rows.
template <int64_t X_STRIDE, int... BELOW>
auto* of_rows(int64_t rows, std::integer_sequence<int, BELOW...>) {
  static constexpr decltype(&multiply<1, X_STRIDE>) some[] = {multiply<BELOW + 1, X_STRIDE>...};
  return some[rows - 1];
}

template <int64_t X_STRIDE>
void multiply_rows(
    int64_t rows, const float* x, const float* panel, int64_t steps, const float* factors, float* to,
    int64_t to_stride) {
  for (int64_t low = 0; low < rows; low += MOST) {
    auto* chosen = of_rows<X_STRIDE>(std::min<int64_t>(rows - low, MOST), std::make_integer_sequence<int, MOST>());
    chosen(x + low * X_STRIDE, panel, steps, factors ? factors + low : nullptr, to + low * to_stride, to_stride);
  }
}

// Register i: the i-th lanes of all.
template <typename Vector>
inline __attribute__((always_inline)) void transpose(Vector (&x)[WIDTH]) {
#if GAPLESS_AVX512
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr uint16_t UPPER[] = {0xAAAA, 0xCCCC, 0xF0F0, 0xFF00};
  // Bit by bit, the number of the register and that of the lane change places.
#pragma GCC unroll 4
  for (int bit = 0; bit < 4; bit++) {
    const __m512i other = _mm512_xor_si512(lanes, _mm512_set1_epi32(1 << bit));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i >> bit & 1) continue;
      __m512i a = (__m512i)x[i], b = (__m512i)x[i + (1 << bit)];
      x[i] = (Vector)_mm512_mask_permutexvar_epi32(a, UPPER[bit], other, b);
      x[i + (1 << bit)] = (Vector)_mm512_mask_permutexvar_epi32(b, uint16_t(~UPPER[bit]), other, a);
    }
  }
#elif defined(__AVX2__)
  __m256 pairs[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
  }
  __m256 fours[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[i] = (Vector)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    x[i + 4] = (Vector)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
#else
  for (int i = 0; i < WIDTH; i++)
    for (int j = 0; j < i; j++) {
      const auto lane = x[i][j];
      x[i][j] = x[j][i], x[j][i] = lane;
    }
#endif
}

// The first `count` numbers of a register's; the rest are zero.
template <typename Vector, typename T>
inline __attribute__((always_inline)) Vector load_part(const T* from, int64_t count) {
  constexpr int64_t ROOM = sizeof(Vector) / sizeof(T);
  Vector x{};
  if (count >= ROOM) std::memcpy(&x, from, sizeof(x));
  else std::memcpy(&x, from, count * sizeof(T));
  return x;
}

// to [dims, COLUMNS] = WIDTH keys' dims, column by column; zeros up to a whole register of dims.
template <typename T>
void widen_keys(const T* const* keys, int64_t dim, float* to) {
  struct Part {
    T numbers[WIDTH];
  };
  for (int64_t d = 0; d < dim; d += WIDTH) {
    Floats x[WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++)
      x[i] = d + WIDTH <= dim ? load_floats(keys[i] + d) : load_floats(load_part<Part>(keys[i] + d, dim - d).numbers);
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) store_floats(to + (d + i) * COLUMNS, x[i]);
  }
}

// Two dims of bfloat16 change places as one word.
template <>
void widen_keys(const bf16* const* keys, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += 2 * WIDTH, to += 2 * WIDTH * COLUMNS) {
    Words x[WIDTH];
    if (d + 2 * WIDTH <= dim)
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) std::memcpy(&x[i], keys[i] + d, sizeof(Words));
    else
      for (int i = 0; i < WIDTH; i++) x[i] = load_part<Words>(keys[i] + d, dim - d);
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) {
      store_floats(to + 2 * i * COLUMNS, bits_of<Floats>(x[i] << 16));
      store_floats(to + (2 * i + 1) * COLUMNS, bits_of<Floats>(x[i] & 0xFFFF0000u));
    }
  }
}

template <typename T>
class Widened {
 public:
  using Number = T;
  using Weight = float;
  static constexpr int64_t GROUP = 4 * MOST, STEP = std::max(COLUMNS, LANES);

  void begin(int64_t size) { dim = size, stride = sums_stride(size); }
  void end() {}

  void keep(int64_t row, const T* query) {
    for (int64_t d = 0; d < dim; d += LANES) store(queries + row * STRIDE + d, load_some(query + d, int(dim - d)));
  }

  void fetch(const T* const* from, const T* const* from_values, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH)
      widen_keys(from + i, dim, keys + i / COLUMNS * COLUMNS * stride + i % COLUMNS);
    fetch_values(from_values, count);
  }

  void fetch_values(const T* const* from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      int64_t d = 0;
      float* to = values + i * COLUMNS;
      for (; d + COLUMNS <= dim; d += COLUMNS, to += KEYS * COLUMNS) {
        store_floats(to, load_floats(from[i] + d));
        store_floats(to + WIDTH, load_floats(from[i] + d + WIDTH));
      }
      if (d == dim) continue;
      T rest[COLUMNS] = {};
      std::memcpy(rest, from[i] + d, (dim - d) * sizeof(T));
      store_floats(to, load_floats(rest)), store_floats(to + WIDTH, load_floats(rest + WIDTH));
    }
  }

  bool any_wild(int64_t first, int64_t last) const {
    Floats found{};  // zero times a number is zero
    for (int64_t panel = 0; panel < dim; panel += COLUMNS)
      for (int64_t i = first * COLUMNS; i < last * COLUMNS; i += WIDTH)
        found += load_floats(values + panel * KEYS + i) * 0.0f;
    bool wild = false;
    for (int i = 0; i < WIDTH; i++) wild |= found[i] != 0;
    return wild;
  }

  void score(int64_t low, int64_t high, int64_t count, float* scores) const {
    for (int64_t i = 0; i < count; i += COLUMNS)
      multiply_rows<STRIDE>(high - low, queries + low * STRIDE, keys + i * stride, dim, nullptr, scores + i, KEYS);
  }

  void add(const float* weights, const float* factors, int64_t first, int64_t last, int64_t count, float* sums) const {
    for (int64_t d = 0; d < dim; d += COLUMNS)
      multiply_rows<KEYS>(
          last - first, weights + first * KEYS, values + d * KEYS, count, factors + first, sums + first * stride + d,
          stride);
  }

 private:
  int64_t dim, stride;
  alignas(64) float queries[MOST_ROWS * STRIDE];  // [rows, STRIDE]
  alignas(64) float keys[KEYS * MOST_DIM];        // panels of [stride, COLUMNS]: by dim, then key
  alignas(64) float values[KEYS * MOST_DIM];      // panels of [KEYS, COLUMNS]: by key, then dim
};

}  // namespace

// Intel's processors do half as many products a cycle of bfloat16 as of floats, others twice as many: there
// prefill_attention, which multiplies pairs, stays.
template <typename T>
bool floats_attend(int64_t dim) {
#if GAPLESS_BF16_DOT
  if (std::is_same_v<T, bf16> && !__builtin_cpu_is("intel")) return false;
#endif
  return dim <= MOST_DIM;
}
template bool floats_attend<float>(int64_t);
template bool floats_attend<bf16>(int64_t);
template bool floats_attend<f16>(int64_t);

template <typename T, typename S>
void prefill_attention_floats(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out) {
  attend_prompts<Widened<T>>(q, batch, kv, attend, out);
}

#define GAPLESS_ATTENTION(T, S) \
  template void prefill_attention_floats(const Queries<T>&, const Batch&, const Paged<S>&, const Attend&, T*);
GAPLESS_EACH_KV(GAPLESS_ATTENTION)

}  // namespace gapless
