// Common part of the operators' files: torch tensors as the kernels' pointers, checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "glue.h"
#include "vec.h"

namespace gapless {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// Calls body(null pointer of the kernels' own type) for the dtype of x.
template <typename Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kBFloat16) return body(static_cast<bf16*>(nullptr));
  if (x.scalar_type() == at::kHalf) return body(static_cast<f16*>(nullptr));
  TORCH_CHECK(x.scalar_type() == at::kFloat, "gapless: float32, bfloat16 or float16, not ", x.scalar_type());
  body(static_cast<float*>(nullptr));
}

// Raises where x has another dtype.
template <typename T>
T* data(const Tensor& x) {
  if constexpr (std::is_same_v<T, bf16>)
    return reinterpret_cast<T*>(x.mutable_data_ptr<at::BFloat16>());
  else if constexpr (std::is_same_v<T, f16>)
    return reinterpret_cast<T*>(x.mutable_data_ptr<at::Half>());
  else
    return x.mutable_data_ptr<T>();
}

// Rows that lie whole, maybe apart.
inline int64_t row_stride(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "gapless: rows must lie whole");
  return x.stride(0);
}

inline void whole(const Tensor& x) { TORCH_CHECK(x.is_contiguous(), "gapless: a contiguous tensor is wanted"); }

// Raises, with the operator's name, if its tensors do not fit together: a kernel would access memory beyond them.
inline void fits(bool good, const char* op) { TORCH_CHECK(good, "gapless: ", op, " of other shapes"); }

// Tables with a line each for the same rows; the first has the columns of the state, the second of `params`.
template <typename... More>
void fit_tables(const char* op, const Tensor& state, const More&... more) {
  fits(state.dim() == 2 && state.size(1) > CUT_ID && ((more.dim() >= 2 && more.size(0) == state.size(0)) && ...), op);
}

inline void fit_params(const char* op, const Tensor& params) {
  fits(params.dim() == 2 && params.size(1) > FIRST_PENALTY, op);
}

inline const int64_t* longs(const Tensor& x) {
  whole(x);
  return x.const_data_ptr<int64_t>();
}

inline const int32_t* ints(const Tensor& x) {
  whole(x);
  return x.const_data_ptr<int32_t>();
}

inline Table table(const Tensor& x) {
  whole(x);
  return {x.mutable_data_ptr<int32_t>(), x.size(1)};
}

}  // namespace gapless
