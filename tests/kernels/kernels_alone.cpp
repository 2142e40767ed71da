// Every kernel that needs no torch, against a direct computation in double precision. Prints a line for each and, with
// status 1, what was wrong. tests/kernels/test_native_qemu.py builds it for processors that are not here.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "attention.h"
#include "bytes.h"
#include "elementwise.h"
#include "linear.h"
#include "sampling.h"

using namespace gapless;

static bool good = true;

// A unit in the last place of 1, after rounding to nearest.
template <typename T>
constexpr double HALF = std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-11;
template <typename T>
constexpr const char* NAME = std::is_same_v<T, float> ? "float32" : std::is_same_v<T, bf16> ? "bfloat16" : "float16";

template <typename T>
std::vector<T> numbers(int64_t count) {
  static uint32_t random = 1;
  std::vector<T> found(count);
  for (T& x : found) {
    random = random * 1664525 + 1013904223;
    assign(x, float(int32_t(random) * 0x1p-31));
  }
  return found;
}

// The worst of what was found, as a part of what it may be off.
struct Worst {
  std::string name;
  double part = 0;
  bool same = true;

  void take(double found, double want, double bound) { part = std::max(part, std::isfinite(found) ? std::fabs(found - want) / bound : 1e9); }
  ~Worst() {
    std::printf("%s: %.3f of the bound%s\n", name.c_str(), part, same ? "" : ", rows depend on others");
    good = good && part <= 1 && same;
  }
};

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return !std::memcmp(a, b, count * sizeof(T));
}

template <typename T, typename W>
using Product = void (*)(const T*, int64_t, int64_t, const W*, int64_t, int64_t, const T*, T*);

// `unit`: what a sum is off by, at most, as a part of its terms. With `even`, the product takes k in pairs.
template <typename T, typename W>
void check_product(const std::string& name, Product<T, W> multiply, double unit, bool even) {
  Worst worst{name + " " + NAME<T> + " by " + NAME<W>};
  for (int64_t n : {5, 131})
    for (int64_t k : {1, 16, 70, 129})
      for (int64_t m : {1, 2, 3, 4, 5, 7, 20}) {
        if (even && k % 2) continue;
        const int64_t stride = k + 3;
        const auto x = numbers<T>(m * stride), bias = numbers<T>(n);
        const auto weight = numbers<W>(n * k);
        std::vector<W> packed(packed_elements<W>(n, k));
        std::vector<T> out(m * n), alone(n);
        pack(weight.data(), n, k, packed.data());
        multiply(x.data(), stride, m, packed.data(), n, k, bias.data(), out.data());
        for (int64_t r = 0; r < m; r++) {
          multiply(x.data() + r * stride, stride, 1, packed.data(), n, k, bias.data(), alone.data());
          worst.same = worst.same && same_bits(alone.data(), out.data() + r * n, n);
          for (int64_t c = 0; c < n; c++) {
            double want = to_float(bias[c]), size = std::fabs(want);
            for (int64_t i = 0; i < k; i++) {
              const double one = double(to_float(x[r * stride + i])) * to_float(weight[c * k + i]);
              want += one, size += std::fabs(one);
            }
            worst.take(to_float(out[r * n + c]), want, (k + 2) * unit * size + HALF<T> * std::fabs(want) * 1.01 + 1e-7);
          }
        }
        const int64_t ids[] = {n - 1, 0};
        std::vector<W> back(2 * k);
        unpack_rows(packed.data(), n, k, ids, 2, back.data());
        worst.same = worst.same && same_bits(back.data(), weight.data() + (n - 1) * k, k);
      }
}

template <typename T, typename W>
void check_floats() {
  check_product<T, W>("product", linear_floats<T, W>, 0x1p-24, false);
}

// A weight of any bytes, its scales powers of two and zeros: the product with rows that were rounded, in double.
void check_bytes(const ByteForm& form) {
  Worst worst{std::string("product of ") + (form.nibbles ? "nibbles" : "bytes") + " by " + std::to_string(form.group)};
  const int64_t n = form.n, k = form.k, span = form.span(), groups = (k + span - 1) / span, unit = form.unit();
  for (int64_t m : {1, 2, 7}) {
    const auto x = numbers<float>(m * k), bias = numbers<float>(n);
    std::vector<uint8_t> weight(n * k), zeros(n * groups), packed(form.tiles() * form.tile());
    std::vector<float> scales(n * groups), out(m * n), alone(n);
    for (size_t i = 0; i < weight.size(); i++) weight[i] = uint8_t(i * 37 + i / 11);
    for (size_t i = 0; i < zeros.size(); i++) zeros[i] = form.zeros ? i % 17 : 8, scales[i] = i % 3 ? 0.25f : 2.0f;
    pack_bytes(form, weight.data(), scales.data(), zeros.data(), packed.data());
    linear_bytes<float>(form, x.data(), k, m, packed.data(), bias.data(), out.data(), false);
    for (int64_t r = 0; r < m; r++) {
      linear_bytes<float>(form, x.data() + r * k, k, 1, packed.data(), bias.data(), alone.data(), false);
      worst.same = worst.same && same_bits(alone.data(), out.data() + r * n, n);
      for (int64_t c = 0; c < n; c++) {
        double want = bias[c], size = 0;
        for (int64_t i = 0; i < k; i++) {
          float top = 0;
          for (int64_t j = i / unit * unit; j < std::min(k, (i / unit + 1) * unit); j++)
            top = std::max(top, std::fabs(x[r * k + j]));
          const int64_t at = c * groups + i / span;
          const int half = weight[(c * k + i / 32 * 32) / 2 + i % 16] >> i % 32 / 16 * 4 & 15;
          const double factor = (form.nibbles ? half - zeros[at] : int8_t(weight[c * k + i])) * scales[at];
          const double one = std::rint(x[r * k + i] * (127 / top)) * (top / 127) * factor;
          want += one, size += std::fabs(one);
        }
        worst.take(out[r * n + c], want, 0x1p-21 * size + 1e-6);
      }
    }
  }
}

void check_bytes() {
  for (int64_t n : {5, 131}) {
    for (int64_t group : {0, 32, 64}) {
      for (int64_t k : {3, 64, 200}) check_bytes({n, k, group, false, group == 32, false});
      for (bool zeros : {false, true}) check_bytes({n, 96, group, true, zeros, zeros});
    }
  }
}

template <typename T>
using Prompts = void (*)(const Queries<T>&, const Batch&, const Paged<T>&, const Attend&, T*);

struct Case {
  std::string name;
  Attend attend;
  std::vector<int32_t> spans = {};
};

// Two chunks over pages that lie in no order; entries that no query reads are no numbers.
template <typename T>
struct Prompt {
  static constexpr int64_t HEADS = 4, KV_HEADS = 2, PAGE = 16, LAYERS = 2, LAYER = 1, TABLE = 40, TOKENS = 42;
  static constexpr int64_t rows[] = {1, 0}, starts[] = {0, 37, TOKENS}, lens[] = {37, 603};

  Case one;
  int64_t dim;
  std::vector<int32_t> table;
  std::vector<T> queries, cache;

  Prompt(Case one, int64_t dim)
      : one(one), dim(dim), table(2 * TABLE), queries(numbers<T>(TOKENS * HEADS * dim)),
        cache(numbers<T>(2 * TABLE * LAYERS * 2 * PAGE * KV_HEADS * dim)) {
    this->one.attend.scale = 1 / std::sqrt(float(dim));
    for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(i * 27 % table.size());
    for (int64_t chunk = 0; chunk < 2; chunk++) {
      Range some = read_by(chunk, starts[chunk]);
      for (int64_t token = starts[chunk]; token < starts[chunk + 1]; token++) {
        const Range range = read_by(chunk, token);
        some = {std::min(some.low, range.low), std::max(some.high, range.high)};
      }
      for (int64_t key = 0; key < TABLE * PAGE; key++)
        for (int64_t head = 0; head < KV_HEADS && (key < some.low || key >= some.high); head++) {
          const int64_t at = kv().key(pages(chunk), key, head) - cache.data();
          for (int64_t d = 0; d < dim; d++)
            assign(cache[at + d], NAN), assign(cache[at + kv().value_offset() + d], NAN);
        }
    }
  }

  Paged<T> kv() const { return {cache.data(), LAYERS, PAGE, KV_HEADS, dim, LAYER, table.data(), TABLE}; }
  Queries<T> from(int64_t token) const { return {queries.data() + token * HEADS * dim, HEADS * dim, HEADS}; }
  const int32_t* pages(int64_t chunk) const { return table.data() + rows[chunk] * TABLE; }
  const int32_t* spans() const { return one.spans.empty() ? nullptr : one.spans.data(); }
  int64_t position(int64_t chunk, int64_t token) const { return lens[chunk] - (starts[chunk + 1] - token); }

  // Written out, and not as Attend::readable has it.
  Range read_by(int64_t chunk, int64_t token) const {
    const int64_t at = position(chunk, token), size = one.attend.size;
    Range found{0, at + 1};
    for (int64_t key = 0; key <= at; key++) {
      const bool read = one.attend.reach == Reach::WINDOW ? at - key < size
                        : one.attend.reach == Reach::CHUNK ? key / size == at / size : true;
      if (read) break;
      found.low = key + 1;
    }
    if (!spans()) return found;
    const int32_t* span = spans() + 2 * token;
    return {std::min<int64_t>(found.low, span[0]), std::min(std::max<int64_t>(found.high, span[1]), lens[chunk])};
  }

  std::vector<double> direct(int64_t chunk, int64_t token, int64_t head) const {
    const Attend& attend = one.attend;
    const Range range = read_by(chunk, token);
    const T* query = queries.data() + (token * HEADS + head) * dim;
    std::vector<double> values(dim);
    double total = attend.sinks ? std::exp(double(attend.sinks[head])) : 0;
    for (int64_t key = range.low; key < range.high; key++) {
      const T* one = kv().key(pages(chunk), key, head / (HEADS / KV_HEADS));
      double score = 0;
      for (int64_t d = 0; d < dim; d++) score += double(to_float(query[d])) * to_float(one[d]);
      score *= attend.scale;
      if (attend.softcap > 0) score = attend.softcap * std::tanh(score / attend.softcap);
      const double weight = std::exp(score);
      total += weight;
      for (int64_t d = 0; d < dim; d++) values[d] += weight * to_float(one[kv().value_offset() + d]);
    }
    for (double& value : values) value /= total;
    return values;
  }
};

template <typename T>
void check_prompts(const std::string& name, const Prompt<T>& prompt, Prompts<T> attend, bool by_decode) {
  const int64_t dim = prompt.dim, stride = prompt.HEADS * dim;
  std::vector<T> out(prompt.queries.size()), alone(stride);
  attend(
      prompt.from(0), {2, prompt.rows, prompt.lens, prompt.starts, prompt.spans()}, prompt.kv(), prompt.one.attend,
      out.data());
  Worst worst{name + " " + NAME<T> + ", " + std::to_string(dim) + ", " + prompt.one.name};
  for (int64_t chunk = 0; chunk < 2; chunk++)
    for (int64_t token = prompt.starts[chunk]; token < prompt.starts[chunk + 1]; token++) {
      const int64_t length = prompt.position(chunk, token) + 1;
      decode_attention(
          prompt.from(token), {1, prompt.rows + chunk, &length}, prompt.kv(), prompt.one.attend, alone.data());
      const bool same = !prompt.spans();  // which reach beyond a decode row
      if (by_decode && same) worst.same = worst.same && same_bits(alone.data(), out.data() + token * stride, stride);
      for (int64_t head = 0; head < prompt.HEADS; head++) {
        const std::vector<double> want = prompt.direct(chunk, token, head);
        // Values are below 1. A weight, and for some units a query, may be rounded to T; so is the result.
        for (int64_t d = 0; d < dim; d++) {
          worst.take(to_float(out[token * stride + head * dim + d]), want[d], 3 * HALF<T> + 1e-5);
          if (same) worst.take(to_float(alone[head * dim + d]), want[d], 3 * HALF<T> + 1e-5);
        }
      }
    }
}

std::vector<Case> cases() {
  static const float sinks[] = {-2, 0.5, 3, 20};
  // Spans of the first chunk at 5..20, of the second at 599..602, a token before its end.
  std::vector<int32_t> spans;
  for (int32_t token = 0; token < 42; token++) {
    const int32_t at = token < 37 ? token : 603 - 42 + token;
    const bool first = at >= 5 && at < 20, second = at >= 599 && at < 602;
    spans.insert(spans.end(), {first ? 5 : second ? 599 : at, first ? 20 : second ? 602 : at + 1});
  }
  return {
      {"causal", {}},
      {"window of 1", {0, Reach::WINDOW, 1}},
      {"window of 70, capped, sinks", {0, Reach::WINDOW, 70, 2, sinks}},
      {"window of 600, sinks", {0, Reach::WINDOW, 600, 0, sinks}},
      {"chunks of 40, capped", {0, Reach::CHUNK, 40, 0.5}},
      {"capped, sinks", {0, Reach::CAUSAL, 0, 5, sinks}},
      {"spans", {}, spans},
      {"window of 4, spans, sinks", {0, Reach::WINDOW, 4, 0, sinks}, spans},
  };
}

template <typename T>
void check_attention() {
  for (int64_t dim : {16, 64, 80, 128})
    for (const Case& one : cases()) {
      const Prompt<T> prompt(one, dim);
      check_prompts<T>("attention as in decode", prompt, prefill_attention<T>, true);
      if (floats_attend<T>(dim)) check_prompts<T>("attention of prompts", prompt, prefill_attention_floats<T>, false);
    }
}

float number_of(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  const double size = exponent ? std::ldexp(1 + fraction / 8.0, exponent - 7) : std::ldexp(fraction / 8.0, -6);
  return (byte & 127) == 127 ? NAN : float(byte >> 7 ? -size : size);
}

// A memory of fewer bits gives the bits of one with its numbers.
template <typename T, typename S>
void check_fewer(const std::string& name, int64_t dim, const Case& one) {
  constexpr float SCALE = 0.5;
  Prompt<T> prompt(one, dim);
  const int64_t count = prompt.PAGE * prompt.KV_HEADS, bytes = Stored<S>::page_bytes(count, dim);
  const int64_t pages = prompt.table.size() * prompt.LAYERS;
  std::vector<S> stored(pages * bytes);
  Worst written{name + " " + NAME<T> + ", " + std::to_string(dim) + ", " + one.name};
  auto round = [&](T& to, float number, double scale, double step) {
    const double before = to_float(to);
    if (!std::isnan(before)) written.take(number * scale, before, step + HALF<T> * std::fabs(before));
    assign(to, number);
  };
  for (int64_t page = 0; page < pages; page++)
    for (int64_t i = 0; i < count; i++) {
      T *key = &prompt.cache[(2 * page * count + i) * dim], *value = key + count * dim;
      const auto [keys, values, pair] = Stored<S, uint8_t>::first(&stored[page * bytes].bits, count, dim).after(i, dim);
      auto e4m3_of = [&](T* from, uint8_t* to) {
        pack_e4m3(from, dim, SCALE, to);
        for (int64_t d = 0; d < dim; d++)
          round(from[d], number_of(to[d]), SCALE, std::max(0x1p-4f * std::fabs(to_float(from[d])), 0x1p-10f * SCALE));
      };
      e4m3_of(key, keys);
      if constexpr (!Stored<S>::NIBBLES) e4m3_of(value, values);
      else {
        pack_nibbles(value, dim, values, pair);
        f16 own[2];
        std::memcpy(own, pair, 4);
        const float step = to_float(own[0]), least = to_float(own[1]);
        for (int64_t d = 0; d < dim; d++)
          round(value[d], float(values[d % (dim / 2)] >> (d < dim / 2 ? 0 : 4) & 15) * step + least, 1, step * 0.51);
      }
    }
  const Paged<T> plain = prompt.kv();
  const Paged<S> fewer{stored.data(), plain.layers, plain.page_size, plain.kv_heads, dim, plain.layer, plain.table,
                       plain.table_stride};
  const Batch batch{2, prompt.rows, prompt.lens, prompt.starts, prompt.spans()};
  const int64_t stride = prompt.HEADS * dim, whole = prompt.queries.size();
  std::vector<T> ours(whole), theirs(whole);
  auto same = [&](int64_t size) { written.same = written.same && same_bits(ours.data(), theirs.data(), size); };
  const Batch rows{2, prompt.rows, prompt.lens};
  decode_attention(prompt.from(0), rows, fewer, prompt.one.attend, ours.data());
  decode_attention(prompt.from(0), rows, plain, prompt.one.attend, theirs.data()), same(2 * stride);
  prefill_attention(prompt.from(0), batch, fewer, prompt.one.attend, ours.data());
  prefill_attention(prompt.from(0), batch, plain, prompt.one.attend, theirs.data()), same(whole);
  prefill_attention_floats(prompt.from(0), batch, fewer, prompt.one.attend, ours.data());
  prefill_attention_floats(prompt.from(0), batch, plain, prompt.one.attend, theirs.data()), same(whole);
}

template <typename T>
void check_stored() {
  for (int64_t dim : {16, 34, 80, 128})
    for (const Case& one : cases()) {
      check_fewer<T, e4m3>("attention over e4m3", dim, one);
      check_fewer<T, k8v4>("attention over k8v4", dim, one);
    }
}

template <typename T>
void check_elements() {
  Worst norm{std::string("norm ") + NAME<T>}, gate{std::string("gate ") + NAME<T>};
  Worst layer{std::string("layer norm ") + NAME<T>}, gelu{std::string("gelu ") + NAME<T>};
  for (int64_t size : {8, 70, 256}) {
    const auto weight = numbers<float>(size);
    const auto x = numbers<T>(3 * size), both = numbers<T>(3 * 2 * size);
    std::vector<T> out(3 * size), gated(3 * size), centred(3 * size), alone(3 * 2 * size);
    rms_norm(x.data(), size, weight.data(), 3, size, 1e-6f, out.data());
    activate(both.data(), 3, size, SILU, true, gated.data());
    layer_norm(x.data(), size, weight.data(), weight.data(), 3, size, 1e-6f, centred.data());
    activate(both.data(), 3, 2 * size, GELU, false, alone.data());
    for (int64_t i = 0; i < 6 * size; i++) {
      const double a = to_float(both[i]), want = a * std::erfc(-a / std::sqrt(2.0)) / 2;
      gelu.take(to_float(alone[i]), want, 3 * HALF<T> + 1e-6);
    }
    for (int64_t r = 0; r < 3; r++) {
      double squares = 0, total = 0;
      for (int64_t i = 0; i < size; i++) squares += std::pow(to_float(x[r * size + i]), 2);
      for (int64_t i = 0; i < size; i++) total += to_float(x[r * size + i]);
      const double mean = total / size, deviation = std::sqrt(squares / size - mean * mean + 1e-6);
      for (int64_t i = 0; i < size; i++) {
        const double a = to_float(both[r * 2 * size + i]), b = to_float(both[r * 2 * size + size + i]);
        const double want = to_float(x[r * size + i]) / std::sqrt(squares / size + 1e-6) * to_float(weight[i]);
        norm.take(to_float(out[r * size + i]), want, 3 * HALF<T> * std::fabs(want) + 1e-5);
        const double moved = ((to_float(x[r * size + i]) - mean) / deviation + 1) * to_float(weight[i]);
        layer.take(to_float(centred[r * size + i]), moved, 3 * HALF<T> * std::fabs(moved) + 2e-5);
        gate.take(to_float(gated[r * size + i]), a / (1 + std::exp(-a)) * b, 3 * HALF<T> + 1e-6);
      }
    }
  }
}

template <typename T>
void check_choices() {
  Worst best{std::string("best ") + NAME<T>}, cut{std::string("cut ") + NAME<T>};
  for (int64_t vocab : {5, 64, 1003}) {
    auto row = numbers<T>(vocab);
    row[vocab / 2] = row[vocab - 1];
    const auto most = std::max_element(row.begin(), row.end(), [](T a, T b) { return to_float(a) < to_float(b); });
    best.take(best_of(row.data(), vocab).index, most - row.begin(), 0.5);
    std::vector<float> sorted;
    for (T x : row) sorted.push_back(to_float(x));
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    cut.take(cut_of(row.data(), vocab, {1.0f, 3, 1.0f, 0.0f}, false).value, sorted[2], 1e-9);
  }
}

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was printed before a signal is seen
  std::printf("%s%s\n", VECTOR_UNIT, DOTS_HERE ? ", pairs" : "");
  check_floats<float, float>(), check_floats<float, bf16>(), check_floats<bf16, bf16>();
  check_floats<f16, f16>(), check_floats<f16, bf16>();
  if (DOTS_HERE) check_product<bf16, bf16>("product of pairs", linear_dots, 0x1p-23, true);
  check_bytes();
  check_attention<float>(), check_attention<bf16>(), check_attention<f16>();
  check_stored<float>(), check_stored<bf16>(), check_stored<f16>();
  check_elements<float>(), check_elements<bf16>();
  check_choices<float>(), check_choices<bf16>();
  return good ? 0 : 1;
}
