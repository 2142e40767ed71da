#include "adapt.h"

#include <algorithm>

#include "parallel.h"

namespace gapless {
namespace {

constexpr int64_t WORTH = 1 << 15;  // products below which threads cost more than they bring
constexpr int64_t WIDE = 4 * LANES;

template <typename T>
float dot(const T* a, const T* b, int64_t size) {
  f32x16 even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    even += load(a + i) * load(b + i);
    odd += load(a + i + LANES) * load(b + i + LANES);
  }
  for (; i < size; i += LANES) even += load_some(a + i, int(size - i)) * load_some(b + i, int(size - i));
  return sum(even + odd);
}

// Adds the sum of `rank` rows of `up`, `stride` apart, times `inner`, to `size` numbers of y.
template <typename T>
void add_rows(const float* inner, const T* up, int64_t rank, int64_t stride, int64_t size, T* y) {
  int64_t at = 0;
  for (; at + WIDE <= size; at += WIDE) {
    f32x16 sums[4];
    for (int i = 0; i < 4; i++) sums[i] = load(y + at + i * LANES);
    for (int64_t k = 0; k < rank; k++)
      for (int i = 0; i < 4; i++) sums[i] += inner[k] * load(up + k * stride + at + i * LANES);
    for (int i = 0; i < 4; i++) store(y + at + i * LANES, sums[i]);
  }
  for (; at < size; at += LANES) {
    int count = int(std::min<int64_t>(LANES, size - at));
    f32x16 sums = load_some(y + at, count);
    for (int64_t k = 0; k < rank; k++) sums += inner[k] * load_some(up + k * stride + at, count);
    store_some(y + at, sums, count);
  }
}

}  // namespace

template <typename T>
void adapt(
    const T* x, int64_t x_stride, T* y, const int64_t* slots, int64_t tokens, const T* down, const T* up,
    const AdapterShape& shape) {
  int64_t width = shape.projections * shape.rank;
  share(tokens, tokens * width * shape.inputs / WORTH, [&](int64_t token, bool) {
    int64_t slot = slots[token];
    if (!slot) return;
    float inner[MOST_RANKS];
    for (int64_t k = 0; k < width; k++)
      inner[k] = dot(x + token * x_stride, down + (slot * width + k) * shape.inputs, shape.inputs);
    const T* own = up + slot * shape.rank * shape.outputs;
    int64_t begin = 0;
    for (int64_t i = 0; i < shape.projections; i++) {
      add_rows(
          inner + i * shape.rank, own + begin, shape.rank, shape.outputs, shape.ends[i] - begin,
          y + token * shape.outputs + begin);
      begin = shape.ends[i];
    }
  });
}

template void adapt(
    const float*, int64_t, float*, const int64_t*, int64_t, const float*, const float*, const AdapterShape&);
template void adapt(
    const bf16*, int64_t, bf16*, const int64_t*, int64_t, const bf16*, const bf16*, const AdapterShape&);
template void adapt(
    const f16*, int64_t, f16*, const int64_t*, int64_t, const f16*, const f16*, const AdapterShape&);

}  // namespace gapless
