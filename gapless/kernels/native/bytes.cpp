// The product of bytes.h on any vector unit.
#include "bytes.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace gapless {

namespace {

constexpr int MOST_ROWS = 3;
// Inputs of a step: the two halves of a byte of nibbles.
constexpr int64_t STEP = 8;
// Rows from which on AMX is faster.
constexpr int64_t AMX_ROWS = 8;
// Least weights, times rows / 8, with a second thread.
constexpr int64_t WORTH = 1 << 19;
// Prefetch distance, and the least size that it pays for: smaller matrices are in a cache.
constexpr int64_t AHEAD = 8192, IN_MEMORY = 1 << 20;

// Registers of outputs whose sums are kept at a time.
constexpr int together(int rows) { return GAPLESS_AVX512 || rows == 1 ? TILE / WIDTH : rows == 2 ? 4 : 2; }

// Products of four bytes each, added to sums. `OFFSET` is what a weight's byte has too much in them; a nibble has none.
#if defined(__AVX512VNNI__) && GAPLESS_AVX512
constexpr int32_t OFFSET = MIDDLE;
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__) && !defined(GAPLESS_PLAIN)
constexpr int32_t OFFSET = MIDDLE;
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
}
#elif GAPLESS_AVX512
// Sums of two products have 16 bits: 128 x 127 twice fits, 255 x 127 twice would not.
constexpr int32_t OFFSET = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  __m512i size = (__m512i)w, factor = (__m512i)x;
  if constexpr (!NIBBLES) {
    const __m512i value = _mm512_xor_si512(size, _mm512_set1_epi8(char(MIDDLE)));
    size = _mm512_abs_epi8(value);
    factor = _mm512_mask_sub_epi8(factor, _mm512_movepi8_mask(value), _mm512_setzero_si512(), factor);
  }
  return sums + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(size, factor), _mm512_set1_epi16(1));
}
#elif GAPLESS_BYTES == 32
constexpr int32_t OFFSET = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  __m256i size = (__m256i)w, factor = (__m256i)x;
  if constexpr (!NIBBLES) {
    const __m256i value = _mm256_xor_si256(size, _mm256_set1_epi8(char(MIDDLE)));
    size = _mm256_abs_epi8(value);
    factor = _mm256_sign_epi8(factor, value);
  }
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(size, factor), _mm256_set1_epi16(1));
}
#elif defined(__ARM_NEON)
constexpr int32_t OFFSET = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  const int8x16_t value = bits_of<int8x16_t>(NIBBLES ? w : w ^ int32_t(0x80808080u)), factor = bits_of<int8x16_t>(x);
#ifdef __ARM_FEATURE_DOTPROD
  return (Ints)vdotq_s32((int32x4_t)sums, value, factor);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(value), vget_low_s8(factor)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(value), vget_high_s8(factor)));
  return sums + (Ints)vpaddq_s32(low, high);
#endif
}
#else
constexpr int32_t OFFSET = 0;
inline __m128i widened(__m128i bytes) { return _mm_srai_epi16(bytes, 8); }
template <bool NIBBLES>
inline Ints add_products(Ints sums, Ints w, Ints x) {
  const __m128i value = (__m128i)(NIBBLES ? w : w ^ int32_t(0x80808080u)), factor = (__m128i)x;
  const __m128i none = _mm_setzero_si128();
  const __m128 low = _mm_castsi128_ps(_mm_madd_epi16(
      widened(_mm_unpacklo_epi8(none, value)), widened(_mm_unpacklo_epi8(none, factor))));
  const __m128 high = _mm_castsi128_ps(_mm_madd_epi16(
      widened(_mm_unpackhi_epi8(none, value)), widened(_mm_unpackhi_epi8(none, factor))));
  return sums + (Ints)_mm_shuffle_ps(low, high, 0x88) + (Ints)_mm_shuffle_ps(low, high, 0xDD);
}
#endif

inline Ints four_of(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, sizeof(bytes));
  return Ints{} + bytes;
}

inline Ints load_ints(const uint8_t* from) {
  Ints w;
  std::memcpy(&w, from, sizeof(w));
  return w;
}

// ROWS rows by the outputs of WIDE registers from `first` on.
template <bool NIBBLES, typename Scale, bool ZEROS, int ROWS>
void multiply_some(const BytePart& part, int64_t first) {
  constexpr int WIDE = together(ROWS), CHAINS = ROWS == 1 && WIDE < 8 ? 2 : 1;  // a sum continues some cycles later
  constexpr int64_t DEEP = NIBBLES ? 4 * TILE : 8 * TILE;                       // bytes of a step
  const ByteForm& form = part.form;
  const int64_t unit = form.unit(), units = part.x.units, span = form.span() / unit, head = form.head();
  const int8_t* x = part.x.steps.data() + part.row * part.x.width;
  const uint8_t *at = part.tile, *zeros = nullptr;
  const Scale* scales = nullptr;
  Floats found[ROWS][WIDE] = {};
  for (int64_t u = 0, end = 0; u < units; u++) {
    if (u == end) {
      scales = reinterpret_cast<const Scale*>(at) + first, zeros = at + TILE * sizeof(Scale) + first;
      at += head, end += span;
    }
    Ints sums[CHAINS][ROWS][WIDE] = {};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const int32_t sum = part.x.sums[(part.row + r) * units + u];
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++)
        sums[0][r][v] = Ints{} - (ZEROS ? times(load_zeros(zeros + v * WIDTH), sum)
                                        : Ints{} + (NIBBLES ? MIDDLE_NIBBLE : OFFSET) * sum);
    }
    for (int64_t i = 0; i < unit; i += STEP, x += STEP, at += DEEP) {
#pragma GCC unroll 8
      for (int64_t line = 0; line < DEEP; line += 64) __builtin_prefetch(at + part.ahead + line);
      Ints four[2][ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
        four[0][r] = four_of(x + r * part.x.width), four[1][r] = four_of(x + r * part.x.width + 4);
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) {
        const uint8_t* from = at + 4 * (first + v * WIDTH);
        const Ints low = load_ints(from), high = NIBBLES ? low >> 4 : load_ints(from + 4 * TILE);
        const Ints w[2] = {NIBBLES ? low & 0x0F0F0F0F : low, NIBBLES ? high & 0x0F0F0F0F : high};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++) {
            Ints& sum = sums[half % CHAINS][r][v];
            sum = add_products<NIBBLES>(sum, w[half], four[half][r]);
          }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) {
        const Ints whole = CHAINS == 2 ? sums[0][r][v] + sums[CHAINS - 1][r][v] : sums[0][r][v];
        found[r][v] = add_unit(
            found[r][v], __builtin_convertvector(whole, Floats), load_floats(scales + v * WIDTH),
            part.x.scales[(part.row + r) * units + u]);
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) std::memcpy(part.results + r * TILE + first, found[r], sizeof(found[r]));
}

template <bool NIBBLES, typename Scale, bool ZEROS, int ROWS>
void multiply_tile(const BytePart& part) {
  for (int64_t first = 0; first < TILE; first += together(ROWS) * WIDTH)
    multiply_some<NIBBLES, Scale, ZEROS, ROWS>(part, first);
}

template <bool NIBBLES, typename Scale, bool ZEROS>
auto of_rows(int64_t rows) {
  static constexpr void (*all[MOST_ROWS])(const BytePart&) = {
      multiply_tile<NIBBLES, Scale, ZEROS, 1>, multiply_tile<NIBBLES, Scale, ZEROS, 2>,
      multiply_tile<NIBBLES, Scale, ZEROS, 3>};
  return all[rows - 1];
}

auto find(const ByteForm& form, int64_t rows) {
  if (!form.nibbles) return form.narrow ? of_rows<false, f16, false>(rows) : of_rows<false, float, false>(rows);
  if (form.zeros) return form.narrow ? of_rows<true, f16, true>(rows) : of_rows<true, float, true>(rows);
  return form.narrow ? of_rows<true, f16, false>(rows) : of_rows<true, float, false>(rows);
}

}  // namespace

void multiply_bytes(const BytePart& part, int64_t rows) {
  const int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t start = rows * pass / passes, end = rows * (pass + 1) / passes;
    find(part.form, end - start)(
        {part.form, part.x, part.row + start, part.tile, pass ? 0 : part.ahead, part.results + start * TILE});
  }
}

template <typename T>
void linear_bytes(
    const ByteForm& form, const T* x, int64_t x_stride, int64_t m, const uint8_t* packed, const T* bias, T* out,
    bool amx) {
  const Steps steps(form, x, x_stride, m);
  const int64_t tile = form.tile(), ahead = form.tiles() * tile > IN_MEMORY ? AHEAD : 0;
  const auto multiply = amx && m >= AMX_ROWS ? multiply_bytes_amx : multiply_bytes;
  share(form.tiles(), form.n * form.k * (m + 7) / 8 / WORTH, [&](int64_t index, bool last) {
    const int64_t first = index * TILE;
    alignas(64) float results[AMX_BLOCK * TILE];
    for (int64_t low = 0; low < m; low += AMX_BLOCK) {
      const int64_t rows = std::min(AMX_BLOCK, m - low);
      multiply({form, steps, low, packed + index * tile, low ? 0 : ahead, results}, rows);
      write_tile(
          results, rows, std::min(TILE, form.n - first), bias ? bias + first : nullptr, out + low * form.n + first,
          form.n);
    }
    if (last && multiply == multiply_bytes_amx) end_bytes_amx();
  });
}

template void linear_bytes(
    const ByteForm&, const float*, int64_t, int64_t, const uint8_t*, const float*, float*, bool);
template void linear_bytes(const ByteForm&, const bf16*, int64_t, int64_t, const uint8_t*, const bf16*, bf16*, bool);
template void linear_bytes(const ByteForm&, const f16*, int64_t, int64_t, const uint8_t*, const f16*, f16*, bool);

}  // namespace gapless
