#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/neg.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ParallelGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <cmath>
#include <limits>

#include "adapt.h"
#include "adjust.h"
#include "amx.h"
#include "attention.h"
#include "elementwise.h"
#include "glue.h"
#include "linear.h"
#include "masks.h"
#include "parallel.h"
#include "sampling.h"
#include "scores.h"
#include "suffixes.h"

namespace gapless {
namespace {

constexpr int64_t COPIED_AT_ONCE = 1 << 16;  // bytes
constexpr uint32_t PAGE_FACTOR = 0x1E3779B1, PAGE_MASK = (1u << 30) - 1;

using at::Tensor;
using Maybe = std::optional<Tensor>;

const bf16* bf16s(const Tensor& x) { return reinterpret_cast<const bf16*>(x.const_data_ptr<at::BFloat16>()); }
bf16* bf16s_to(const Tensor& x) { return reinterpret_cast<bf16*>(x.mutable_data_ptr<at::BFloat16>()); }

// Calls body(null pointer of the kernels' own type) for the dtype of x.
template <typename Body>
void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kBFloat16) return body(static_cast<bf16*>(nullptr));
  TORCH_CHECK(x.scalar_type() == at::kFloat, "gapless: float32 or bfloat16, not ", x.scalar_type());
  body(static_cast<float*>(nullptr));
}

// Raises where x has another dtype.
template <typename T>
T* data(const Tensor& x) {
  if constexpr (std::is_same_v<T, bf16>)
    return bf16s_to(x);
  else
    return x.mutable_data_ptr<T>();
}

// Rows that lie whole, maybe apart.
int64_t row_stride(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "gapless: rows must lie whole");
  return x.stride(0);
}

void whole(const Tensor& x) { TORCH_CHECK(x.is_contiguous(), "gapless: a contiguous tensor is wanted"); }

const int64_t* longs(const Tensor& x) {
  whole(x);
  return x.const_data_ptr<int64_t>();
}

const int32_t* ints(const Tensor& x) {
  whole(x);
  return x.const_data_ptr<int32_t>();
}

Tensor linear_pack(const Tensor& weight) {
  TORCH_CHECK(LINEAR_HERE, "gapless: this processor has no bfloat16 dot product");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "gapless: linear_pack wants a contiguous matrix");
  int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed = at::empty({packed_elements(n, k)}, weight.options());
  pack(bf16s(weight), n, k, bf16s_to(packed));
  return packed;
}

void linear_packed_to(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, bool amx, const Tensor& out) {
  TORCH_CHECK(LINEAR_HERE, "gapless: this processor has no bfloat16 dot product");
  TORCH_CHECK(!amx || amx_missing().empty(), "gapless: AMX does not serve here: ", amx_missing());
  int64_t m = x.size(0), k = x.size(1);
  TORCH_CHECK(x.dim() == 2 && packed.numel() == packed_elements(n, k), "gapless: linear_packed of other shapes");
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == at::IntArrayRef({m, n}) && out.dtype() == x.dtype(),
      "gapless: linear_packed_to another shape or dtype");
  Tensor rows = k % 2 ? at::constant_pad_nd(x, {0, 1}) : x.stride(1) == 1 ? x : x.contiguous();
  const bf16* add = bias ? bf16s(*bias) : nullptr;
  (amx ? linear_amx : linear_vectors)(bf16s(rows), rows.stride(0), m, bf16s(packed), n, k + k % 2, add, bf16s_to(out));
}

Tensor linear_packed(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, bool amx) {
  Tensor out = at::empty({x.size(0), n}, x.options());
  linear_packed_to(x, packed, n, bias, amx, out);
  return out;
}

// Copies rows, and adds the checksums of what has arrived: gapless/kernels/pages.py says what they are. On the thread
// that asks, beside the steps.
void copy_pages(const Tensor& src, const Tensor& dst, const Tensor& places, const Tensor& sums) {
  whole(places), whole(sums);
  const int64_t count = sums.numel(), words = src.size(1);
  TORCH_CHECK(
      src.dim() == 2 && dst.dim() == 2 && dst.size(1) == words && src.stride(1) == 1 && dst.stride(1) == 1 &&
          places.numel() == 2 * count,
      "gapless: copy_pages of other shapes");
  const int32_t *from = places.const_data_ptr<int32_t>(), *to = from + count;
  int64_t* totals = sums.mutable_data_ptr<int64_t>();
  for (int64_t page = 0; page < count; page++) {
    TORCH_CHECK(
        from[page] >= 0 && from[page] < src.size(0) && to[page] >= 0 && to[page] < dst.size(0),
        "gapless: copy_pages of a page that is not there");
    int32_t* arrived = dst.mutable_data_ptr<int32_t>() + to[page] * dst.stride(0);
    std::memcpy(arrived, src.const_data_ptr<int32_t>() + from[page] * src.stride(0), words * sizeof(int32_t));
    uint64_t sum = uint64_t(totals[page]);
    for (uint32_t i = 0; i < uint32_t(words); i++) {
      const int32_t weight = int32_t((i * PAGE_FACTOR & PAGE_MASK) * 2 + 1);
      sum += uint64_t(int64_t(arrived[i]) * weight);
    }
    totals[page] = int64_t(sum);
  }
}

// The rows of a, then those of b. torch.cat has them copied by torch's threads, which then spin for a while on the cores
// that ours need: 0.07 ms of copying can cost the next product 2 ms.
Tensor join(const Tensor& a, const Tensor& b) {
  whole(a), whole(b);
  TORCH_CHECK(
      a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1) && a.dtype() == b.dtype(), "gapless: join of other shapes");
  Tensor out = at::empty({a.size(0) + b.size(0), a.size(1)}, a.options());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (const Tensor& part : {a, b}) {
    const char* from = static_cast<const char*>(part.const_data_ptr());
    const int64_t bytes = part.nbytes(), pieces = (bytes + COPIED_AT_ONCE - 1) / COPIED_AT_ONCE;
    share(pieces, pieces > 4, [&](int64_t i, bool) {
      const int64_t at = i * COPIED_AT_ONCE;
      std::memcpy(to + at, from + at, std::min(COPIED_AT_ONCE, bytes - at));
    });
    to += bytes;
  }
  return out;
}

Tensor linear_pack_wide(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "gapless: linear_pack_wide wants a contiguous matrix");
  int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed = at::empty({wide_elements(n, k)}, weight.options());
  by_dtype(weight, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    pack_wide<T>(data<T>(weight), n, k, data<T>(packed));
  });
  return packed;
}

Tensor linear_wide_op(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias) {
  int64_t m = x.size(0), k = x.size(1), stride = row_stride(x);
  TORCH_CHECK(packed.numel() == wide_elements(n, k), "gapless: linear_wide of other shapes");
  Tensor out = at::empty({m, n}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* shift = bias ? data<T>(*bias) : nullptr;
    if (std::is_same_v<T, float> && packed.scalar_type() == at::kBFloat16)
      linear_wide(data<T>(x), stride, m, data<bf16>(packed), n, k, shift, data<T>(out));
    else
      linear_wide(data<T>(x), stride, m, data<T>(packed), n, k, shift, data<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor> linear_pack_bytes(const Tensor& weight) {
  TORCH_CHECK(BYTES_HERE, "gapless: this processor has no dot product of bytes");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "gapless: linear_pack_bytes wants a contiguous matrix");
  int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed = at::empty({byte_elements(n, k)}, weight.options().dtype(at::kByte));
  Tensor scales = at::empty({round_up(n, TILE)}, weight.options());
  pack_bytes(data<float>(weight), n, k, data<uint8_t>(packed), data<float>(scales));
  return {packed, scales};
}

Tensor linear_bytes_op(const Tensor& x, const Tensor& packed, const Tensor& scales, int64_t n, const Maybe& bias) {
  TORCH_CHECK(BYTES_HERE, "gapless: this processor has no dot product of bytes");
  int64_t m = x.size(0), k = x.size(1), stride = row_stride(x);
  TORCH_CHECK(packed.numel() == byte_elements(n, k), "gapless: linear_bytes of other shapes");
  Tensor out = at::empty({m, n}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* shift = bias ? data<T>(*bias) : nullptr;
    linear_bytes(data<T>(x), stride, m, data<uint8_t>(packed), data<float>(scales), n, k, shift, data<T>(out));
  });
  return out;
}

Tensor embedding_packed(const Tensor& ids, const Tensor& packed, int64_t n, int64_t k) {
  TORCH_CHECK(packed.numel() == packed_elements(n, k), "gapless: embedding_packed of other shapes");
  for (int64_t i = 0; i < ids.size(0); i++)
    TORCH_CHECK_INDEX(longs(ids)[i] >= 0 && longs(ids)[i] < n, "gapless: there is no row ", longs(ids)[i]);
  Tensor out = at::empty({ids.size(0), k}, packed.options());
  unpack_rows(bf16s(packed), n, k, longs(ids), ids.size(0), bf16s_to(out));
  return out;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  int64_t stride = row_stride(x);
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rms_norm<T>(data<T>(x), stride, data<T>(weight), x.size(0), x.size(1), float(eps), data<T>(out));
  });
  return out;
}

Tensor add_rms_norm_op(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  whole(x), whole(delta);
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    add_rms_norm<T>(
        data<T>(x), data<T>(delta), data<T>(weight), x.size(0), x.size(1), float(eps), data<T>(out));
  });
  return out;
}

void rope_and_write_op(
    const Tensor& qkv, const Maybe& norm, double eps, const Tensor& positions, const Tensor& table, const Tensor& slots,
    const Tensor& cache, int64_t layer) {
  whole(qkv), whole(cache), whole(table);
  RopeShape shape;
  shape.tokens = qkv.size(0), shape.dim = qkv.size(2), shape.kv_heads = cache.size(4);
  shape.heads = qkv.size(1) - 2 * shape.kv_heads, shape.table_rows = table.size(0);
  shape.layers = cache.size(1), shape.page_size = cache.size(3), shape.layer = layer;
  by_dtype(qkv, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rope_and_write<T>(
        data<T>(qkv), norm ? data<T>(*norm) : nullptr, float(eps), longs(positions), table.const_data_ptr<float>(),
        longs(slots), data<T>(cache), shape);
  });
}

Tensor silu_mul_op(const Tensor& gate_up) {
  whole(gate_up);
  Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  by_dtype(gate_up, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    silu_mul<T>(data<T>(gate_up), out.size(0), out.size(1), data<T>(out));
  });
  return out;
}

void adapt_op(
    const Tensor& x, const Tensor& y, const Tensor& slots, const Tensor& down, const Tensor& up, at::IntArrayRef ends) {
  whole(y), whole(down), whole(up);
  AdapterShape shape{x.size(1), y.size(1), up.size(1), ends.data(), int64_t(ends.size())};
  TORCH_CHECK(
      down.size(1) == shape.projections * shape.rank && down.size(1) <= MOST_RANKS && down.size(2) == shape.inputs &&
          up.size(2) == shape.outputs && x.dtype() == down.dtype() && y.dtype() == up.dtype() && x.dtype() == y.dtype(),
      "gapless: adapt of other shapes");
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    adapt<T>(data<T>(x), row_stride(x), data<T>(y), longs(slots), x.size(0), data<T>(down), data<T>(up), shape);
  });
}

template <typename T>
Paged<T> paged(const Tensor& cache, const Tensor& table, int64_t layer) {
  whole(cache);
  return {data<T>(cache), cache.size(1), cache.size(3), cache.size(4), cache.size(5), layer,
          table.const_data_ptr<int32_t>(), row_stride(table)};
}

template <typename T>
Queries<T> queries(const Tensor& q) {
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == q.size(2), "gapless: queries lie otherwise");
  return {data<T>(q), q.stride(0), q.size(1)};
}

Tensor decode_attention_op(
    const Tensor& q, const Tensor& cache, int64_t layer, const Tensor& table, const Tensor& rows,
    const Tensor& kv_lens, double scale) {
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  by_dtype(q, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    decode_attention<T>(
        queries<T>(q), q.size(0), paged<T>(cache, table, layer), longs(rows), longs(kv_lens), float(scale),
        data<T>(out));
  });
  return out;
}

// INVARIANT: with the bits of decode attention, where other ways would give others.
template <bool INVARIANT>
Tensor prefill_attention_op(
    const Tensor& q, const Tensor& cache, int64_t layer, const Tensor& table, const Tensor& rows, const Tensor& starts,
    const Tensor& kv_lens, double scale, int64_t) {
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  by_dtype(q, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    auto* attend = prefill_attention<T>;
    if (!INVARIANT && floats_attend(q.size(2))) attend = prefill_attention_floats<T>;
    if constexpr (std::is_same_v<T, bf16> && !INVARIANT)
      if (amx_attends(q.size(2))) attend = prefill_attention_amx;
    attend(
        queries<T>(q), rows.size(0), paged<T>(cache, table, layer), longs(rows), longs(starts), longs(kv_lens),
        float(scale), data<T>(out));
  });
  return out;
}

Table table(const Tensor& x) {
  whole(x);
  return {x.mutable_data_ptr<int32_t>(), x.size(1)};
}

// The logits that a draw may not have: those of stop ids below a row's minimum length, and those that its mask leaves
// out, which is null where there is none.
struct Banned {
  const int32_t *mask, *stops, *end;

  explicit operator bool() const { return mask || stops != end; }
};

Banned banned(const int32_t* mask, const int32_t* state, const int32_t* own, int64_t columns) {
  bool masked = own[MASKED] && !state[LATE], early = state[LENGTH] + 1 <= own[MIN_LEN] && own[STOP_IDS] >= 0;
  return {masked ? mask : nullptr, own + STOP_IDS, own + (early ? columns : STOP_IDS)};
}

// The mask of a row after some drafts.
const int32_t* mask_of(const Tensor& masks, int64_t row, int64_t place) {
  return masks.const_data_ptr<int32_t>() + (row * masks.size(1) + place) * masks.size(2);
}

// A float32 copy of a row's logits, with what is banned at -inf.
template <typename T>
Tensor allowed(const T* logits, int64_t vocab, const Banned& banned) {
  Tensor copy = at::empty({vocab}, at::TensorOptions().dtype(at::kFloat));
  float* to = data<float>(copy);
  for (int64_t i = 0; i < vocab; i++) to[i] = to_float(logits[i]);
  if (banned.mask) leave_masked(banned.mask, to, vocab);
  for (const int32_t* stop = banned.stops; stop < banned.end; stop++)
    if (*stop >= 0 && *stop < vocab) to[*stop] = -std::numeric_limits<float>::infinity();
  return copy;
}

// A row's line of the state table, as it is when its first `place` drafts are tokens.
std::array<int32_t, CUT_ID + 1> at_place(const int32_t* state, int64_t place) {
  std::array<int32_t, CUT_ID + 1> then;
  std::copy_n(state, CUT_VALUE, then.begin());
  std::copy_n(state + CUT_VALUE + 2 * place, 2, then.begin() + CUT_VALUE);
  then[LENGTH] += int32_t(place);
  return then;
}

// A draw of one row by temperature, among what its cut keeps.
template <typename T>
int64_t drawn(const T* logits, const Best& best, int64_t vocab, const int32_t* state, const int32_t* own) {
  Cut cut{bits_of<float>(state[CUT_VALUE]), state[CUT_ID]};
  float temperature = bits_of<float>(own[TEMPERATURE]);
  Stream stream{uint32_t(state[LENGTH]), uint32_t(own[SEED_LOW]), uint32_t(own[SEED_HIGH])};
  std::vector<Contender> few = contenders(logits, vocab, best.value, temperature, cut, stream);
  if (few.size() == 1) return few[0].id;
  // torch's own logarithms: the noise is the same to the last bit wherever torch draws it.
  Tensor noise = at::empty({int64_t(few.size())}, at::TensorOptions().dtype(at::kFloat));
  float* numbers = data<float>(noise);
  for (size_t i = 0; i < few.size(); i++) numbers[i] = -few[i].uniform;
  noise.log1p_().neg_().log_();
  auto score = [&](size_t i) { return (to_float(logits[few[i].id]) - best.value) / temperature - numbers[i]; };
  size_t chosen = 0;
  for (size_t i = 1; i < few.size(); i++)
    if (score(i) > score(chosen)) chosen = i;
  return few.at(chosen).id;
}

template <typename T>
std::pair<int64_t, bool> sampled(const T* logits, int64_t vocab, const int32_t* state, const int32_t* own) {
  Best best = best_of(logits, vocab);
  bool hot = best.finite && bits_of<float>(own[TEMPERATURE]) > 0;
  return {hot ? drawn(logits, best, vocab, state, own) : best.index, best.finite};
}

std::tuple<Tensor, Tensor> sample_op(
    const Tensor& logits, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& masks,
    const Maybe& adjusted) {
  whole(logits), whole(rows), whole(masks);
  int64_t count = logits.size(0), vocab = logits.size(1), batch = std::max<int64_t>(1, rows.size(0));
  int64_t places = count / batch;
  Tensor tokens = at::empty({count}, rows.options().dtype(at::kLong));
  Tensor finite = at::empty({count}, rows.options().dtype(at::kBool));
  int64_t* token = data<int64_t>(tokens);
  bool* is_finite = data<bool>(finite);
  const int32_t* row = rows.const_data_ptr<int32_t>();
  Table lines = table(state), settings = table(params);
  auto hot = [&](int32_t r) { return bits_of<float>(settings.row(r)[TEMPERATURE]) > 0; };
  bool random = std::any_of(row, row + rows.size(0), hot);
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    share(count, count * vocab > (random ? 1 << 14 : 1 << 17), [&](int64_t i, bool) {
      // A thread of ours or the caller's: torch shall not share out what is one thread's part already.
      c10::ParallelGuard alone(true);
      c10::InferenceMode plain;
      const int32_t *now = lines.row(row[i % batch]), *own = settings.row(row[i % batch]);
      int64_t place = i / batch;
      token[i] = 0, is_finite[i] = true;
      if (place > drafts_of(now, places)) return;
      auto then = at_place(now, place);
      const int32_t* line = then.data();
      auto draw = [&](const auto* logits) {
        Tensor copy;
        if (auto some = banned(mask_of(masks, row[i % batch], place), line, own, settings.columns))
          copy = allowed(logits, vocab, some);
        std::tie(token[i], is_finite[i]) = copy.defined() ? sampled(data<float>(copy), vocab, line, own)
                                                          : sampled(logits, vocab, line, own);
      };
      if (adjusted && own[ADJUST_SLOT])
        draw(adjusted->const_data_ptr<float>() + (place * adjusted->size(1) + own[ADJUST_SLOT]) * vocab);
      else
        draw(all + i * vocab);
    });
  });
  return {tokens, finite};
}

void ask_op(const Tensor& rows, const Tensor& state, const Tensor& params, int64_t drafts) {
  for (int64_t i = 0; i < rows.size(0); i++) {
    int32_t *line = table(state).row(ints(rows)[i]), *own = table(params).row(ints(rows)[i]);
    int32_t room = std::min(own[DRAFTS], own[MAX_LEN] - 1 - line[LENGTH]);
    line[DRAFTED] = line[LENGTH] + std::clamp(room, 0, int32_t(drafts));
  }
}

// Logits of all tokens, of some: those that `ids` names, or all.
template <typename T>
Tensor spread(const T* logits, int64_t count, const int64_t* ids, int64_t vocab) {
  Tensor all = at::empty({vocab}, at::TensorOptions().dtype(at::kFloat));
  float* to = data<float>(all);
  std::fill_n(to, vocab, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i++) to[ids ? ids[i] : i] = to_float(logits[i]);
  return all;
}

Tensor draft_op(
    const Tensor& logits, const Maybe& ids, const Tensor& rows, const Tensor& state, const Tensor& params,
    int64_t place, int64_t vocab) {
  whole(logits);
  int64_t count = logits.size(0), some = logits.size(1);
  TORCH_CHECK(
      rows.size(0) == count && some > 0 && some <= vocab && (ids ? ids->size(0) : vocab) == some,
      "gapless: draft of other shapes");
  const int64_t *named = ids ? longs(*ids) : nullptr, *row = longs(rows);
  Tensor tokens = at::empty({count}, rows.options());
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(count, count * some > 1 << 14, [&](int64_t i, bool) {
      c10::ParallelGuard alone(true);
      c10::InferenceMode plain;
      const int32_t* own = table(params).row(row[i]);
      auto line = at_place(table(state).row(row[i]), place);
      line[CUT_VALUE] = bits_of<int32_t>(-std::numeric_limits<float>::infinity());
      line[CUT_ID] = std::numeric_limits<int32_t>::max();
      const T* drafted = data<T>(logits) + i * some;
      Banned stops = banned(nullptr, line.data(), own, params.size(1));
      int64_t* token = data<int64_t>(tokens) + i;
      bool greedy = bits_of<float>(own[TEMPERATURE]) <= 0;
      if (!stops && (!named || greedy)) {
        *token = sampled(drafted, some, line.data(), own).first;
        if (named) *token = named[*token];
        return;
      }
      Tensor all = allowed(data<float>(spread(drafted, some, named, vocab)), vocab, stops);
      *token = sampled(data<float>(all), vocab, line.data(), own).first;
    });
  });
  return tokens;
}

void keep_drafts_op(
    const Tensor& ids, const Tensor& positions, const Tensor& rows, const Tensor& slots, const Tensor& history) {
  for (int64_t i = 0; i < ids.size(0); i++) {
    bool real = longs(slots)[i] > 0;
    table(history).row(real ? longs(rows)[i] : 0)[real ? longs(positions)[i] : 0] = int32_t(longs(ids)[i]);
  }
}

void adjust_op(
    const Tensor& logits, const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params,
    const Tensor& history, const Tensor& wishes, const Tensor& counts, const Tensor& counted, const Tensor& adjusted) {
  whole(logits), whole(index), whole(rows), whole(adjusted);
  int64_t vocab = logits.size(1), batch = rows.size(0), places = logits.size(0) / batch, last = -1;
  std::vector<std::pair<int64_t, Asking>> asking;
  for (int64_t i = 0; i < index.size(0); i++) {
    int64_t sample = index.const_data_ptr<int32_t>()[i], row = rows.const_data_ptr<int32_t>()[sample];
    const int32_t *own = table(params).row(row), *now = table(state).row(row);
    int64_t slot = own[ADJUST_SLOT];
    if (slot == 0 || last == sample) continue;  // padding
    last = sample;
    for (int64_t place = 0; place <= drafts_of(now, places); place++)
      asking.push_back(
          {place * batch + sample,
           {now, own, table(history).row(row), table(wishes).row(slot), table(counts).row(slot),
            table(counted).row(slot), data<float>(adjusted) + (place * adjusted.size(1) + slot) * vocab, place}});
  }
  constexpr int64_t PIECE = 1 << 15;
  int64_t pieces = (vocab + PIECE - 1) / PIECE, count = int64_t(asking.size());
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    for (const auto& one : asking) count_tokens(one.second);
    share(count * pieces, count * vocab > 1 << 16, [&](int64_t i, bool) {
      const auto& [sample, row] = asking[i / pieces];
      int64_t first = i % pieces * PIECE;
      penalize(all + sample * vocab, first, std::min(PIECE, vocab - first), row);
    });
    for (const auto& [sample, row] : asking) apply_lists(all + sample * vocab, vocab, row);
  });
}

// The listed rows that get masks, each with its sample, once.
std::vector<std::pair<int64_t, Masked>> masked_rows(
    const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& mail) {
  whole(index), whole(rows);
  TORCH_CHECK(row_stride(mail) % 2 == 0, "gapless: a tag is one int64");
  std::vector<std::pair<int64_t, Masked>> found;
  for (int64_t i = 0; i < index.size(0); i++) {
    int64_t sample = index.const_data_ptr<int32_t>()[i], row = rows.const_data_ptr<int32_t>()[sample];
    if (!table(params).row(row)[MASKED] || (!found.empty() && found.back().first == sample)) continue;  // padding
    int32_t* own = table(state).row(row);
    int32_t* drafts = table(history).row(row) + own[LENGTH];
    found.push_back({sample, {own, drafts, data<int32_t>(mail) + row * mail.stride(0)}});
  }
  return found;
}

void mask_op(
    const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& masks, const Tensor& mail, int64_t places) {
  whole(masks);
  int64_t words = masks.size(2);
  TORCH_CHECK(mail.size(1) >= MAIL_MASK + places * words, "gapless: a mask does not fit into the mail");
  for (const auto& [sample, row] : masked_rows(index, rows, state, params, history, mail)) {
    int64_t line = rows.const_data_ptr<int32_t>()[sample];
    mask(row, {data<int32_t>(masks) + line * masks.stride(0), words, places});
  }
}

void reply_op(
    const Tensor& index, const Tensor& rows, const Tensor& tokens, const Tensor& state, const Tensor& params,
    const Tensor& history, const Tensor& mail, int64_t drafts, int64_t most) {
  whole(tokens);
  int64_t width = tokens.size(1);
  for (const auto& [sample, row] : masked_rows(index, rows, state, params, history, mail)) {
    const int32_t* given = tokens.const_data_ptr<int32_t>() + sample * width;
    if (most) expect(row, table(params).row(rows.const_data_ptr<int32_t>()[sample]), given, width, most);
    reply(row, given, width, drafts);
  }
}

void cut_op(
    const Tensor& logits, const Tensor& index, const Tensor& rows, const Tensor& state, const Tensor& params,
    const Tensor& masks) {
  whole(logits), whole(index), whole(rows), whole(masks);
  int64_t count = index.size(0), vocab = logits.size(1), batch = rows.size(0);
  const int32_t *sampled = index.const_data_ptr<int32_t>(), *row = rows.const_data_ptr<int32_t>();
  Table lines = table(state), settings = table(params);
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* all = data<T>(logits);
    share(count, count * vocab > 1 << 13, [&](int64_t i, bool) {
      int32_t own = row[sampled[i] % batch];
      int64_t place = sampled[i] / batch;
      if (own == 0 || (i && sampled[i] == sampled[i - 1])) return;  // padding
      if (place > drafts_of(lines.row(own), place + 1)) return;
      c10::InferenceMode plain;
      auto then = at_place(lines.row(own), place);
      int32_t *line = then.data(), *asked = settings.row(own);
      auto real = [&](int column) { return bits_of<float>(asked[column]); };
      Filters filters{real(TEMPERATURE), asked[TOP_K], real(TOP_P), real(MIN_P)};
      const T* logits = all + sampled[i] * vocab;
      bool spread = count == 1 && vocab > 1 << 15;  // a row of its own has the threads that others would have
      Tensor copy;
      if (auto some = banned(mask_of(masks, own, place), line, asked, settings.columns))
        copy = allowed(logits, vocab, some);
      Cut cut = copy.defined() ? cut_of(data<float>(copy), vocab, filters, spread)
                               : cut_of(logits, vocab, filters, spread);
      int32_t* found = lines.row(own) + CUT_VALUE + 2 * place;
      found[0] = bits_of<int32_t>(cut.value), found[1] = cut.id;
    });
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> begin_decode_op(
    const Tensor& words, int64_t count, int64_t places, int64_t writes, const Tensor& state, const Tensor& history,
    const Tensor& pages, int64_t page_size) {
  whole(words);
  auto fresh = [&] { return at::empty({count * places}, words.options().dtype(at::kLong)); };
  Tensor rows = fresh(), ids = fresh(), positions = fresh(), slots = fresh(), kv_lens = fresh();
  auto to = [](const Tensor& x) { return data<int64_t>(x); };
  begin_decode(
      words.const_data_ptr<int32_t>(), count, places, writes, table(state), table(history), table(pages), page_size,
      {to(rows), to(ids), to(positions), to(slots), to(kv_lens)});
  return {rows, ids, positions, slots, kv_lens};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> begin_mixed_op(
    const Tensor& words, int64_t count, int64_t decode, int64_t writes, int64_t admissions, int64_t tokens,
    int64_t places, const Tensor& state, const Tensor& params, const Tensor& history, const Tensor& pages,
    int64_t page_size) {
  whole(words);
  auto fresh = [&](int64_t size) { return at::empty({size}, words.options().dtype(at::kLong)); };
  int64_t batch = count + decode * (places - 1);
  Tensor rows = fresh(batch), last = fresh(batch), kv_lens = fresh(batch);
  Tensor starts = fresh(batch + 1), ids = fresh(tokens), positions = fresh(tokens), slots = fresh(tokens);
  auto to = [](const Tensor& x) { return data<int64_t>(x); };
  begin_mixed(
      words.const_data_ptr<int32_t>(), {count, decode, writes, admissions, tokens, places}, table(state),
      table(params),
      table(history), table(pages), page_size,
      {to(rows), to(last), to(kv_lens), to(starts), to(ids), to(positions), to(slots)});
  return {rows, last, kv_lens, starts, ids, positions, slots};
}

void finish_op(
    const Tensor& words, const Tensor& rows, const Maybe& sizes, const Tensor& tokens, const Tensor& finite,
    const Tensor& state, const Tensor& params, const Tensor& history, const Tensor& lines, const Tensor& out) {
  whole(words), whole(finite), whole(out);
  Finished step{data<int32_t>(words), ints(rows), sizes ? ints(*sizes) : nullptr, rows.size(0), tokens.size(0),
                tokens.size(1), longs(tokens), finite.const_data_ptr<bool>()};
  finish(
      step, table(state), table(params), table(history), table(lines).data, lines.size(0), lines.size(1),
      data<int32_t>(out));
}

Tensor accept_op(
    const Tensor& tokens, const Tensor& finite, const Tensor& rows, const Tensor& state, const Tensor& history,
    int64_t width) {
  whole(tokens), whole(finite);
  int64_t count = rows.size(0);
  Tensor out = at::empty({count, width}, tokens.options());
  accept(
      longs(tokens), finite.const_data_ptr<bool>(), ints(rows), count, count ? tokens.size(0) / count : 1, table(state),
      table(history), data<int64_t>(out), width);
  return out;
}

Tensor look_up_op(
    const Tensor& rows, const Tensor& state, const Tensor& params, const Tensor& history, int64_t most,
    int64_t shortest, int64_t longest) {
  Tensor same = at::empty({rows.size(0)}, rows.options());
  look_up(
      ints(rows), rows.size(0), table(state), table(params), table(history), {most, shortest, longest},
      data<int32_t>(same));
  return same;
}

Suffixes suffixes(const Tensor& table) {
  whole(table);
  return {data<int32_t>(table), table.size(0), table.size(1)};
}

void remember_op(
    const Tensor& rows, const Tensor& tokens, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& noted) {
  whole(tokens);
  remember(
      ints(rows), rows.size(0), ints(tokens), tokens.size(1), {table(state), table(params), table(history)},
      suffixes(noted));
}

void recall_op(
    const Tensor& rows, const Tensor& same, const Tensor& state, const Tensor& params, const Tensor& history,
    const Tensor& noted, int64_t most, int64_t factor, int64_t least) {
  recall(
      ints(rows), rows.size(0), ints(same), {table(state), table(params), table(history)}, suffixes(noted),
      {most, factor, least});
}

void score_op(
    const Tensor& logits, const Tensor& index, const Tensor& words, const Tensor& tokens, const Tensor& state,
    const Tensor& outboxes, int64_t start, int64_t width) {
  whole(logits), whole(words), whole(tokens);
  Table boxes = table(outboxes);
  int64_t slot = (words.const_data_ptr<int32_t>()[PACKET_SLOT] - 1 + outboxes.size(0)) % outboxes.size(0);
  TORCH_CHECK(
      start + index.size(0) * (SCORE_TOP + 2 * width) <= boxes.columns, "gapless: scores do not fit into an outbox");
  by_dtype(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    Scored<T> step{data<T>(logits), logits.size(1), ints(index), index.size(0), ints(words) + HEADER_WORDS,
                   ints(tokens), tokens.size(0), tokens.size(1)};
    score(step, table(state), width, boxes.row(slot) + start);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("has_bf16_dot() -> bool", [] { return LINEAR_HERE; });
  m.def("amx_missing() -> str", [] { return amx_missing(); });
  m.def("linear_pack(Tensor weight) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, int n, Tensor? bias, bool amx) -> Tensor");
  m.def("linear_packed_to(Tensor x, Tensor packed, int n, Tensor? bias, bool amx, Tensor(a!) out) -> ()");
  m.def("join(Tensor a, Tensor b) -> Tensor");
  m.def("copy_pages(Tensor src, Tensor(a!) dst, Tensor places, Tensor(b!) sums) -> ()");
  m.def("linear_pack_wide(Tensor weight) -> Tensor");
  m.def("linear_wide(Tensor x, Tensor packed, int n, Tensor? bias) -> Tensor");
  m.def("has_byte_dot() -> bool", [] { return BYTES_HERE; });
  m.def("linear_pack_bytes(Tensor weight) -> (Tensor, Tensor)");
  m.def("linear_bytes(Tensor x, Tensor packed, Tensor scales, int n, Tensor? bias) -> Tensor");
  m.def("embedding_packed(Tensor ids, Tensor packed, int n, int k) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  m.def(
      "rope_and_write(Tensor(a!) qkv, Tensor? qk_norm, float eps, Tensor positions, Tensor table, Tensor slots, "
      "Tensor(b!) cache, int layer) -> ()");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("adapt(Tensor x, Tensor(a!) y, Tensor slots, Tensor down, Tensor up, int[] ends) -> ()");
  m.def(
      "decode_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor rows, Tensor kv_lens, "
      "float scale) -> Tensor");
  m.def(
      "prefill_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor rows, Tensor starts, "
      "Tensor kv_lens, float scale, int max_query) -> Tensor");
  m.def(
      "invariant_prefill_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor rows, Tensor starts, "
      "Tensor kv_lens, float scale, int max_query) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor rows, Tensor state, Tensor params, Tensor masks, Tensor? adjusted) -> "
      "(Tensor, Tensor)");
  m.def(
      "adjust(Tensor logits, Tensor index, Tensor rows, Tensor state, Tensor params, Tensor history, Tensor wishes, "
      "Tensor(a!) counts, Tensor(b!) counted, Tensor(c!) adjusted) -> ()");
  m.def(
      "mask(Tensor index, Tensor rows, Tensor(a!) state, Tensor params, Tensor history, Tensor(b!) masks, "
      "Tensor mail, int places) -> ()");
  m.def(
      "reply(Tensor index, Tensor rows, Tensor tokens, Tensor(a!) state, Tensor params, Tensor(b!) history, "
      "Tensor(c!) mail, int drafts, int most) -> ()");
  m.def("ask(Tensor rows, Tensor(a!) state, Tensor params, int drafts) -> ()");
  m.def(
      "draft(Tensor logits, Tensor? ids, Tensor rows, Tensor state, Tensor params, int place, int vocab) -> Tensor");
  m.def("keep_drafts(Tensor ids, Tensor positions, Tensor rows, Tensor slots, Tensor(a!) history) -> ()");
  m.def("cut(Tensor logits, Tensor index, Tensor rows, Tensor(a!) state, Tensor params, Tensor masks) -> ()");
  m.def(
      "begin_decode(Tensor words, int count, int places, int writes, Tensor state, Tensor history, Tensor(a!) pages, "
      "int page_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "begin_mixed(Tensor words, int count, int decode, int writes, int admissions, int tokens, int places, "
      "Tensor(a!) state, "
      "Tensor(b!) params, Tensor(c!) history, Tensor(d!) pages, int page_size) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "finish(Tensor(a!) words, Tensor rows, Tensor? sizes, Tensor tokens, Tensor finite, Tensor(b!) state, "
      "Tensor params, Tensor(c!) history, Tensor(d!) lines, Tensor(e!) out) -> ()");
  m.def("accept(Tensor tokens, Tensor finite, Tensor rows, Tensor state, Tensor history, int width) -> Tensor");
  m.def(
      "look_up(Tensor rows, Tensor(a!) state, Tensor params, Tensor(b!) history, int most, int shortest, int longest) "
      "-> Tensor");
  m.def(
      "remember(Tensor rows, Tensor tokens, Tensor state, Tensor params, Tensor history, Tensor(a!) suffixes) -> ()");
  m.def(
      "recall(Tensor rows, Tensor same, Tensor(a!) state, Tensor params, Tensor(b!) history, Tensor suffixes, "
      "int most, int factor, int least) -> ()");
  m.def(
      "score(Tensor logits, Tensor index, Tensor words, Tensor tokens, Tensor state, Tensor(a!) outboxes, int start, "
      "int width) -> ()");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("linear_pack", linear_pack);
  m.impl("linear_packed", linear_packed);
  m.impl("linear_packed_to", linear_packed_to);
  m.impl("join", join);
  m.impl("copy_pages", copy_pages);
  m.impl("linear_pack_wide", linear_pack_wide);
  m.impl("linear_wide", linear_wide_op);
  m.impl("linear_pack_bytes", linear_pack_bytes);
  m.impl("linear_bytes", linear_bytes_op);
  m.impl("embedding_packed", embedding_packed);
  m.impl("rms_norm", rms_norm_op);
  m.impl("add_rms_norm", add_rms_norm_op);
  m.impl("rope_and_write", rope_and_write_op);
  m.impl("silu_mul", silu_mul_op);
  m.impl("adapt", adapt_op);
  m.impl("decode_attention", decode_attention_op);
  m.impl("prefill_attention", prefill_attention_op<false>);
  m.impl("invariant_prefill_attention", prefill_attention_op<true>);
  m.impl("sample", sample_op);
  m.impl("adjust", adjust_op);
  m.impl("mask", mask_op);
  m.impl("reply", reply_op);
  m.impl("ask", ask_op);
  m.impl("draft", draft_op);
  m.impl("keep_drafts", keep_drafts_op);
  m.impl("cut", cut_op);
  m.impl("begin_decode", begin_decode_op);
  m.impl("begin_mixed", begin_mixed_op);
  m.impl("finish", finish_op);
  m.impl("accept", accept_op);
  m.impl("look_up", look_up_op);
  m.impl("remember", remember_op);
  m.impl("recall", recall_op);
  m.impl("score", score_op);
}

}  // namespace gapless
