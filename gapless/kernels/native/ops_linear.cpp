// The operators of products.
#include <ATen/ops/constant_pad_nd.h>

#include "amx.h"
#include "linear.h"
#include "ops.h"

namespace gapless {
namespace {

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("has_bf16_dot() -> bool", [] { return LINEAR_HERE; });
  m.def("amx_missing() -> str", [] { return amx_missing(); });
  m.def("linear_pack(Tensor weight) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, int n, Tensor? bias, bool amx) -> Tensor");
  m.def("linear_packed_to(Tensor x, Tensor packed, int n, Tensor? bias, bool amx, Tensor(a!) out) -> ()");
  m.def("linear_pack_wide(Tensor weight) -> Tensor");
  m.def("linear_wide(Tensor x, Tensor packed, int n, Tensor? bias) -> Tensor");
  m.def("has_byte_dot() -> bool", [] { return BYTES_HERE; });
  m.def("linear_pack_bytes(Tensor weight) -> (Tensor, Tensor)");
  m.def("linear_bytes(Tensor x, Tensor packed, Tensor scales, int n, Tensor? bias) -> Tensor");
  m.def("embedding_packed(Tensor ids, Tensor packed, int n, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("linear_pack", linear_pack);
  m.impl("linear_packed", linear_packed);
  m.impl("linear_packed_to", linear_packed_to);
  m.impl("linear_pack_wide", linear_pack_wide);
  m.impl("linear_wide", linear_wide_op);
  m.impl("linear_pack_bytes", linear_pack_bytes);
  m.impl("linear_bytes", linear_bytes_op);
  m.impl("embedding_packed", embedding_packed);
}

}  // namespace gapless
