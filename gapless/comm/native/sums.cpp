#include "sums.h"

#include <stdexcept>

#include "../../kernels/native/norm.h"  // so that the bits of a norm are the kernels' own

namespace gapless {
namespace {

// Calls body(null pointer of the type) for a kind of floats.
template <typename Body>
void by_kind(Kind kind, const Body& body) {
  if (kind == FLOAT) return body(static_cast<float*>(nullptr));
  if (kind == BFLOAT16) return body(static_cast<bf16*>(nullptr));
  if (kind == HALF) return body(static_cast<f16*>(nullptr));
  throw std::logic_error("not a kind of floats");
}

// Sixteen of the sums, or `count` of them. The compiler must not know which part is the caller's own: all ranks run the
// same additions.
template <typename T>
inline f32x16 sum_some(const T* const* parts, int world, int64_t at, int count) {
  f32x16 sum = load_some(parts[0] + at, count);
  for (int rank = 1; rank < world; ++rank) sum = sum + load_some(parts[rank] + at, count);
  return sum;
}

template <typename T>
inline f32x16 round_to(f32x16 x) {
  if constexpr (std::is_same_v<T, float>) return x;
  T some[LANES];
  store(some, x);
  return load(static_cast<const T*>(some));
}

void sum_longs(const int64_t* const* parts, int world, int64_t count, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t sum = 0;  // wraps around as torch's sums do
    for (int rank = 0; rank < world; ++rank) sum += uint64_t(parts[rank][i]);
    out[i] = int64_t(sum);
  }
}

template <typename T>
void sum_floats(const T* const* parts, int world, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, sum_some(parts, world, i, LANES));
  if (i < count) store_some(out + i, sum_some(parts, world, i, int(count - i)), int(count - i));
}

template <typename T>
void add_sums(const T* const* parts, int world, int64_t begin, int64_t size, T* x) {
  for (int64_t i = 0; i < size; i += LANES) {
    const int count = size - i < LANES ? int(size - i) : LANES;
    store_some(x + i, load_some(x + i, count) + round_to<T>(sum_some(parts, world, begin + i, count)), count);
  }
}

}  // namespace

void sum_parts(const void* const* parts, int world, int64_t count, Kind kind, void* out) {
  if (kind == LONG)
    return sum_longs(reinterpret_cast<const int64_t* const*>(parts), world, count, static_cast<int64_t*>(out));
  by_kind(kind, [&]<typename T>(T*) {
    sum_floats(reinterpret_cast<const T* const*>(parts), world, count, static_cast<T*>(out));
  });
}

void sum_and_norm(
    const void* const* parts, int world, int64_t rows, int64_t size, Kind kind, Commons::Norm norm, void* x,
    void* out) {
  by_kind(kind, [&]<typename T>(T*) {
    for (int64_t row = 0; row < rows; ++row) {
      T* to = static_cast<T*>(x) + row * size;
      add_sums(reinterpret_cast<const T* const*>(parts), world, row * size, size, to);
      norm_row(to, norm.weight, size, norm.eps, static_cast<T*>(out) + row * size);
    }
  });
}

}  // namespace gapless
