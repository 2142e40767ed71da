// KV entries in fewer bits than the model's numbers, e4m3 and k8v4, as gapless/kernels/kv.py defines them.
#pragma once

#include <algorithm>
#include <limits>

#include "vec.h"

namespace gapless {

// A byte of a cache of e4m3: a sign, four bits of exponent with a bias of 7, three of mantissa. 0x7F is NaN.
struct e4m3 {
  uint8_t bits;
};

// A byte of a cache of k8v4: keys are e4m3, values nibbles.
struct k8v4 {
  uint8_t bits;
};

template <typename S>
constexpr bool FEWER = std::is_same_v<S, e4m3> || std::is_same_v<S, k8v4>;

// An entry of one head in a page of one layer: its key, `dim` bytes of e4m3, and its value: the same, or nibbles with a
// pair of float16, their scale and the least value. Byte j of nibbles has value j low, and value j + dim / 2 high.
template <typename S, typename Byte = const uint8_t>
struct Stored {
  Byte *key, *value, *pair;

  static constexpr bool NIBBLES = std::is_same_v<S, k8v4>;

  // Bytes of a page of one layer with `count` entries of one head.
  static int64_t page_bytes(int64_t count, int64_t dim) { return count * (NIBBLES ? dim / 2 * 3 + 4 : 2 * dim); }

  static Stored first(Byte* page, int64_t count, int64_t dim) {
    Byte* value = page + count * dim;
    return {page, value, NIBBLES ? value + count * (dim / 2) : nullptr};
  }

  Stored after(int64_t count, int64_t dim) const {
    return {key + count * dim, value + count * (NIBBLES ? dim / 2 : dim), NIBBLES ? pair + 4 * count : nullptr};
  }
};

// The first `count` of a register's numbers, then `rest`, which is one of them or zero.
template <typename T>
inline Floats load_few(const T* from, int64_t count, T rest = {}) {
  if (count >= WIDTH) return load_floats(from);
  T some[WIDTH];
  std::fill_n(some, WIDTH, rest);
  std::memcpy(some, from, count * sizeof(T));
  return load_floats(some);
}

template <typename T>
inline void store_few(T* to, Floats x, int64_t count) {
  if (count >= WIDTH) return store_floats(to, x);
  T some[WIDTH];
  store_floats(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

typedef uint8_t Bytes __attribute__((vector_size(GAPLESS_BYTES / 4)));

inline Words load_bytes(const uint8_t* from, int64_t count) {
  Bytes raw{};
  std::memcpy(&raw, from, std::min<int64_t>(count, WIDTH));
#if GAPLESS_AVX512  // the compiler's own conversion goes by halves
  return (Words)_mm512_cvtepu8_epi32((__m128i)raw);
#else
  return __builtin_convertvector(raw, Words);
#endif
}

inline void store_bytes(uint8_t* to, Words x, int64_t count) {
  const Bytes raw = __builtin_convertvector(x, Bytes);
  std::memcpy(to, &raw, std::min<int64_t>(count, WIDTH));
}

inline Floats from_e4m3(Words x) {
  const Words size = x & 0x7F;
  // Without a denormal number, which the thread may flush to zero.
  const Floats small = __builtin_convertvector(bits_of<Ints>(size), Floats) * 0x1p-9f;
  Floats found = pick(Ints(size < 8), small, bits_of<Floats>((size << 20) + (120u << 23)));
  found = pick(Ints(size == 0x7F), spread(std::numeric_limits<float>::quiet_NaN()), found);
  return bits_of<Floats>(bits_of<Words>(found) | (x & 0x80) << 24);
}

// To nearest, ties to even, at most 448 in size; a NaN stays one.
inline Words to_e4m3(Floats x) {
  const Words bits = bits_of<Words>(x), sign = bits & 0x80000000u;
  Floats size = bits_of<Floats>(bits ^ sign);
  const Words is_nan = bits_of<Words>(size != size);
  size = pick(more(size, spread(448.0f)), spread(448.0f), size);
  const Words whole = bits_of<Words>(size);
  const Words normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120u << 3);
  // Below 2^-6, adding 2^14 rounds to multiples of 2^-9.
  const Words small = bits_of<Words>(size + 16384.0f) - bits_of<uint32_t>(16384.0f);
  const Words is_small = bits_of<Words>(size < 0x1p-6f);
  return (((small & is_small) | (normal & ~is_small)) & ~is_nan) | (is_nan & 0x7F) | sign >> 24;
}

// Numbers [dim] as e4m3, divided by the scale.
template <typename T>
void pack_e4m3(const T* from, int64_t dim, float scale, uint8_t* to) {
  for (int64_t d = 0; d < dim; d += WIDTH)
    store_bytes(to + d, to_e4m3(load_few(from + d, dim - d) / scale), dim - d);
}

// Numbers [dim] as nibbles with their pair.
template <typename T>
void pack_nibbles(const T* from, int64_t dim, uint8_t* to, uint8_t* to_pair) {
  constexpr float MOST = 65504;  // of float16
  Floats low = spread(to_float(from[0])), high = low;
  Ints wild{};
  for (int64_t d = 0; d < dim; d += WIDTH) {
    const Floats x = load_few(from + d, dim - d, from[0]);
    low = pick(more(low, x), x, low), high = max(x, high), wild |= x != x;
  }
  float least = low[0], most = high[0];
  for (int i = 0; i < WIDTH; i++) {
    least = std::min(least, low[i]), most = std::max(most, high[i]);
    if (wild[i]) least = most = std::numeric_limits<float>::quiet_NaN();
  }
  f16 pair[2];
  assign(pair[0], std::clamp((most - least) / 15, -MOST, MOST)), assign(pair[1], std::clamp(least, -MOST, MOST));
  std::memcpy(to_pair, pair, sizeof(pair));
  const float scale = to_float(pair[0]);
  auto nibbles = [&](int64_t d, int64_t count) {
    constexpr float WHOLE = 0x1p23f;  // adding it rounds to a whole number
    Floats x = (load_few(from + d, count) - to_float(pair[1])) / scale;
    x = pick(more(x, Floats{}), x, Floats{});
    return bits_of<Words>(pick(more(x, spread(15)), spread(15), x) + WHOLE) - bits_of<uint32_t>(WHOLE);
  };
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d += WIDTH) {
    const Words x = scale > 0 ? nibbles(d, half - d) | nibbles(half + d, half - d) << 4 : Words{};
    store_bytes(to + d, x, half - d);
  }
}

// e4m3 [dim] as numbers; `to` has room for whole 32 of them.
template <typename T>
void unpack_e4m3(const uint8_t* from, int64_t dim, T* to) {
  for (int64_t d = 0; d < dim; d += WIDTH) store_floats(to + d, from_e4m3(load_bytes(from + d, dim - d)));
}

// Nibbles [dim / 2] as numbers [dim].
template <typename T>
void unpack_nibbles(const uint8_t* from, const uint8_t* from_pair, int64_t dim, T* to) {
  f16 pair[2];
  std::memcpy(pair, from_pair, sizeof(pair));
  const float scale = to_float(pair[0]), least = to_float(pair[1]);
  auto number = [&](Words x) { return __builtin_convertvector(bits_of<Ints>(x), Floats) * scale + least; };
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d += WIDTH) {
    const Words x = load_bytes(from + d, half - d);
    store_few(to + d, number(x & 15), half - d), store_few(to + half + d, number(x >> 4), half - d);
  }
}

#if GAPLESS_AVX512
inline __m256i load_32(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m256i load_less(const uint8_t* from, int64_t count) {
  return _mm512_castsi512_si256(_mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, from));
}

template <>
inline void unpack_e4m3(const uint8_t* from, int64_t dim, bf16* to) {
  // By the low five bits: m * 2^-9 for the denormal numbers, and NaN.
  alignas(64) static constexpr uint16_t RARE[] = {
      0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60, 0, 0, 0, 0, 0, 0, 0, 0,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7FC0};
  const __m512i table = _mm512_load_si512(RARE);
  const __m512i sizes = _mm512_set1_epi16(0x07F0), bias = _mm512_set1_epi16(120 << 7);
  const __m512i least = _mm512_set1_epi16(-0x80), beyond = _mm512_set1_epi16(0x770), sign = _mm512_set1_epi16(-0x8000);
  auto one = [&](int64_t d, __m256i bytes) __attribute__((always_inline)) {
    const __m512i x = _mm512_cvtepi8_epi16(bytes);  // with copies of the sign above
    const __m512i size = _mm512_and_si512(_mm512_slli_epi16(x, 4), sizes);
    const __mmask32 is_rare = _mm512_cmpge_epu16_mask(_mm512_add_epi16(size, least), beyond);
    const __m512i found = _mm512_mask_permutexvar_epi16(_mm512_add_epi16(size, bias), is_rare, x, table);
    _mm512_storeu_si512(to + d, _mm512_ternarylogic_epi32(sign, x, found, 0xCA));  // sign ? x : found, bit by bit
  };
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) one(d, load_32(from + d));
  if (d < dim) one(d, load_less(from + d, dim - d));
}

// By a table of the sixteen values.
template <>
inline void unpack_nibbles(const uint8_t* from, const uint8_t* from_pair, int64_t dim, bf16* to) {
  f16 pair[2];
  std::memcpy(pair, from_pair, sizeof(pair));
  const Floats levels = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Floats values = levels * to_float(pair[0]) + to_float(pair[1]);
#if GAPLESS_BF16_DOT
  const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)values);
#else
  const __m256i halves = _mm512_cvtepi32_epi16((__m512i)(rounded(values) >> 16));
#endif
  const __m512i table = _mm512_broadcast_i64x4(halves);
  const int64_t half = dim / 2;
  int64_t d = 0;
  for (; d + 32 <= half; d += 32) {
    const __m512i x = _mm512_cvtepu8_epi16(load_32(from + d));
    _mm512_storeu_si512(to + d, _mm512_permutexvar_epi16(x, table));
    _mm512_storeu_si512(to + half + d, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), table));
  }
  if (d == half) return;
  const __m512i x = _mm512_cvtepu8_epi16(load_less(from + d, half - d));
  const __mmask32 some = (1u << (half - d)) - 1;
  _mm512_mask_storeu_epi16(to + d, some, _mm512_permutexvar_epi16(x, table));
  _mm512_mask_storeu_epi16(to + half + d, some, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), table));
}
#endif

// The key and the value of an entry as numbers, divided by the layer's scales as they are stored. A value of k8v4 is
// rounded to T. Each has room for whole 32 numbers.
template <typename S, typename T>
inline void unpack(const Stored<S>& entry, int64_t dim, T* key, T* value) {
  unpack_e4m3(entry.key, dim, key);
  if constexpr (Stored<S>::NIBBLES) unpack_nibbles(entry.value, entry.pair, dim, value);
  else unpack_e4m3(entry.value, dim, value);
}

}  // namespace gapless
