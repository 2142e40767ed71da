// Vectors by the compiler's own vector types: AVX-512, AVX2, NEON, or SSE2, whichever the compiler's flags allow.
//
// `Floats` are what one register holds. f32x16 are sixteen floats: one such register, or some of them together.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
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
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(GAPLESS_PLAIN)
#define GAPLESS_NEON_BF16 1
#else
#define GAPLESS_NEON_BF16 0
#endif

namespace gapless {

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

constexpr int LANES = 16;
constexpr int WIDTH = GAPLESS_BYTES / 4, PARTS = LANES / WIDTH;

// The compiler's flags chose it; the baseline of x86-64 is sse2.
#if GAPLESS_AVX512
constexpr const char* VECTOR_UNIT = "avx512";
#elif GAPLESS_BYTES == 32
constexpr const char* VECTOR_UNIT = "avx2";
#elif defined(__ARM_NEON)
constexpr const char* VECTOR_UNIT = "neon";
#else
constexpr const char* VECTOR_UNIT = "sse2";
#endif

typedef float Floats __attribute__((vector_size(GAPLESS_BYTES)));
typedef int32_t Ints __attribute__((vector_size(GAPLESS_BYTES)));
typedef uint32_t Words __attribute__((vector_size(GAPLESS_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(GAPLESS_BYTES / 2)));
typedef uint64_t u64s __attribute__((vector_size(GAPLESS_BYTES)));

template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

#if GAPLESS_AVX512

typedef Floats f32x16;
typedef Ints i32x16;
typedef Words u32x16;

// body(register) of each register of x.
template <typename Body, typename... Vectors>
inline auto each(const Body& body, Vectors... x) {
  return body(x...);
}

#else

// GCC computes with vectors wider than a register, but keeps none of them in registers.
template <typename Lane>
struct Sixteen {
  typedef Lane Part __attribute__((vector_size(GAPLESS_BYTES)));
  Part parts[PARTS];

  Lane operator[](int i) const { return parts[i / WIDTH][i % WIDTH]; }
};

typedef Sixteen<float> f32x16;
typedef Sixteen<int32_t> i32x16;
typedef Sixteen<uint32_t> u32x16;

inline float lane_of(Floats) { return 0; }
inline int32_t lane_of(Ints) { return 0; }
inline uint32_t lane_of(Words) { return 0; }

template <typename Body, typename... Lanes>
inline auto each(const Body& body, const Sixteen<Lanes>&... x) {
  Sixteen<decltype(lane_of(body(x.parts[0]...)))> to;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) to.parts[i] = body(x.parts[i]...);
  return to;
}

#define GAPLESS_OPERATOR(OP)                                                                  \
  template <typename Lane>                                                                    \
  inline Sixteen<Lane> operator OP(const Sixteen<Lane>& a, const Sixteen<Lane>& b) {          \
    return each([](auto x, auto y) { return x OP y; }, a, b);                                 \
  }                                                                                           \
  template <typename Lane>                                                                    \
  inline Sixteen<Lane> operator OP(const Sixteen<Lane>& a, std::type_identity_t<Lane> b) {    \
    return each([b](auto x) { return x OP b; }, a);                                           \
  }                                                                                           \
  template <typename Lane>                                                                    \
  inline Sixteen<Lane> operator OP(std::type_identity_t<Lane> a, const Sixteen<Lane>& b) {    \
    return each([a](auto y) { return a OP y; }, b);                                           \
  }                                                                                           \
  template <typename Lane, typename Other>                                                    \
  inline Sixteen<Lane>& operator OP##=(Sixteen<Lane>& a, const Other& b) {                    \
    return a = a OP b;                                                                        \
  }
GAPLESS_OPERATOR(+)
GAPLESS_OPERATOR(-)
GAPLESS_OPERATOR(*)
GAPLESS_OPERATOR(/)
GAPLESS_OPERATOR(&)
GAPLESS_OPERATOR(|)
GAPLESS_OPERATOR(^)
GAPLESS_OPERATOR(<<)
GAPLESS_OPERATOR(>>)
#undef GAPLESS_OPERATOR

template <typename Lane>
inline Sixteen<Lane> operator~(const Sixteen<Lane>& a) {
  return each([](auto x) { return ~x; }, a);
}
template <typename Lane>
inline Sixteen<Lane> operator-(const Sixteen<Lane>& a) {
  return each([](auto x) { return -x; }, a);
}

#endif

// Taking zero away changes no number, and costs nothing; adding it would turn -0 into 0.
inline Floats spread(float x) { return x - Floats{}; }
inline f32x16 all(float x) { return x - f32x16{}; }
inline u32x16 all(uint32_t x) { return u32x16{} + x; }

// Comparisons and choices, of Floats too. `-1` is true.
inline Ints more(Floats a, Floats b) { return a > b; }
inline Ints same(Floats a, Floats b) { return a == b; }
inline Floats pick(Ints mask, Floats a, Floats b) { return mask ? a : b; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline i32x16 more(u32x16 a, u32x16 b) {
  return each([](auto x, auto y) { return Ints(x > y); }, a, b);
}
inline i32x16 same(u32x16 a, u32x16 b) {
  return each([](auto x, auto y) { return Ints(x == y); }, a, b);
}
#if !GAPLESS_AVX512
inline i32x16 more(const f32x16& a, const f32x16& b) {
  return each([](auto x, auto y) { return more(x, y); }, a, b);
}
inline i32x16 same(const f32x16& a, const f32x16& b) {
  return each([](auto x, auto y) { return same(x, y); }, a, b);
}
inline f32x16 pick(const i32x16& mask, const f32x16& a, const f32x16& b) {
  return each([](auto m, auto x, auto y) { return pick(m, x, y); }, mask, a, b);
}
inline f32x16 max(const f32x16& a, const f32x16& b) {
  return each([](auto x, auto y) { return max(x, y); }, a, b);
}
#endif

// Whole numbers as floats.
template <typename Whole>
inline f32x16 to_floats(Whole x) {
  return each([](auto part) { return __builtin_convertvector(part, Floats); }, x);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }

inline void assign(float& to, float x) { to = x; }

// Round to nearest even; a NaN stays one.
inline void assign(bf16& to, float x) {
  uint32_t bits = bits_of<uint32_t>(x);
  to.bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)
inline float to_float(f16 x) { return _cvtsh_ss(x.bits); }
inline void assign(f16& to, float x) { to.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
inline float to_float(f16 x) { return float(bits_of<__fp16>(x.bits)); }
inline void assign(f16& to, float x) { to.bits = bits_of<uint16_t>(__fp16(x)); }
#else
// By F. Giesen's tables of cases ("half_to_float_fast5", "float_to_half_fast3_rtne"), without the tables.
inline float to_float(f16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7FFF) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
  const float scaled = bits_of<float>(magnitude) * 0x1p112f;  // rebiases the exponent, also of a denormal number
  const uint32_t bits = magnitude >= 0x7C00u << 13 ? magnitude | 0xFFu << 23 : bits_of<uint32_t>(scaled);
  return bits_of<float>(bits | sign);
}
inline void assign(f16& to, float x) {
  const uint32_t sign = bits_of<uint32_t>(x) & 0x80000000u, bits = bits_of<uint32_t>(x) ^ sign;
  uint32_t half;
  if (bits >= 143u << 23) half = bits > 0xFFu << 23 ? 0x7E00 : 0x7C00;  // NaN; too large, or infinite
  else if (bits < 113u << 23) half = bits_of<uint32_t>(bits_of<float>(bits) + 0.5f) - (126u << 23);
  else half = (bits + (uint32_t(15 - 127) << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
  to.bits = uint16_t(half | sign >> 16);
}
#endif

// A register of numbers.
inline Floats load_floats(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Floats load_floats(const bf16* from) {
#if GAPLESS_AVX512  // the compiler's own conversion goes by halves
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return (Floats)_mm512_slli_epi32(wide, 16);
#else
  Halves raw;
  std::memcpy(&raw, from, sizeof(raw));
  return bits_of<Floats>(__builtin_convertvector(raw, Words) << 16);
#endif
}

inline Floats load_floats(const f16* from) {
#if GAPLESS_AVX512
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif GAPLESS_BYTES == 32 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats x;
  for (int i = 0; i < WIDTH; i++) x[i] = to_float(from[i]);
  return x;
#endif
}

inline void store_floats(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

// The bits of bfloat16 in the upper halves; what the lower ones hold means nothing.
inline Words rounded(Floats x) {
  Words bits = bits_of<Words>(x), is_nan = bits_of<Words>(x != x);
  return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~is_nan) | (0x7FC00000u & is_nan);
}

inline void store_floats(bf16* to, Floats x) {
#if GAPLESS_BF16_DOT
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  Halves out = __builtin_convertvector(rounded(x) >> 16, Halves);
  std::memcpy(to, &out, sizeof(out));
#endif
}

inline void store_floats(f16* to, Floats x) {
#if GAPLESS_AVX512
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif GAPLESS_BYTES == 32 && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < WIDTH; i++) assign(to[i], x[i]);
#endif
}

// Two registers of numbers that lie together. Their order is that of their type: the even ones of bfloat16 come first,
// which costs least.
struct Two {
  Floats a, b;
};

template <typename T>
inline Two load_two(const T* from) {
  return {load_floats(from), load_floats(from + WIDTH)};
}

template <>
inline Two load_two(const bf16* from) {
  Words raw;
  std::memcpy(&raw, from, sizeof(raw));
  return {bits_of<Floats>(raw << 16), bits_of<Floats>(raw & 0xFFFF0000u)};
}

template <typename T>
inline void store_two(T* to, const Two& x) {
  store_floats(to, x.a), store_floats(to + WIDTH, x.b);
}

template <>
inline void store_two(bf16* to, const Two& x) {
  Words raw = (rounded(x.a) >> 16) | (rounded(x.b) & 0xFFFF0000u);
  std::memcpy(to, &raw, sizeof(raw));
}

#if GAPLESS_AVX512
template <typename T>
inline f32x16 load(const T* from) {
  return load_floats(from);
}
template <typename T>
inline void store(T* to, f32x16 x) {
  store_floats(to, x);
}
#else
template <typename T>
inline f32x16 load(const T* from) {
  f32x16 x;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) x.parts[i] = load_floats(from + i * WIDTH);
  return x;
}
template <typename T>
inline void store(T* to, const f32x16& x) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) store_floats(to + i * WIDTH, x.parts[i]);
}
#endif

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

// Sums, maxima and tests over all lanes.
#if GAPLESS_AVX512
inline float sum(f32x16 x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(f32x16 x) { return _mm512_reduce_max_ps((__m512)x); }
inline bool any(i32x16 mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }
#else
template <typename Join>
inline float folded(const f32x16& x, const Join& join) {
  Floats whole = x.parts[0];
  for (int i = 1; i < PARTS; i++) whole = join(whole, x.parts[i]);
  float lanes[WIDTH];
  store_floats(lanes, whole);
  for (int width = WIDTH / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = join(lanes[i], lanes[i + width]);
  return lanes[0];
}
inline float sum(const f32x16& x) {
  return folded(x, [](auto a, auto b) { return a + b; });
}
inline float largest(const f32x16& x) {
  return folded(x, [](auto a, auto b) { return a > b ? a : b; });
}
inline bool any(const i32x16& mask) {
  Ints found = mask.parts[0];
  for (int i = 1; i < PARTS; i++) found |= mask.parts[i];
  u64s wide = bits_of<u64s>(found);
  uint64_t bits = 0;
  for (int i = 0; i < WIDTH / 2; i++) bits |= wide[i];
  return bits;
}
#endif

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
  alignas(64) static constexpr int32_t PLACES[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (bits_of<i32x16>(PLACES) - 1 - int32_t(last - first)) >> 31;
}

// e^x to about one unit in the last place; 0 below -87, and x is taken as 88 above it. NaN gives NaN.
inline Floats exp(Floats x) {
  const Floats low = spread(-87.3f), high = spread(88.3f);
  Floats y = pick(more(low, x), low, x);
  y = pick(more(y, high), high, y);
  // Adding and taking away 1.5 * 2^23 rounds to a whole number.
  Floats n = y * 1.44269504088896341f + 12582912.0f - 12582912.0f;
  Floats r = y - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints power = __builtin_convertvector(n, Ints);
  Floats result = p * bits_of<Floats>((power + 127) << 23);
  return pick(more(low, x), Floats{}, result);
}

// Within about two units in the last place; NaN gives NaN. Below 0.625 by the polynomial of Cephes (S. Moshier).
inline Floats tanh(Floats x) {
  const Floats size = max(x, -x), square = x * x;
  Floats p = spread(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Floats far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return pick(more(size, spread(0.625f)), pick(more(Floats{}, x), -far, far), p * square * x + x);
}

#if !GAPLESS_AVX512
inline f32x16 exp(const f32x16& x) {
  return each([](auto part) { return exp(part); }, x);
}
inline f32x16 tanh(const f32x16& x) {
  return each([](auto part) { return tanh(part); }, x);
}
#endif

}  // namespace gapless
