// What bytes.h multiplies: packed weights, and rows of x in whole numbers.
#include "bytes.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "parallel.h"

namespace gapless {
namespace {

constexpr int32_t STEPS = 127;
constexpr float LEAST = 1e-30f;  // a smaller maximum rounds to zero
constexpr uint32_t INFINITE = 0x7F800000u;
constexpr int64_t WORTH = 1 << 16, ROW_WORTH = 1 << 14, CHUNK = 32;

// Thirty-two inputs of one span, with the places in a tile of its scales and of their weights of the first column.
struct Chunk {
  int64_t first, head, weights;
};

template <typename Body>
void each_chunk(const ByteForm& form, const Body& body) {
  const int64_t span = form.span(), step = form.head() + form.bytes(span);
  for (int64_t start = 0, head = 0; start < form.k; start += span, head += step)
    for (int64_t i = 0; i < std::min(span, form.k - start); i += CHUNK)
      body(Chunk{start + i, head, head + form.head() + form.bytes(i)});
}

// Four bytes of a word, or of its low or high halves.
inline uint32_t four(const uint8_t* from, int64_t shift = 0, uint32_t kept = ~0u) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word >> shift & kept;
}

constexpr uint32_t LOW = 0x0F0F0F0Fu;

// `count` inputs of an output in bytes; `to` is the place of its first four.
void pack_wide(const uint8_t* weight, int64_t count, uint8_t* to) {
  uint8_t whole[CHUNK] = {};
  std::memcpy(whole, weight, count);
  for (int64_t i = 0; i < CHUNK; i += 4, to += 4 * TILE) {
    const uint32_t word = four(whole + i) ^ 0x80808080u;
    std::memcpy(to, &word, sizeof(word));
  }
}

// Thirty-two inputs in nibbles: 16 bytes, whose low halves are the first 16.
void pack_narrow(const uint8_t* weight, uint8_t* to) {
  for (int64_t i = 0; i < CHUNK; i += 8, to += 4 * TILE) {
    const uint8_t* from = weight + i % 16;
    const int64_t shift = i / 16 * 4;
    const uint32_t word = four(from, shift, LOW) | four(from + 4, shift, LOW) << 4;
    std::memcpy(to, &word, sizeof(word));
  }
}

void set_heads(
    const ByteForm& form, int64_t index, int64_t group, int64_t groups, const float* scales, const uint8_t* zeros,
    uint8_t* head) {
  for (int64_t c = 0; c < std::min(TILE, form.n - index * TILE); c++) {
    const int64_t from = (index * TILE + c) * groups + group;
    if (form.narrow) assign(reinterpret_cast<f16*>(head)[c], scales[from]);
    else reinterpret_cast<float*>(head)[c] = scales[from];
    if (form.zeros) head[form.head() - TILE + c] = zeros[from];
  }
}

void round_unit(const float* from, int64_t unit, int8_t* steps, float& scale, int32_t& sum) {
  uint32_t most = 0;
  for (int64_t i = 0; i < unit; i++) most = std::max(most, bits_of<uint32_t>(from[i]) & 0x7FFFFFFFu);
  const float top = bits_of<float>(most), per_step = most < INFINITE && top > LEAST ? STEPS / top : 0;
  int32_t whole[64];
  sum = 0;
  for (int64_t i = 0; i < unit; i++)
    whole[i] = std::clamp(int32_t(__builtin_rintf(most < INFINITE ? from[i] * per_step : 0)), -STEPS, STEPS);
  for (int64_t i = 0; i < unit; i++) sum += whole[i];
  for (int64_t i = 0; i < unit; i++) steps[i] = int8_t(whole[i]);
  scale = most < INFINITE ? top / STEPS : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

void pack_bytes(
    const ByteForm& form, const uint8_t* weight, const float* scales, const uint8_t* zeros, uint8_t* packed) {
  const int64_t span = form.span(), groups = (form.k + span - 1) / span, row = form.nibbles ? form.k / 2 : form.k;
  share(form.tiles(), form.n * form.k / WORTH, [&](int64_t index, bool) {
    uint8_t* tile = packed + index * form.tile();
    std::memset(tile, 0, form.tile());
    each_chunk(form, [&](const Chunk& chunk) {
      if (chunk.first % span == 0)
        set_heads(form, index, chunk.first / span, groups, scales, zeros, tile + chunk.head);
      for (int64_t column = index * TILE; column < std::min(form.n, (index + 1) * TILE); column++) {
        uint8_t* to = tile + chunk.weights + 4 * (column % TILE);
        const uint8_t* from = weight + column * row;
        if (form.nibbles) pack_narrow(from + chunk.first / 2, to);
        else pack_wide(from + chunk.first, std::min(CHUNK, form.k - chunk.first), to);
      }
    });
  });
}

template <typename T>
Steps::Steps(const ByteForm& form, const T* x, int64_t stride, int64_t m)
    : m(m), width(form.width()), units(form.units()), steps(m * width), scales(m * units), sums(m * units) {
  const int64_t unit = form.unit(), k = form.k;
  share(m, m * k / ROW_WORTH, [&](int64_t r, bool) {
    for (int64_t u = 0; u < units; u++) {
      float some[64] = {};
      const T* from = x + r * stride + u * unit;
      if (const int64_t count = std::min(unit, k - u * unit); count == unit)
        for (int64_t i = 0; i < unit; i++) some[i] = to_float(from[i]);
      else
        for (int64_t i = 0; i < count; i++) some[i] = to_float(from[i]);
      round_unit(some, unit, &steps[r * width + u * unit], scales[r * units + u], sums[r * units + u]);
    }
  });
}

template Steps::Steps(const ByteForm&, const float*, int64_t, int64_t);
template Steps::Steps(const ByteForm&, const bf16*, int64_t, int64_t);
template Steps::Steps(const ByteForm&, const f16*, int64_t, int64_t);

}  // namespace gapless
