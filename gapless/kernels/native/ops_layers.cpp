// The operators of what a layer does beside its products: norms, rotation, activation, adapters, attention.
#include <algorithm>
#include <cstring>

#include "adapt.h"
#include "amx.h"
#include "attention.h"
#include "elementwise.h"
#include "ops.h"
#include "parallel.h"

namespace gapless {
namespace {

constexpr int64_t COPIED_AT_ONCE = 1 << 16;  // bytes

// The rows of a, then of b. torch.cat copies on torch's threads, which then spin for a while on the cores that ours
// need: 0.07 ms of copying can cost the next product 2 ms.
Tensor join(const Tensor& a, const Tensor& b) {
  whole(a), whole(b);
  fits(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1) && a.dtype() == b.dtype(), "join");
  Tensor out = at::empty({a.size(0) + b.size(0), a.size(1)}, a.options());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (const Tensor& part : {a, b}) {
    const char* from = static_cast<const char*>(part.const_data_ptr());
    const int64_t bytes = part.nbytes(), pieces = (bytes + COPIED_AT_ONCE - 1) / COPIED_AT_ONCE;
    share(pieces, pieces / 5, [&](int64_t i, bool) {
      const int64_t at = i * COPIED_AT_ONCE;
      std::memcpy(to + at, from + at, std::min(COPIED_AT_ONCE, bytes - at));
    });
    to += bytes;
  }
  return out;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  whole(weight);
  fits(x.dim() == 2 && weight.numel() == x.size(1), "rms_norm");
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  int64_t stride = row_stride(x);
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rms_norm<T>(data<T>(x), stride, data<float>(weight), x.size(0), x.size(1), float(eps), data<T>(out));
  });
  return out;
}

Tensor layer_norm_op(const Tensor& x, const Maybe& weight, const Maybe& bias, double eps) {
  for (const Maybe& part : {weight, bias})
    if (part) {
      whole(*part);
      fits(x.dim() == 2 && part->numel() == x.size(1), "layer_norm");
    }
  fits(x.dim() == 2, "layer_norm");
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  int64_t stride = row_stride(x);
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    layer_norm<T>(
        data<T>(x), stride, weight ? data<float>(*weight) : nullptr, bias ? data<float>(*bias) : nullptr, x.size(0),
        x.size(1), float(eps), data<T>(out));
  });
  return out;
}

Tensor add_rms_norm_op(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  whole(x), whole(delta), whole(weight);
  fits(x.dim() == 2 && delta.sizes() == x.sizes() && weight.numel() == x.size(1), "add_rms_norm");
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    add_rms_norm<T>(
        data<T>(x), data<T>(delta), data<float>(weight), x.size(0), x.size(1), float(eps), data<T>(out));
  });
  return out;
}

// Whether this is a cache of heads of `dim` numbers that has the layer: [pages, layers, 2, page_size, kv_heads, dim],
// of k8v4 [pages, layers, 1, page_size, kv_heads, dim * 3 / 2 + 4]. Scales [layers, 2] come with fewer bits alone.
bool is_cache(const Tensor& cache, int64_t layer, const Maybe& scales, int64_t dim) {
  const bool nibbles = cache.scalar_type() == at::kByte, fewer = nibbles || cache.scalar_type() == at::kFloat8_e4m3fn;
  return cache.dim() == 6 && cache.size(2) == (nibbles ? 1 : 2) && cache.numel() > 0 && layer >= 0 &&
         layer < cache.size(1) && cache.size(5) == (nibbles ? dim / 2 * 3 + 4 : dim) && (!nibbles || dim % 2 == 0) &&
         scales.has_value() == fewer &&
         (!scales || (scales->is_contiguous() && scales->dim() == 2 && scales->size(0) == cache.size(1) &&
                      scales->size(1) == 2));
}

// Calls body(cache) with the pointer of a cache, by what it stores: numbers of T, or fewer bits.
template <typename T, typename Body>
void by_stored(const Tensor& cache, const Body& body) {
  whole(cache);
  if (cache.scalar_type() == at::kFloat8_e4m3fn) body(static_cast<e4m3*>(cache.mutable_data_ptr()));
  else if (cache.scalar_type() == at::kByte) body(static_cast<k8v4*>(cache.mutable_data_ptr()));
  else body(data<T>(cache));
}

struct Scales {
  float key = 1, value = 1;
};

// Values of k8v4 have their own.
Scales scales_of(const Tensor& cache, int64_t layer, const Maybe& scales) {
  if (!scales) return {};
  const float* own = scales->const_data_ptr<float>() + 2 * layer;
  return {own[0], cache.scalar_type() == at::kByte ? 1 : own[1]};
}

Tensor angles_op(const Tensor& positions, const Tensor& table) {
  whole(table);
  fits(table.dim() == 2 && table.size(0) > 0 && positions.dim() == 1, "angles");
  Tensor out = at::empty({positions.size(0), table.size(1)}, table.options());
  angles(
      longs(positions), positions.size(0), table.const_data_ptr<float>(), table.size(0), table.size(1),
      data<float>(out));
  return out;
}

void rope_and_write_op(
    const Tensor& qkv, const Maybe& norm, double eps, const Tensor& angles, const Tensor& slots, const Tensor& cache,
    int64_t layer, const Maybe& scales) {
  whole(qkv);
  fits(
      qkv.dim() == 3 && is_cache(cache, layer, scales, qkv.size(2)) && qkv.size(1) > 2 * cache.size(4) &&
          angles.dim() == 2 && angles.size(0) == qkv.size(0) && angles.size(1) == qkv.size(2) &&
          qkv.size(2) % 2 == 0 && slots.numel() == qkv.size(0),
      "rope_and_write");
  if (norm) {
    whole(*norm);
    fits(norm->numel() == (qkv.size(1) - cache.size(4)) * qkv.size(2), "rope_and_write");
  }
  RopeShape shape;
  shape.tokens = qkv.size(0), shape.dim = qkv.size(2), shape.kv_heads = cache.size(4);
  shape.heads = qkv.size(1) - 2 * shape.kv_heads, shape.angles_stride = row_stride(angles);
  shape.layers = cache.size(1), shape.page_size = cache.size(3), shape.layer = layer;
  const auto [key_scale, value_scale] = scales_of(cache, layer, scales);
  shape.key_scale = key_scale, shape.value_scale = value_scale;
  by_dtype(qkv, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    by_stored<T>(cache, [&](auto* stored) {
      rope_and_write(
          data<T>(qkv), norm ? data<float>(*norm) : nullptr, float(eps), angles.const_data_ptr<float>(), longs(slots),
          stored, shape);
    });
  });
}

Tensor activate_op(const Tensor& x, int64_t kind, bool gated) {
  whole(x);
  fits(x.dim() == 2 && (!gated || x.size(1) % 2 == 0) && kind >= SILU && kind <= RELU2, "activate");
  Tensor out = at::empty({x.size(0), x.size(1) / (gated ? 2 : 1)}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    activate<T>(data<T>(x), out.size(0), out.size(1), Activation(kind), gated, data<T>(out));
  });
  return out;
}

void adapt_op(
    const Tensor& x, const Tensor& y, const Tensor& slots, const Tensor& down, const Tensor& up, at::IntArrayRef ends) {
  whole(y), whole(down), whole(up);
  fits(
      x.dim() == 2 && y.dim() == 2 && down.dim() == 3 && up.dim() == 3 && y.size(0) == x.size(0) &&
          slots.numel() == x.size(0) && down.size(0) == up.size(0),
      "adapt");
  AdapterShape shape{x.size(1), y.size(1), up.size(1), ends.data(), int64_t(ends.size())};
  fits(
      down.size(1) == shape.projections * shape.rank && down.size(1) <= MOST_RANKS && down.size(2) == shape.inputs &&
          up.size(2) == shape.outputs && x.dtype() == down.dtype() && y.dtype() == up.dtype() && x.dtype() == y.dtype(),
      "adapt");
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    adapt<T>(data<T>(x), row_stride(x), data<T>(y), longs(slots), x.size(0), data<T>(down), data<T>(up), shape);
  });
}

// Raises where the queries do not fit the cache, or a row's entries its line of the page table.
void check_attention(
    const char* op, const Tensor& q, const Tensor& cache, int64_t layer, const Tensor& table, const Maybe& scales,
    const Tensor& rows, const Tensor& kv_lens) {
  fits(
      q.dim() == 3 && is_cache(cache, layer, scales, q.size(2)) && q.size(1) % cache.size(4) == 0 &&
          table.dim() == 2 && kv_lens.numel() == rows.numel(),
      op);
  const int64_t room = table.size(1) * cache.size(3), *row = longs(rows), *length = longs(kv_lens);
  for (int64_t i = 0; i < rows.numel(); i++)
    TORCH_CHECK(
        row[i] >= 0 && row[i] < table.size(0) && length[i] <= room, "gapless: ", op, ": row ", row[i], " has ",
        length[i], " entries, and the page table ", table.size(0), " rows of ", room);
}

// Calls body(Paged) for heads of `dim` numbers of T.
template <typename T, typename Body>
void by_pages(const Tensor& cache, const Tensor& table, int64_t layer, int64_t dim, const Body& body) {
  by_stored<T>(cache, [&](auto* stored) {
    using S = std::remove_pointer_t<decltype(stored)>;
    body(Paged<S>{stored, cache.size(1), cache.size(3), cache.size(4), dim, layer, table.const_data_ptr<int32_t>(),
                  row_stride(table)});
  });
}

template <typename T>
Queries<T> queries(const Tensor& q) {
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == q.size(2), "gapless: queries lie otherwise");
  return {data<T>(q), q.stride(0), q.size(1)};
}

// The arguments of a layer's attention with `heads` queries a token, checked. A key's scale multiplies the scores.
Attend attend_of(
    const char* op, const Scales& scales, double scale, int64_t reach, int64_t size, double softcap,
    const Maybe& sinks, int64_t heads) {
  fits(
      reach >= 0 && reach <= int64_t(Reach::CHUNK) && (size > 0 || reach == int64_t(Reach::CAUSAL)) &&
          scale > 0 && softcap >= 0 && (!sinks || (sinks->is_contiguous() && sinks->numel() == heads)),
      op);
  const float* logits = sinks ? sinks->const_data_ptr<float>() : nullptr;
  return {float(scale) * scales.key, Reach(reach), size, float(softcap), logits, scales.value};
}

Tensor decode_attention_op(
    const Tensor& q, const Tensor& cache, int64_t layer, const Tensor& table, const Maybe& scales, const Tensor& rows,
    const Tensor& kv_lens, double scale, int64_t reach, int64_t size, double softcap, const Maybe& sinks) {
  const char* op = "decode_attention";
  check_attention(op, q, cache, layer, table, scales, rows, kv_lens);
  const Attend attend =
      attend_of(op, scales_of(cache, layer, scales), scale, reach, size, softcap, sinks, q.size(1));
  fits(rows.numel() == q.size(0), op);
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  by_dtype(q, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const Batch batch{q.size(0), longs(rows), longs(kv_lens)};
    by_pages<T>(cache, table, layer, q.size(2), [&](const auto& kv) {
      decode_attention(queries<T>(q), batch, kv, attend, data<T>(out));
    });
  });
  return out;
}

// INVARIANT: with the bits of decode attention, which faster ways would change.
template <bool INVARIANT>
Tensor prefill_attention_op(
    const Tensor& q, const Tensor& cache, int64_t layer, const Tensor& table, const Maybe& scales, const Tensor& rows,
    const Tensor& starts, const Tensor& kv_lens, const Maybe& spans, double scale, int64_t reach, int64_t size,
    double softcap, const Maybe& sinks, int64_t) {
  const char* op = "prefill_attention";
  check_attention(op, q, cache, layer, table, scales, rows, kv_lens);
  fits(
      starts.numel() == rows.numel() + 1 && longs(starts)[rows.numel()] <= q.size(0) &&
          (!spans || (spans->dim() == 2 && spans->size(0) == q.size(0) && spans->size(1) == 2)),
      op);
  const Attend attend =
      attend_of(op, scales_of(cache, layer, scales), scale, reach, size, softcap, sinks, q.size(1));
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  by_dtype(q, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const Batch batch{rows.size(0), longs(rows), longs(kv_lens), longs(starts), spans ? ints(*spans) : nullptr};
    by_pages<T>(cache, table, layer, q.size(2), [&]<typename S>(const Paged<S>& kv) {
      auto* prefill = prefill_attention<T, S>;
      if (!INVARIANT && floats_attend<T>(q.size(2))) prefill = prefill_attention_floats<T, S>;
      if constexpr (std::is_same_v<T, bf16> && !INVARIANT)
        if (amx_attends(q.size(2))) prefill = prefill_attention_amx<S>;
      prefill(queries<T>(q), batch, kv, attend, data<T>(out));
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("floats_attend(int dim) -> bool", [](int64_t dim) { return floats_attend<bf16>(dim); });
  m.def("join(Tensor a, Tensor b) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  m.def("angles(Tensor positions, Tensor table) -> Tensor");
  m.def(
      "rope_and_write(Tensor(a!) qkv, Tensor? qk_norm, float eps, Tensor angles, Tensor slots, Tensor(b!) cache, "
      "int layer, Tensor? scales) -> ()");
  m.def("activate(Tensor x, int kind, bool gated) -> Tensor");
  m.def("adapt(Tensor x, Tensor(a!) y, Tensor slots, Tensor down, Tensor up, int[] ends) -> ()");
  m.def(
      "decode_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor? scales, Tensor rows, "
      "Tensor kv_lens, float scale, int reach=0, int size=0, float softcap=0.0, Tensor? sinks=None) -> Tensor");
  m.def(
      "prefill_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor? scales, Tensor rows, "
      "Tensor starts, Tensor kv_lens, Tensor? spans, float scale, int reach, int size, float softcap, Tensor? sinks, "
      "int max_query) -> Tensor");
  m.def(
      "invariant_prefill_attention(Tensor q, Tensor cache, int layer, Tensor page_table, Tensor? scales, Tensor rows, "
      "Tensor starts, Tensor kv_lens, Tensor? spans, float scale, int reach, int size, float softcap, Tensor? sinks, "
      "int max_query) -> Tensor");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("join", join);
  m.impl("rms_norm", rms_norm_op);
  m.impl("layer_norm", layer_norm_op);
  m.impl("add_rms_norm", add_rms_norm_op);
  m.impl("angles", angles_op);
  m.impl("rope_and_write", rope_and_write_op);
  m.impl("activate", activate_op);
  m.impl("adapt", adapt_op);
  m.impl("decode_attention", decode_attention_op);
  m.impl("prefill_attention", prefill_attention_op<false>);
  m.impl("invariant_prefill_attention", prefill_attention_op<true>);
}

}  // namespace gapless
