// The operators of products.
#include <ATen/ops/constant_pad_nd.h>

#include "amx.h"
#include "linear.h"
#include "ops.h"
#include "parallel.h"
#include "peak.h"

namespace gapless {
namespace {

// Which product: the same numbers are in choice.py.
enum Path { FLOATS, DOTS, AMX };

bool fits_bias(const Maybe& bias, int64_t n) { return !bias || (bias->is_contiguous() && bias->numel() == n); }

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
  TORCH_CHECK(
      out.is_contiguous() && out.sizes() == at::IntArrayRef({x.size(0), n}) && out.dtype() == x.dtype(),
      "gapless: linear_to another shape or dtype");
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  if (path == FLOATS) multiply_floats(rows, packed, n, bias, out);
  else multiply_pairs(rows, packed, n, bias, path, out);
}

Tensor linear_op(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias, int64_t path) {
  Tensor out = at::empty({x.size(0), n}, x.options());
  linear_to(x, packed, n, bias, path, out);
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
  int64_t stride = row_stride(x), m = x.size(0), k = x.size(1);
  fits(
      packed.numel() == byte_elements(n, k) && scales.numel() == round_up(n, TILE) && fits_bias(bias, n),
      "linear_bytes");
  Tensor out = at::empty({m, n}, x.options());
  by_dtype(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* shift = bias ? data<T>(*bias) : nullptr;
    linear_bytes(data<T>(x), stride, m, data<uint8_t>(packed), data<float>(scales), n, k, shift, data<T>(out));
  });
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
  m.def("has_byte_dot() -> bool", [] { return BYTES_HERE; });
  m.def("linear_pack_bytes(Tensor weight) -> (Tensor, Tensor)");
  m.def("linear_bytes(Tensor x, Tensor packed, Tensor scales, int n, Tensor? bias) -> Tensor");
  m.def("embedding_packed(Tensor ids, Tensor packed, int n, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("linear_pack", linear_pack);
  m.impl("linear", linear_op);
  m.impl("linear_to", linear_to);
  m.impl("linear_pack_bytes", linear_pack_bytes);
  m.impl("linear_bytes", linear_bytes_op);
  m.impl("embedding_packed", embedding_packed);
}

}  // namespace gapless
