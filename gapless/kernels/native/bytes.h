// x @ weight.T + bias over a weight in 8 or 4 bits, by sums of whole numbers.
//
// A row of x is rounded to 127 steps either way of the largest of each unit, 32 or 64 inputs. A unit's sum of products
// is a whole number, the same in any order; float32 adds the units' sums, each times its two scales, in the order of
// the inputs. So a row's bits depend neither on the rows beside it, nor on threads, nor on whether AMX multiplies.
//
// Packed: tiles of 64 outputs (the last one is filled up), one stream of memory each. For each span of inputs with one
// scale a tile has 64 scales, 64 zeros if the weight has some, and the weights: bytes [inputs / 4][64][4], 128 more
// than their value, or nibbles [inputs / 8][64][4], whose low halves are the first four inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"

namespace gapless {

constexpr int32_t MIDDLE = 128;       // a zero of a weight in bytes
constexpr int32_t MIDDLE_NIBBLE = 8;  // of one in nibbles without zeros of its own

struct ByteForm {
  int64_t n, k;
  int64_t group;  // inputs that share a scale, a multiple of 32; 0 for all
  bool nibbles;
  bool narrow;  // scales are float16, else float32
  bool zeros;

  int64_t unit() const { return group % 64 ? 32 : 64; }
  int64_t width() const { return round_up(k, unit()); }
  int64_t units() const { return width() / unit(); }
  int64_t span() const { return group ? std::min(group, width()) : width(); }
  int64_t head() const { return TILE * (narrow ? sizeof(f16) : sizeof(float)) + (zeros ? TILE : 0); }
  int64_t bytes(int64_t inputs) const { return TILE * inputs / (nibbles ? 2 : 1); }
  int64_t tile() const { return (width() + span() - 1) / span() * head() + bytes(width()); }
  int64_t tiles() const { return (n + TILE - 1) / TILE; }
};

// `weight` int8 [n, k], or nibbles as in matrix.py [n, k / 2]; `scales` [n, groups]; `zeros` [n, groups] or null.
void pack_bytes(
    const ByteForm& form, const uint8_t* weight, const float* scales, const uint8_t* zeros, uint8_t* packed);

// Rows of x in whole numbers. For each unit, `scales` has the value of one step, NaN if an input is not finite; `sums`
// adds the steps up.
struct Steps {
  int64_t m, width, units;
  std::vector<int8_t> steps;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  template <typename T>
  Steps(const ByteForm& form, const T* x, int64_t stride, int64_t m);
};

// Some rows of x by one tile: results [rows, TILE], without the bias.
struct BytePart {
  const ByteForm& form;
  const Steps& x;
  int64_t row;
  const uint8_t* tile;
  int64_t ahead;  // bytes from what is multiplied to what is asked of memory
  float* results;
};

// On any vector unit; any number of rows.
void multiply_bytes(const BytePart& part, int64_t rows);

// The same where AMX serves (amx.h), for up to AMX_BLOCK rows; `end_bytes_amx` comes after the last call of a thread.
constexpr int64_t AMX_BLOCK = 32;
void multiply_bytes_amx(const BytePart& part, int64_t rows);
void end_bytes_amx();

// x [m, k] with rows `x_stride` apart; out [m, n]. `amx`: whether AMX serves.
template <typename T>
void linear_bytes(
    const ByteForm& form, const T* x, int64_t x_stride, int64_t m, const uint8_t* packed, const T* bias, T* out,
    bool amx);

// The sum of a unit, times its scales, added to what was found before. Every way computes it here.
inline Floats add_unit(Floats found, Floats sums, Floats scale, float x_scale) {
  return found + sums * scale * x_scale;
}

// Whole numbers of 16 bits times one.
inline Ints times(Ints a, int32_t b) {
#if GAPLESS_AVX512
  return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif GAPLESS_BYTES == 32
  return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
  return a * b;
#endif
}

// The zeros of a register of outputs.
inline Ints load_zeros(const uint8_t* from) {
#if GAPLESS_AVX512
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Narrow __attribute__((vector_size(WIDTH)));
  Narrow raw;
  std::memcpy(&raw, from, sizeof(raw));
  return __builtin_convertvector(raw, Ints);
#endif
}

}  // namespace gapless
