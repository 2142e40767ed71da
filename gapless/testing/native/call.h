// A call of an operator: what its kernel is given, and mirrors of its tensors for kernels of the CPU and of Meta.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <set>
#include <unordered_map>

#include "fake.h"

namespace gapless::fake {

using c10::IValue;
using torch::jit::Stack;

enum class Side { Cpu, Meta };

struct Bytes {
  void* address;
  size_t size;
};

// A tensor's place in one of the storages of a call.
struct Place {
  size_t storage = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kFloat;
  at::Tensor value;  // of the host: it is its own mirror

  at::Tensor mirror(const std::vector<c10::Storage>& storages, Side side) const {
    if (value.defined()) return value;
    const auto keys = c10::DispatchKeySet(side == Side::Cpu ? c10::DispatchKey::CPU : c10::DispatchKey::Meta);
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages[storage]), keys,
                                                         c10::scalarTypeToTypeMeta(type));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return made;
  }
};

inline c10::Storage storage_of(const Bytes& bytes, Side side) {
  const c10::Storage::use_byte_size_t by_bytes;
  if (side == Side::Cpu) return c10::Storage(by_bytes, bytes.size, c10::DataPtr(bytes.address, c10::DeviceType::CPU));
  // A Meta kernel gives results the size that they will have.
  return c10::Storage(by_bytes, bytes.size, c10::DataPtr(nullptr, c10::DeviceType::Meta),
                      c10::GetAllocator(c10::DeviceType::Meta), true);
}

// An argument: a constant, one tensor, or a list of them (-1: none).
struct Argument {
  enum Kind { Constant, Tensor, List, OptionalList } kind = Constant;
  IValue constant;
  std::vector<int64_t> places;
};

// What a kernel is given, without any tensor of the device.
class Call {
 public:
  // `here`: tensors of the host are used as they are, and written to.
  Call(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments, bool here = false) : op_(op), here_(here) {
    for (const IValue& value : arguments) arguments_.push_back(argument(value));
  }

  const c10::OperatorHandle& op() const { return op_; }

  // Runs the operator's kernel of this side on mirrors; returns its results, and the mirrors in `tensors`.
  Stack run(Side side, std::vector<at::Tensor>* tensors = nullptr) const {
    std::vector<c10::Storage> storages;
    for (const Bytes& bytes : bytes_) storages.push_back(storage_of(bytes, side));
    std::vector<at::Tensor> mirrors;
    for (const Place& place : places_) mirrors.push_back(place.mirror(storages, side));
    Stack stack;
    for (const Argument& one : arguments_) stack.push_back(value(one, mirrors, side));
    // No gradients, and no counting of versions: the device's own tensors have had both.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op_.callBoxed(stack);
    if (tensors != nullptr) *tensors = std::move(mirrors);
    return stack;
  }

  size_t tensors() const { return places_.size(); }
  const Place& place(size_t at) const { return places_[at]; }

  // The place of the n-th argument, which is a tensor.
  int64_t at(size_t argument) const { return arguments_[argument].places.at(0); }
  bool is_tensor(size_t argument) const { return arguments_[argument].kind == Argument::Tensor; }

  // Adds a place for a tensor; the same for the same tensor, so that kernels see which arguments are one.
  int64_t add(const at::Tensor& tensor) {
    if (!tensor.defined()) return -1;
    auto [known, is_new] = seen_.emplace(tensor.unsafeGetTensorImpl(), places_.size());
    if (is_new) places_.push_back(placed(tensor));
    return static_cast<int64_t>(known->second);
  }

  // All that a Meta kernel looks at, as bytes; nothing if an argument has none.
  std::optional<std::string> key() const {
    std::string found = c10::toString(op_.operator_name());
    append(found, c10::get_default_dtype_as_scalartype());
    for (const Place& place : places_) {
      append(found, place.storage);
      append(found, place.offset);
      append(found, static_cast<int64_t>(place.type));
      append(found, place.sizes);
      append(found, place.strides);
      if (!place.value.defined()) continue;
      append(found, static_cast<int64_t>(place.value.scalar_type()));
      append(found, place.value.unsafeGetTensorImpl()->is_wrapped_number() ? -1 : place.value.dim());
      append(found, place.value.sizes().vec());
    }
    for (const Bytes& bytes : bytes_) append(found, bytes.size);  // whether it must grow
    for (const Argument& one : arguments_) {
      append(found, static_cast<int64_t>(one.kind));
      append(found, one.places);
      if (one.kind == Argument::Constant && !append_constant(found, one.constant)) return std::nullopt;
    }
    return found;
  }

  void forget_addresses() {  // of tensors: they may be others' soon
    seen_.clear();
    storages_.clear();
  }

 private:
  Argument argument(const IValue& value) {
    if (value.isTensor()) return {Argument::Tensor, {}, {add(value.toTensor())}};
    Argument found;
    if (value.isTensorList()) {
      found.kind = Argument::List;
      for (const at::Tensor& one : value.toTensorVector()) found.places.push_back(add(one));
    } else if (value.isOptionalTensorList()) {
      found.kind = Argument::OptionalList;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        found.places.push_back(one ? add(*one) : -1);
    } else {
      if (value.isDevice() && value.toDevice().type() == kFake) check_device(value.toDevice());
      found.constant = value;
    }
    return found;
  }

  Place placed(const at::Tensor& tensor) {
    if (!tensor.is_privateuseone()) return by_value(tensor);
    auto* const storage = tensor.storage().unsafeGetStorageImpl();
    auto [known, is_new] = storages_.emplace(storage, bytes_.size());
    if (is_new) bytes_.push_back({for_kernels(storage->data()), storage->nbytes()});
    return {known->second, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type(), {}};
  }

  // A number may come from the host, as for a kernel of CUDA; and indices, for which CUDA waits as well.
  Place by_value(const at::Tensor& tensor) {
    Place place;
    place.value = tensor;
    if (here_) return place;
    static const std::set<std::string> taking_indices{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                      "aten::_unsafe_index", "aten::_unsafe_index_put"};
    const bool is_index = at::isIntegralType(tensor.scalar_type(), true) && taking_indices.contains(op_.schema().name());
    TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || is_index),
                "Expected all tensors to be on the same device, but found at least two devices, ", device(), " and ",
                tensor.device(), "! (", op_.schema().name(), ")");
    if (tensor.dim() != 0) current().wait(current().submitted());
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) place.value = tensor.detach().clone();
    return place;
  }

  template <typename Number>
  static void append(std::string& to, Number number) {
    to.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  static void append(std::string& to, const std::vector<int64_t>& numbers) {
    append(to, numbers.size());
    for (int64_t number : numbers) append(to, number);
  }

  static bool append_constant(std::string& to, const IValue& value) {
    to.append(value.tagKind()).push_back(0);
    if (value.isInt()) {
      append(to, value.toInt());
    } else if (value.isBool()) {
      append(to, value.toBool());
    } else if (value.isDouble()) {
      append(to, value.toDouble());
    } else if (value.isString()) {
      to.append(value.toStringRef()).push_back(0);
    } else if (value.isDevice()) {
      append(to, static_cast<int64_t>(value.toDevice().type()));
    } else if (value.isList()) {
      append(to, value.toListRef().size());
      for (const IValue& one : value.toListRef())
        if (!append_constant(to, one)) return false;
    } else {
      return value.isNone() || value.isGenerator();
    }
    return true;
  }

  static IValue value(const Argument& one, const std::vector<at::Tensor>& mirrors, Side side) {
    const auto mirror = [&](int64_t place) { return place < 0 ? at::Tensor() : mirrors[static_cast<size_t>(place)]; };
    if (one.kind == Argument::Tensor) return mirror(one.places[0]);
    if (one.kind == Argument::List) {
      c10::List<at::Tensor> list;
      for (int64_t place : one.places) list.push_back(mirror(place));
      return list;
    }
    if (one.kind == Argument::OptionalList) {
      c10::List<std::optional<at::Tensor>> list;
      for (int64_t place : one.places)
        list.push_back(place < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(mirror(place)));
      return list;
    }
    if (one.constant.isGenerator() && side == Side::Meta) return {};
    const bool names_us = one.constant.isDevice() && one.constant.toDevice().type() == kFake;
    return names_us ? IValue(c10::Device(side == Side::Cpu ? c10::kCPU : c10::kMeta)) : one.constant;
  }

  c10::OperatorHandle op_;
  bool here_;
  std::vector<Argument> arguments_;
  std::vector<Bytes> bytes_;
  std::vector<Place> places_;
  std::unordered_map<c10::TensorImpl*, size_t> seen_;
  std::unordered_map<c10::StorageImpl*, size_t> storages_;
};

}  // namespace gapless::fake
