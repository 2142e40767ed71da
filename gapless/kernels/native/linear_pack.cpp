#include <algorithm>
#include <cstring>

#include "linear.h"
#include "parallel.h"

namespace gapless {
namespace {

// Inputs at a time, whose places in the packed tile stay in the first cache.
constexpr int64_t DEEP = 32;

template <typename W>
void pack_tile(const W* weight, int64_t n, int64_t k, int64_t first, int64_t width, W* to) {
  constexpr int64_t SOME = TOGETHER<W>;
  const int64_t whole = round_up(k, SOME), real = std::min(width, n - first);
  if (real < width || k < whole) std::fill_n(to, whole * width, W{});
  for (int64_t low = 0; low < k; low += DEEP)
    for (int64_t column = 0; column < real; column++) {
      const W* row = weight + (first + column) * k;
      W* place = to + column * SOME;
      for (int64_t i = low; i < std::min(low + DEEP, k); i++) place[i / SOME * SOME * width + i % SOME] = row[i];
    }
}

}  // namespace

template <typename W>
void pack(const W* weight, int64_t n, int64_t k, W* packed) {
  PackedPlace<W> place{n, k};
  share((n + TILE - 1) / TILE, n * k / (1 << 16), [&](int64_t tile, bool) {
    const int64_t first = tile * TILE;
    pack_tile(weight, n, k, first, place.width(first), packed + place.tile(first));
  });
}

template <typename W>
void unpack_rows(const W* packed, int64_t n, int64_t k, const int64_t* ids, int64_t count, W* out) {
  constexpr int64_t SOME = TOGETHER<W>;
  PackedPlace<W> place{n, k};
  share(count, count * k / (1 << 14), [&](int64_t i, bool) {
    const int64_t step = place.width(ids[i]) * SOME;
    const W* from = packed + place.tile(ids[i]) + ids[i] % TILE * SOME;
    W* to = out + i * k;
    int64_t j = 0;
    for (; j + SOME <= k; j += SOME, from += step) std::memcpy(to + j, from, SOME * sizeof(W));
    if (j < k) to[j] = *from;
  });
}

template void pack(const float*, int64_t, int64_t, float*);
template void pack(const bf16*, int64_t, int64_t, bf16*);
template void pack(const f16*, int64_t, int64_t, f16*);
template void unpack_rows(const float*, int64_t, int64_t, const int64_t*, int64_t, float*);
template void unpack_rows(const bf16*, int64_t, int64_t, const int64_t*, int64_t, bf16*);
template void unpack_rows(const f16*, int64_t, int64_t, const int64_t*, int64_t, f16*);

}  // namespace gapless
