#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include "linear.h"

namespace gapless {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

const bf16* bf16s(const Tensor& x) { return reinterpret_cast<const bf16*>(x.const_data_ptr<at::BFloat16>()); }
bf16* bf16s_to(const Tensor& x) { return reinterpret_cast<bf16*>(x.mutable_data_ptr<at::BFloat16>()); }

Tensor linear_pack(const Tensor& weight) {
  TORCH_CHECK(LINEAR_HERE, "gapless: this processor has no bfloat16 dot product");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "gapless: linear_pack wants a contiguous matrix");
  int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed = at::empty({packed_elements(n, k)}, weight.options());
  pack(bf16s(weight), n, k, bf16s_to(packed));
  return packed;
}

Tensor linear_packed(const Tensor& x, const Tensor& packed, int64_t n, const Maybe& bias) {
  TORCH_CHECK(LINEAR_HERE, "gapless: this processor has no bfloat16 dot product");
  int64_t m = x.size(0), k = x.size(1);
  TORCH_CHECK(x.dim() == 2 && packed.numel() == packed_elements(n, k), "gapless: linear_packed of other shapes");
  Tensor rows = k % 2 ? at::constant_pad_nd(x, {0, 1}) : x.stride(1) == 1 ? x : x.contiguous();
  Tensor out = at::empty({m, n}, x.options());
  linear(bf16s(rows), rows.stride(0), m, bf16s(packed), n, k + k % 2, bias ? bf16s(*bias) : nullptr, bf16s_to(out));
  return out;
}

Tensor embedding_packed(const Tensor& ids, const Tensor& packed, int64_t n, int64_t k) {
  TORCH_CHECK(packed.numel() == packed_elements(n, k), "gapless: embedding_packed of other shapes");
  Tensor out = at::empty({ids.size(0), k}, packed.options());
  unpack_rows(bf16s(packed), n, k, ids.const_data_ptr<int64_t>(), ids.size(0), bf16s_to(out));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(GAPLESS_LIBRARY, m) {
  m.def("linear_pack(Tensor weight) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, int n, Tensor? bias) -> Tensor");
  m.def("embedding_packed(Tensor ids, Tensor packed, int n, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(GAPLESS_LIBRARY, CPU, m) {
  m.impl("linear_pack", linear_pack);
  m.impl("linear_packed", linear_packed);
  m.impl("embedding_packed", embedding_packed);
}

}  // namespace gapless
