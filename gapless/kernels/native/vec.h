// Sixteen floats at a time, by the compiler's own vector types: AVX-512 where it is there, narrower code elsewhere.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "variant.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && !defined(GAPLESS_PLAIN)
#define GAPLESS_BF16_DOT 1
#else
#define GAPLESS_BF16_DOT 0
#endif

namespace gapless {

struct bf16 {
  uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline f32x16 all(float x) { return f32x16{} + x; }

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
#ifdef __AVX512F__  // the compiler's own conversion goes by halves
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
  u32x16 is_nan = bits_of<u32x16>(x != x);
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
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return total + x[0];
#endif
}

inline float largest(f32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x to about one unit in the last place; 0 below -87, and x is taken as 88 above it. NaN gives NaN.
inline f32x16 exp(f32x16 x) {
  f32x16 low = all(-87.3f), high = all(88.3f);
  f32x16 y = x < low ? low : x;
  y = y > high ? high : y;
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
  return x < all(-87.3f) ? f32x16{} : result;
}

}  // namespace gapless
