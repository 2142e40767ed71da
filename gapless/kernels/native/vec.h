// Sixteen floats at a time, by the compiler's own vector types: AVX-512 where it is there, narrower code elsewhere.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "variant.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(GAPLESS_PLAIN)
#define GAPLESS_AVX512 1
#else
#define GAPLESS_AVX512 0
#endif
#if GAPLESS_AVX512
#define GAPLESS_BYTES 64
#elif defined(__AVX2__)
#define GAPLESS_BYTES 32
#else
#define GAPLESS_BYTES 16
#endif
#if defined(__AVX512BF16__) && GAPLESS_AVX512
#define GAPLESS_BF16_DOT 1
#else
#define GAPLESS_BF16_DOT 0
#endif
#if defined(__AVX512VNNI__) && GAPLESS_AVX512
#define GAPLESS_BYTE_DOT 1
#else
#define GAPLESS_BYTE_DOT 0
#endif

namespace gapless {

struct bf16 {
  uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64s __attribute__((vector_size(GAPLESS_BYTES)));  // as many as the processor takes
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline f32x16 all(float x) { return f32x16{} + x; }
inline u32x16 all(uint32_t x) { return u32x16{} + x; }

// Comparisons and choices. GCC does those of vectors wider than the processor's lane by lane, so it gets them in parts.
template <typename Lane, typename Vector, typename Compare>
inline i32x16 compared(Vector a, Vector b, const Compare& compare) {
  constexpr int PARTS = sizeof(Vector) / GAPLESS_BYTES;
  typedef Lane Part __attribute__((vector_size(GAPLESS_BYTES)));
  Part x[PARTS], y[PARTS];
  std::memcpy(x, &a, sizeof(a)), std::memcpy(y, &b, sizeof(b));
  decltype(compare(x[0], y[0])) found[PARTS];
  for (int i = 0; i < PARTS; i++) found[i] = compare(x[i], y[i]);
  return bits_of<i32x16>(found);
}

inline i32x16 more(f32x16 a, f32x16 b) {
  return compared<float>(a, b, [](auto x, auto y) { return x > y; });
}
inline i32x16 more(u32x16 a, u32x16 b) {
  return compared<uint32_t>(a, b, [](auto x, auto y) { return x > y; });
}
inline i32x16 same(f32x16 a, f32x16 b) {
  return compared<float>(a, b, [](auto x, auto y) { return x == y; });
}
inline i32x16 same(u32x16 a, u32x16 b) {
  return compared<uint32_t>(a, b, [](auto x, auto y) { return x == y; });
}

inline f32x16 pick(i32x16 mask, f32x16 a, f32x16 b) {
#if GAPLESS_AVX512
  return mask ? a : b;
#else
  return bits_of<f32x16>((mask & bits_of<i32x16>(a)) | (~mask & bits_of<i32x16>(b)));
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }

inline void assign(float& to, float x) { to = x; }

// Round to nearest even; a NaN stays one.
inline void assign(bf16& to, float x) {
  uint32_t bits = bits_of<uint32_t>(x);
  to.bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline f32x16 load(const float* from) {
  f32x16 x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline f32x16 load(const bf16* from) {
#if GAPLESS_AVX512  // the compiler's own conversion goes by halves
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return (f32x16)_mm512_slli_epi32(wide, 16);
#else
  u16x16 raw;
  std::memcpy(&raw, from, sizeof(raw));
  return bits_of<f32x16>(__builtin_convertvector(raw, u32x16) << 16);
#endif
}

inline void store(float* to, f32x16 x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(bf16* to, f32x16 x) {
#if GAPLESS_BF16_DOT
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  u32x16 bits = bits_of<u32x16>(x);
  u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  u32x16 is_nan = bits_of<u32x16>(~same(x, x));
  u16x16 out = __builtin_convertvector((rounded & ~is_nan) | (0x7FC0 & is_nan), u16x16);
  std::memcpy(to, &out, sizeof(out));
#endif
}

// The first `count` of sixteen; the rest read as zero and are not touched.
template <typename T>
inline f32x16 load_some(const T* from, int count) {
  if (count >= LANES) return load(from);
  T some[LANES] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

template <typename T>
inline void store_some(T* to, f32x16 x, int count) {
  if (count >= LANES) return store(to, x);
  T some[LANES];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

inline float sum(f32x16 x) {
#if GAPLESS_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return total + x[0];
#endif
}

inline float largest(f32x16 x) {
#if GAPLESS_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return pick(more(a, b), a, b); }

inline bool any(i32x16 mask) {
#if GAPLESS_AVX512
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  int32_t found = 0;
  for (int lane = 0; lane < LANES; lane++) found |= mask[lane];
  return found;
#endif
}

// Puts the chosen lanes one after the other; returns how many. May write all of sixteen.
inline int compress(float* to, f32x16 x, i32x16 chosen) {
#if GAPLESS_AVX512
  __mmask16 mask = _mm512_test_epi32_mask((__m512i)chosen, (__m512i)chosen);
  store(to, (f32x16)_mm512_maskz_compress_ps(mask, (__m512)x));
  return __builtin_popcount(mask);
#else
  int count = 0;
  if (!any(chosen)) return 0;
  for (int lane = 0; lane < LANES; lane++)
    if (chosen[lane]) to[count++] = x[lane];
  return count;
#endif
}

// Whole numbers in the order of the floats; a zero has two signs, and they are equal.
inline u32x16 keys(f32x16 x) {
  u32x16 bits = bits_of<u32x16>(x + 0.0f);
  return bits ^ (bits_of<u32x16>(bits_of<i32x16>(bits) >> 31) | 0x80000000u);
}

inline float of_key(uint32_t key) { return bits_of<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Which of sixteen places from `first` on come no later than `last`.
inline i32x16 upto(int64_t last, int64_t first) {
  const i32x16 lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#if GAPLESS_AVX512
  return lanes <= int32_t(last - first);
#else
  return (lanes - 1 - int32_t(last - first)) >> 31;
#endif
}

// e^x to about one unit in the last place; 0 below -87, and x is taken as 88 above it. NaN gives NaN.
inline f32x16 exp(f32x16 x) {
  f32x16 low = all(-87.3f), high = all(88.3f);
  f32x16 y = pick(more(low, x), low, x);
  y = pick(more(y, high), high, y);
  // Adding and taking away 1.5 * 2^23 rounds to a whole number.
  f32x16 n = y * 1.44269504088896341f + 12582912.0f - 12582912.0f;
  f32x16 r = y - n * 0.693359375f - n * -2.12194440e-4f;
  f32x16 p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x16 power = __builtin_convertvector(n, i32x16);
  f32x16 result = p * bits_of<f32x16>((power + 127) << 23);
  return pick(more(low, x), f32x16{}, result);
}

}  // namespace gapless
