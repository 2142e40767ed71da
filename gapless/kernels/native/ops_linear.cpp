// The operators of products.
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <array>

#include "amx.h"
#include "bytes.h"
#include "fp8.h"
#include "linear.h"
#include "ops.h"
#include "parallel.h"
#include "peak.h"

namespace gapless {
namespace {

// Which product: the same numbers are in choice.py.
enum Path { FLOATS, DOTS, AMX };

bool fits_bias(const Maybe& bias, int64_t n) { return !bias || (bias->is_contiguous() && bias->numel() == n); }

void fits_out(const Tensor& x, int64_t n, const Tensor& out) {
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == at::IntArrayRef({x.size(0), n}) && out.dtype() == x.dtype(),
      "gapless: a product to another shape or dtype");
}

Tensor linear_pack(const Tensor& weight) {
  whole(weight);
  TORCH_CHECK(weight.dim() == 2, "gapless: linear_pack wants a matrix");
  const int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed;
  by_dtype(weight, [&](auto* t) {
    using W = std::remove_pointer_t<decltype(t)>;
    packed = at::empty({packed_elements<W>(n, k)}, weight.options());
    pack(data<W>(weight), n, k, data<W>(packed));
  });
  return packed;
}

// By the units that multiply bfloat16.
void multiply_pairs(
    const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, int64_t path, const Tensor& out) {
  TORCH_CHECK(DOTS_HERE, "gapless: this processor has no bfloat16 dot product");
  TORCH_CHECK(path != AMX || amx_missing().empty(), "gapless: AMX does not serve here: ", amx_missing());
  const int64_t m = x.size(0), k = x.size(1);
  const Tensor rows = k % 2 ? at::constant_pad_nd(x, {0, 1}) : x;
  (path == AMX ? linear_amx : linear_dots)(
      data<bf16>(rows), row_stride(rows), m, data<bf16>(packed), n, k + k % 2, bias ? data<bf16>(*bias) : nullptr,
      data<bf16>(out));
}

void multiply_floats(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, const Tensor& out) {
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    auto multiply = [&](const auto* weight) {
      linear_floats(
          data<T>(x), row_stride(x), x.size(0), weight, n, x.size(1), bias ? data<T>(*bias) : nullptr, data<T>(out));
    };
    if (packed.scalar_type() == at::kBFloat16) return multiply(data<bf16>(packed));
    if constexpr (!std::is_same_v<T, bf16>) multiply(data<T>(packed));
    else TORCH_CHECK(false, "gapless: bfloat16 is multiplied by bfloat16");
  });
}

void linear_to(
    const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, int64_t path, const Tensor& out) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "gapless: linear wants a matrix with columns");
  const int64_t k = round_up(x.size(1), packed.scalar_type() == at::kBFloat16 ? 2 : 1);
  fits(packed.numel() == round_up(n, LANES) * k && fits_bias(bias, n), "linear");
  fits_out(x, n, out);
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  if (path == FLOATS) multiply_floats(rows, packed, n, bias, out);
  else multiply_pairs(rows, packed, n, bias, path, out);
}

Tensor linear_op(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, int64_t path) {
  Tensor out = at::empty({x.size(0), n}, x.options());
  linear_to(x, packed, n, bias, path, out);
  return out;
}

// A packed weight in bytes begins with these of its form, so that a copy of the tensor takes them along. It has room
// for all of them: a copy of another weight of the shape fits. The room that a form leaves is never touched.
enum Packing : uint8_t { NIBBLES = 1, NARROW = 2, ZEROS = 4 };
constexpr int64_t FRONT = 64;

ByteForm byte_form(int64_t n, int64_t k, int64_t group, int packing) {
  return {n, k, group, bool(packing & NIBBLES), bool(packing & NARROW), bool(packing & ZEROS)};
}

int64_t room(int64_t n, int64_t k, int64_t group, int packing) {
  const ByteForm most = byte_form(n, k, group, packing & NIBBLES ? NIBBLES | ZEROS : 0);
  return FRONT + most.tiles() * most.tile();
}

ByteForm form_of(const Tensor& packed, int64_t n, int64_t k, int64_t group) {
  fits(packed.numel() > FRONT, "bytes");
  const int packing = *packed.const_data_ptr<uint8_t>();
  fits(packed.numel() == room(n, k, group, packing), "bytes");
  return byte_form(n, k, group, packing);
}

// Whether float16 holds each of them.
bool are_narrow(const Tensor& scales) {
  const float* values = data<float>(scales);
  return std::all_of(values, values + scales.numel(), [](float scale) {
    f16 half;
    assign(half, scale);
    return bits_of<uint32_t>(to_float(half)) == bits_of<uint32_t>(scale);
  });
}

int packing_of(const Tensor& weight, const Tensor& scales, const Maybe& zeros, int64_t group) {
  const bool nibbles = weight.scalar_type() == at::kByte;
  bool own = false;
  if (zeros) {
    whole(*zeros);
    const uint8_t* values = data<uint8_t>(*zeros);
    own = std::any_of(values, values + zeros->numel(), [](uint8_t zero) { return zero != MIDDLE_NIBBLE; });
  }
  return (nibbles ? NIBBLES : 0) | (group && are_narrow(scales) ? NARROW : 0) | (own ? ZEROS : 0);
}

Tensor linear_pack_bytes(const Tensor& weight, const Tensor& scales, const Maybe& zeros, int64_t group) {
  whole(weight), whole(scales);
  const bool nibbles = weight.scalar_type() == at::kByte;
  TORCH_CHECK(nibbles || weight.scalar_type() == at::kChar, "gapless: linear_pack_bytes wants int8 or uint8");
  fits(weight.dim() == 2 && scales.dim() == 2 && group >= 0 && group % 32 == 0 && nibbles == zeros.has_value(),
       "linear_pack_bytes");
  const int64_t n = weight.size(0), k = weight.size(1) * (nibbles ? 2 : 1);
  const std::array<int64_t, 2> sizes{n, group ? (k + group - 1) / group : 1};
  const bool same = scales.sizes() == at::IntArrayRef(sizes) && (!zeros || zeros->sizes() == scales.sizes());
  fits(k > 0 && (!nibbles || k % 32 == 0) && same, "linear_pack_bytes");
  const int packing = packing_of(weight, scales, zeros, group);
  Tensor packed = at::empty({room(n, k, group, packing)}, weight.options().dtype(at::kByte));
  uint8_t* to = data<uint8_t>(packed);
  *to = uint8_t(packing);
  pack_bytes(
      byte_form(n, k, group, packing), static_cast<const uint8_t*>(weight.const_data_ptr()), data<float>(scales),
      zeros ? data<uint8_t>(*zeros) : nullptr, to + FRONT);
  return packed;
}

void linear_bytes_to(
    const Tensor& x, const Tensor& packed, int64_t n, int64_t group, const Maybe& bias, const Tensor& out) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "gapless: linear_bytes wants a matrix with columns");
  const ByteForm form = form_of(packed, n, x.size(1), group);
  fits(fits_bias(bias, n), "linear_bytes");
  fits_out(x, n, out);
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    linear_bytes(
        form, data<T>(rows), row_stride(rows), x.size(0), data<uint8_t>(packed) + FRONT,
        bias ? data<T>(*bias) : nullptr, data<T>(out), amx_missing().empty());
  });
}

Tensor linear_bytes_op(const Tensor& x, const Tensor& packed, int64_t n, int64_t group, const Maybe& bias) {
  Tensor out = at::empty({x.size(0), n}, x.options());
  linear_bytes_to(x, packed, n, group, bias, out);
  return out;
}

Tensor linear_pack_fp8(const Tensor& weight, const Tensor& scales, int64_t group) {
  whole(weight), whole(scales);
  TORCH_CHECK(weight.scalar_type() == at::kFloat8_e4m3fn, "gapless: linear_pack_fp8 wants float8_e4m3fn");
  TORCH_CHECK(amx_missing().empty(), "gapless: AMX does not serve here: ", amx_missing());
  fits(weight.dim() == 2 && weight.size(1) > 0 && group >= 0 && group % 32 == 0, "linear_pack_fp8");
  const Fp8Form form{weight.size(0), weight.size(1), group};
  fits(scales.numel() == form.n * (group ? (form.k + group - 1) / group : 1), "linear_pack_fp8");
  Tensor packed = at::empty({form.tiles() * form.tile()}, weight.options().dtype(at::kByte));
  pack_fp8(form, static_cast<const uint8_t*>(weight.const_data_ptr()), data<float>(scales), data<uint8_t>(packed));
  return packed;
}

void linear_fp8_to(
    const Tensor& x, const Tensor& packed, int64_t n, int64_t group, const Maybe& bias, const Tensor& out) {
  TORCH_CHECK(amx_missing().empty(), "gapless: AMX does not serve here: ", amx_missing());
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "gapless: linear_fp8 wants a matrix with columns");
  const Fp8Form form{n, x.size(1), group};
  fits(packed.numel() == form.tiles() * form.tile() && fits_bias(bias, n), "linear_fp8");
  fits_out(x, n, out);
  const int64_t more = form.width() - form.k;
  const Tensor rows = more ? at::constant_pad_nd(x, {0, more}) : x.stride(1) == 1 ? x : x.contiguous();
  linear_fp8(
      form, data<bf16>(rows), row_stride(rows), x.size(0), data<uint8_t>(packed), bias ? data<bf16>(*bias) : nullptr,
      data<bf16>(out));
}

Tensor linear_fp8_op(const Tensor& x, const Tensor& packed, int64_t n, int64_t group, const Maybe& bias) {
  Tensor out = at::empty({x.size(0), n}, x.options());
  linear_fp8_to(x, packed, n, group, bias, out);
  return out;
}

Tensor embedding_packed(const Tensor& ids, const Tensor& packed, int64_t n, int64_t k) {
  for (int64_t i = 0; i < ids.size(0); i++)
    TORCH_CHECK_INDEX(longs(ids)[i] >= 0 && longs(ids)[i] < n, "gapless: there is no row ", longs(ids)[i]);
  Tensor out = at::empty({ids.size(0), k}, packed.options());
  by_dtype(packed, [&](auto* t) {
    using W = std::remove_pointer_t<decltype(t)>;
    fits(packed.numel() == packed_elements<W>(n, k), "embedding_packed");
    unpack_rows(data<W>(packed), n, k, longs(ids), ids.size(0), data<W>(out));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("vector_unit() -> str", [] { return std::string(VECTOR_UNIT); });
  m.def("share_from(int times) -> ()", [](int64_t times) { share_from(times); });
  m.def("vector_peak() -> float", [] { return vector_peak(); });
  m.def("has_bf16_dot() -> bool", [] { return DOTS_HERE; });
  m.def("amx_missing() -> str", [] { return amx_missing(); });
  m.def("linear_pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int n, Tensor? bias, int path) -> Tensor");
  m.def("linear_to(Tensor x, Tensor packed, int n, Tensor? bias, int path, Tensor(a!) out) -> ()");
  m.def("linear_pack_bytes(Tensor weight, Tensor scales, Tensor? zeros, int group) -> Tensor");
  m.def("linear_bytes(Tensor x, Tensor packed, int n, int group, Tensor? bias) -> Tensor");
  m.def("linear_bytes_to(Tensor x, Tensor packed, int n, int group, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("linear_pack_fp8(Tensor weight, Tensor scales, int group) -> Tensor");
  m.def("linear_fp8(Tensor x, Tensor packed, int n, int group, Tensor? bias) -> Tensor");
  m.def("linear_fp8_to(Tensor x, Tensor packed, int n, int group, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("embedding_packed(Tensor ids, Tensor packed, int n, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("linear_pack", linear_pack);
  m.impl("linear", linear_op);
  m.impl("linear_to", linear_to);
  m.impl("linear_pack_bytes", linear_pack_bytes);
  m.impl("linear_bytes", linear_bytes_op);
  m.impl("linear_bytes_to", linear_bytes_to);
  m.impl("linear_pack_fp8", linear_pack_fp8);
  m.impl("linear_fp8", linear_fp8_op);
  m.impl("linear_fp8_to", linear_fp8_to);
  m.impl("embedding_packed", embedding_packed);
}

}  // namespace gapless
