// The attention of prompts on AMX.
#include "amx.h"
#include "attention_prompt.h"
#include "tiles.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

constexpr int64_t DEEP = 32;  // what a multiplication of tiles sums over: dims or keys

void configure() {
  alignas(64) uint8_t shapes[64] = {1};
  for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
  tile_configure(shapes);
}

// to [32, 32] = x [32, 32 * steps] @ the 32 columns from `pairs` on. Strides count elements; a pair is two.
void multiply(
    const bf16* x, int64_t x_stride, const bf16* pairs, int64_t pairs_stride, int64_t steps, float* to,
    int64_t to_stride) {
  const int64_t wide = x_stride * sizeof(bf16), paired = pairs_stride * sizeof(bf16), out = to_stride * sizeof(float);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (; steps; steps--, x += DEEP, pairs += DEEP / 2 * pairs_stride) {
    tile_load<4>(x, wide), tile_load<5>(x + 16 * x_stride, wide);
    tile_load<6>(pairs, paired), tile_load<7>(pairs + 2 * LANES, paired);
    tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
  }
  tile_store<0>(to, out), tile_store<1>(to + LANES, out);
  tile_store<2>(to + 16 * to_stride, out), tile_store<3>(to + 16 * to_stride + LANES, out);
}

// Sixteen keys' dims 0..32 in pairs: a pair's two next to each other for all keys.
void pair_dims(const bf16* const* keys, int64_t dim, bf16* pairs) {
#if GAPLESS_AVX512
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr uint16_t UPPER[] = {0xAAAA, 0xCCCC, 0xF0F0, 0xFF00};
  __m512i rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(keys[i] + dim);
  // Bit by bit, the number of the row and that of the lane change places.
#pragma GCC unroll 4
  for (int bit = 0; bit < 4; bit++) {
    const __m512i other = _mm512_xor_si512(lanes, _mm512_set1_epi32(1 << bit));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i >> bit & 1) continue;
      __m512i a = rows[i], b = rows[i + (1 << bit)];
      rows[i] = _mm512_mask_permutexvar_epi32(a, UPPER[bit], other, b);
      rows[i + (1 << bit)] = _mm512_mask_permutexvar_epi32(b, uint16_t(~UPPER[bit]), other, a);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_si512(pairs + i * 2 * KEYS, rows[i]);
#else  // where tests emulate the tiles
  for (int i = 0; i < 16; i++)
    for (int key = 0; key < 16; key++) std::memcpy(pairs + i * 2 * KEYS + 2 * key, keys[key] + dim + 2 * i, 4);
#endif
}

void pair_keys(const bf16* one, const bf16* two, int64_t dim, bf16* pairs) {
  for (int64_t d = 0; d < dim; d++) {
    const uint32_t both = one[d].bits | uint32_t(two[d].bits) << 16;
    std::memcpy(pairs + 2 * d, &both, sizeof(both));
  }
}

class TiledPairs {
 public:
  using Number = bf16;
  using Weight = bf16;
  static constexpr int64_t GROUP = 32, STEP = DEEP;

  void begin(int64_t size) { dim = size, configure(); }
  void end() { tile_release(); }

  void keep(int64_t row, const bf16* query) { std::copy_n(query, dim, queries + row * dim); }

  void fetch(const bf16* const* from, const bf16* const* from_values, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
      for (int64_t d = 0; d < dim; d += STEP) pair_dims(from + i, d, keys + d * KEYS + 2 * i);
      for (int64_t j = i; j < i + 16; j += 2) pair_keys(from_values[j], from_values[j + 1], dim, values + j * dim);
    }
  }

  void fetch_values(const bf16* const* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 2) pair_keys(from[i], from[i + 1], dim, values + i * dim);
  }

  // Asks whole pairs of keys.
  bool any_wild(int64_t first, int64_t last) const {
    bool found = false;  // all ones in the exponent, whatever the sign
    for (int64_t i = first / 2 * 2 * dim; i < whole_steps(last, 2) * dim; i++)
      found |= uint16_t(values[i].bits << 1) >= 0xFF00;
    return found;
  }

  void score(int64_t low, int64_t, int64_t count, float* scores) const {
    for (int64_t i = 0; i < count; i += STEP)
      multiply(queries + low * dim, dim, keys + 2 * i, 2 * KEYS, dim / STEP, scores + i, KEYS);
  }

  void add(const bf16* weights, const float* factors, int64_t first, int64_t last, int64_t count, float* sums) {
    for (int64_t d = 0; d < dim; d += STEP) {
      multiply(weights, KEYS, values + 2 * d, 2 * dim, count / STEP, products, STEP);
      for (int64_t row = first; row < last; row++)
        for (int64_t v = 0; v < STEP; v += LANES) {
          float* sum = sums + row * dim + d + v;
          store(sum, load(sum) * factors[row] + load(products + row * STEP + v));
        }
    }
  }

 private:
  int64_t dim;
  alignas(64) bf16 queries[(MOST_ROWS + GROUP) * MOST_DIM];  // [rows, dim], and what the last tile reads after them
  alignas(64) bf16 keys[KEYS * MOST_DIM];                    // [dim / 2, KEYS] pairs of dims
  alignas(64) bf16 values[KEYS * MOST_DIM];                  // [KEYS / 2, dim] pairs of keys
  alignas(64) float products[GROUP * STEP];                  // weights by values of some dims
};

}  // namespace

bool amx_attends(int64_t dim) { return dim % DEEP == 0 && dim <= MOST_DIM && amx_missing().empty(); }

template <typename S>
void prefill_attention_amx(
    const Queries<bf16>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, bf16* out) {
  attend_prompts<TiledPairs>(q, batch, kv, attend, out);
}

#else

bool amx_attends(int64_t) { return false; }

template <typename S>
void prefill_attention_amx(const Queries<bf16>&, const Batch&, const Paged<S>&, const Attend&, bf16*) {
  __builtin_unreachable();
}

#endif

template void prefill_attention_amx(const Queries<bf16>&, const Batch&, const Paged<bf16>&, const Attend&, bf16*);
template void prefill_attention_amx(const Queries<bf16>&, const Batch&, const Paged<e4m3>&, const Attend&, bf16*);
template void prefill_attention_amx(const Queries<bf16>&, const Batch&, const Paged<k8v4>&, const Attend&, bf16*);

}  // namespace gapless
