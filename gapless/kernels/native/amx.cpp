#include "amx.h"

#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "attention.h"
#include "bytes.h"
#include "linear.h"
#include "tiles.h"

namespace gapless {

#if GAPLESS_AMX

namespace {

// Whole numbers from -most to most: their sums are exact in float32, so both paths must give the same bits although
// they add in different orders.
std::vector<bf16> numbers(int64_t count, int most) {
  static uint32_t random = 1;
  std::vector<bf16> found(count);
  for (bf16& x : found) {
    random = random * 1664525 + 1013904223;
    assign(x, float(int(random >> 16) % (2 * most + 1) - most));
  }
  return found;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return !std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16));
}

bool multiplies(int64_t m, int64_t n, int64_t k) {
  const auto x = numbers(m * k, 2), weight = numbers(n * k, 2), bias = numbers(n, 2);
  std::vector<bf16> packed(packed_elements<bf16>(n, k)), want(m * n), got(m * n);
  pack(weight.data(), n, k, packed.data());
  linear_floats(x.data(), k, m, packed.data(), n, k, bias.data(), want.data());
  linear_amx(x.data(), k, m, packed.data(), n, k, bias.data(), got.data());
  return same_bits(want, got);
}

// One to four vectors of columns, one and two tiles of rows, whole and cut ones, and inputs that end inside a tile.
bool multiplies() {
  for (int64_t n : {64 + 5, 64 + 32, 64 + 48})
    for (int64_t m : {1, 32 + 17})
      if (!multiplies(m, n, 70)) return false;
  return true;
}

// In bytes and nibbles, whose scales are powers of two.
bool multiplies_bytes() {
  constexpr int64_t M = 32 + 5, N = 64 + 5, K = 96;
  const auto x = numbers(M * K, 100), bias = numbers(N, 2);
  std::vector<uint8_t> weight(N * K);
  for (size_t i = 0; i < weight.size(); i++) weight[i] = uint8_t(37 * i + i / 7);
  for (const bool nibbles : {false, true}) {
    const ByteForm form{N, K, nibbles ? 32 : 0, nibbles, false, nibbles};
    const std::vector<float> scales(N * K / 32, 0.5f);
    std::vector<uint8_t> packed(form.tiles() * form.tile());
    pack_bytes(form, weight.data(), scales.data(), weight.data(), packed.data());
    std::vector<bf16> want(M * N), got(M * N);
    linear_bytes(form, x.data(), K, M, packed.data(), bias.data(), want.data(), false);
    linear_bytes(form, x.data(), K, M, packed.data(), bias.data(), got.data(), true);
    if (!same_bits(want, got)) return false;
  }
  return true;
}

// A chunk that ends inside its second block of keys. Scores are whole multiples of SCALE, so a weight is exactly 1,
// where a score is its query's largest, or 0.
bool attends() {
  constexpr int64_t HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 16, KEYS = 80, TOKENS = 20;
  constexpr float SCALE = 128;
  const int32_t pages[KEYS / PAGE] = {3, 0, 4, 1, 2};
  const int64_t row = 0, starts[] = {0, TOKENS}, length = KEYS;
  const auto queries = numbers(TOKENS * HEADS * DIM, 1), cache = numbers(2 * KEYS * KV_HEADS * DIM, 1);
  const Queries<bf16> q{queries.data(), HEADS * DIM, HEADS};
  const Paged<bf16> kv{cache.data(), 1, PAGE, KV_HEADS, DIM, 0, pages, KEYS / PAGE};
  std::vector<bf16> want(queries.size()), got(queries.size());
  const Batch batch{1, &row, &length, starts};
  prefill_attention(q, batch, kv, {SCALE}, want.data());
  prefill_attention_amx(q, batch, kv, {SCALE}, got.data());
  return same_bits(want, got);
}

bool switched_off() {
  const char* set = std::getenv("GAPLESS_AMX");
  const std::string_view word = set ? set : "";
  return word == "0" || word == "off" || word == "no" || word == "false";
}

}  // namespace

std::string try_amx() {
  if (switched_off()) return "switched off by GAPLESS_AMX";
  if (std::string refused = ask_for_tiles(); !refused.empty()) return refused;
  if (!multiplies()) return "gave wrong sums in a product";
  if (!multiplies_bytes()) return "gave wrong sums in a product of bytes";
  return attends() ? "" : "gave wrong sums in attention";
}

#else

std::string try_amx() { return "unknown to the compiler"; }

#endif

const std::string& amx_missing() {
  static const std::string missing = try_amx();
  return missing;
}

}  // namespace gapless
