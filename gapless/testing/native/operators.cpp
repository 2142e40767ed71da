// Operators: a launch learns the shapes of results from Meta kernels, and leaves the work to the CPU's kernel on the
// stream's thread. What torch must have from a backend itself is metadata only: views and sizes.
#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace gapless::fake {

// ---- Random numbers ----

namespace {

// The CPU's generator, which only says what seed a launch gives its kernel.
struct Seeds final : at::CPUGeneratorImpl {
  explicit Seeds(uint64_t seed) : CPUGeneratorImpl(seed) { device_ = fake::device(); }
  Seeds* clone_impl() const override {
    auto* const made = new Seeds(current_seed());
    made->set_state(*get_state());
    return made;
  }
};

// Kernels draw when their stream gets there. The order of launches decides what they draw, as on a GPU.
void give_generators(const c10::OperatorHandle& op, Stack& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.schema().arguments()[i].name() != "generator") continue;
    at::Generator from = arguments[i].isNone() ? default_generator() : arguments[i].toGenerator();
    TORCH_CHECK(from.device().type() == kFake, "Expected a 'fake' device type for generator but found '", from.device(), "'");
    std::lock_guard lock(from.mutex());
    arguments[i] = at::make_generator<at::CPUGeneratorImpl>(static_cast<Seeds*>(from.unsafeGetGeneratorImpl())->random64());
  }
}

}  // namespace

at::Generator new_generator(uint64_t seed) { return at::make_generator<Seeds>(seed); }

at::Generator& default_generator() {
  static auto* const one = new at::Generator(new_generator(at::detail::getDefaultCPUGenerator().current_seed()));
  return *one;
}

namespace {

// ---- Launches ----

std::string name_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

// Gives a storage room for a tensor with these strides.
void grow(const c10::Storage& storage, c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t item, int64_t offset) {
  const size_t needed = at::detail::computeStorageNbytes(sizes, strides, item, static_cast<size_t>(offset));
  if (needed > storage.nbytes()) resize_storage(storage, needed);
}

void resize_as(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  grow(tensor.storage(), sizes, strides, tensor.itemsize(), tensor.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

at::Tensor empty_like_mirror(const at::Tensor& mirror) {
  return at::detail::empty_strided_generic(mirror.sizes(), mirror.strides(), device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), mirror.scalar_type());
}

// The argument that the n-th result is, or -1 for a new one.
int64_t alias_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* info = schema.returns()[result].alias_info();
  if (info == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == info->beforeSets()) return static_cast<int64_t>(i);
  }
  return -1;
}

bool returns_tensors_alone(const c10::FunctionSchema& schema) {
  for (const auto& one : schema.returns()) {
    const auto& type = one.type();
    const bool is_list = type->kind() == c10::TypeKind::ListType &&
                         type->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
    if (type->kind() != c10::TypeKind::TensorType && !is_list) return false;
  }
  return true;
}

bool makes_results(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.returns().size(); ++i)
    if (alias_of(schema, i) < 0) return true;
  return false;
}

bool depends_on_data(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         !returns_tensors_alone(op.schema());
}

using Answer = std::pair<Stack, std::vector<at::Tensor>>;
constexpr size_t kAnswers = 8192;  // of Meta kernels that are kept: many are Python, and slower than the CPU's kernels

// Not torch's fallback, which raises.
bool has_meta(const c10::OperatorHandle& op) {
  for (const auto key : {c10::DispatchKey::Meta, c10::DispatchKey::CompositeExplicitAutograd,
                         c10::DispatchKey::CompositeExplicitAutogradNonFunctional, c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

// Meta kernels may give the results of a call; what they refuse is run at once, and then raises the CPU's error.
bool ask_meta(const Call& call, Stack& results, std::vector<at::Tensor>& mirrors) {
  if (!has_meta(call.op())) return !makes_results(call.op().schema());
  const auto key = call.key();
  static auto* const known = new std::unordered_map<std::string, Answer>;
  static auto* const mutex = new std::mutex;
  if (key) {
    std::lock_guard lock(*mutex);
    if (auto found = known->find(*key); found != known->end()) {
      std::tie(results, mirrors) = found->second;
      return true;
    }
  }
  try {
    results = call.run(Side::Meta, &mirrors);
  } catch (const std::exception&) {
    return false;
  }
  if (!key) return true;
  std::unordered_map<std::string, Answer> old;  // freed without the mutex: a tensor may take the interpreter's lock
  std::lock_guard lock(*mutex);
  if (known->size() >= kAnswers) known->swap(old);
  known->emplace(*key, Answer{results, mirrors});
  return true;
}

void copy_results(const std::vector<at::Tensor>& from, const std::vector<std::pair<Place, Bytes>>& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    const auto& [place, bytes] = to[i];
    if (bytes.address == nullptr || !from[i].defined()) continue;
    const at::Tensor target = place.mirror({storage_of(bytes, Side::Cpu)}, Side::Cpu);
    TORCH_CHECK(target.sizes() == from[i].sizes() && target.scalar_type() == from[i].scalar_type(),
                "the Meta kernel promised ", target.sizes(), target.scalar_type(), ", the CPU's made ", from[i].sizes(),
                from[i].scalar_type());
    target.copy_(from[i]);
  }
}

// The new tensors among results, in order.
std::vector<at::Tensor> made(const c10::FunctionSchema& schema, const Stack& results) {
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < results.size(); ++i) {
    if (alias_of(schema, i) >= 0) continue;
    if (results[i].isTensorList())
      for (const at::Tensor& one : results[i].toTensorVector()) found.push_back(one);
    else
      found.push_back(results[i].toTensor());
  }
  return found;
}

std::pair<Place, Bytes> target_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  Place place{0, tensor.sizes().vec(), tensor.strides().vec(), 0, tensor.scalar_type(), {}};
  return {place, {for_kernels(tensor.storage().data()), tensor.storage().nbytes()}};
}

void run_kernel(const Call& call, const std::vector<std::pair<Place, Bytes>>& targets) {
  try {
    const Stack results = call.run(Side::Cpu);
    if (!targets.empty()) copy_results(made(call.op().schema(), results), targets);
  } catch (const c10::Error& error) {
    throw std::runtime_error("fake device: " + name_of(call.op()) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error("fake device: " + name_of(call.op()) + ": " + error.what());
  }
}

// Gives arguments for results (out=) the sizes that the results have.
bool resize_outputs(const c10::FunctionSchema& schema, Stack& arguments, const Call& call,
                    const std::vector<at::Tensor>& mirrors) {
  bool resized = false;
  for (size_t i = 0; i < arguments.size() && !mirrors.empty(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info == nullptr || !info->isWrite() || !arguments[i].isTensor() || call.at(i) < 0) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    const at::Tensor& mirror = mirrors[static_cast<size_t>(call.at(i))];
    if (!tensor.is_privateuseone() || tensor.sizes() == mirror.sizes()) continue;
    resize_as(tensor, mirror.sizes(), mirror.strides());
    resized = true;
  }
  return resized;
}

// Replaces the arguments on the stack by the results: arguments written to, or new tensors.
void answer(const c10::FunctionSchema& schema, Stack* stack, const Stack& results, const std::vector<at::Tensor>& fresh) {
  Stack answers;
  const size_t first = stack->size() - schema.arguments().size();
  size_t next = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const int64_t alias = alias_of(schema, i); alias >= 0) {
      answers.push_back((*stack)[first + static_cast<size_t>(alias)]);
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (size_t j = 0; j < results[i].toTensorVector().size(); ++j) list.push_back(fresh[next++]);
      answers.emplace_back(list);
    } else if (results[i].isTensor()) {
      answers.emplace_back(fresh[next++]);
    } else {
      answers.push_back(results[i]);
    }
  }
  torch::jit::drop(*stack, schema.arguments().size());
  for (IValue& one : answers) stack->push_back(std::move(one));
}

at::Tensor upload(const at::Tensor& value) {
  if (!value.defined()) return value;
  at::Tensor made = empty_like_mirror(value);
  current().submit([value, target = target_of(made)] { copy_results({value}, {target}); });
  return made;
}

// Waits for the stream, and runs the operator here and now: sizes or values depend on the data.
void run_here(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  forbid_capture(&current(), name_of(op).c_str());
  current().wait(current().submitted());
  Stack arguments(torch::jit::last(*stack, schema.arguments().size()).vec());
  give_generators(op, arguments);
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // tensors of the device, and what they become
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info == nullptr || !info->isWrite() || !arguments[i].isTensor()) continue;
    const at::Tensor tensor = arguments[i].toTensor();
    if (!tensor.defined() || !tensor.is_privateuseone()) continue;
    written.emplace_back(tensor, tensor.cpu());
    arguments[i] = written.back().second;
  }
  const Stack results = Call(op, arguments, true).run(Side::Cpu);
  for (const auto& [tensor, value] : written) {
    if (tensor.sizes() != value.sizes()) resize_as(tensor, value.sizes(), value.strides());
    tensor.copy_(value);
  }
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < results.size(); ++i) {
    if (alias_of(schema, i) >= 0) continue;
    if (results[i].isTensorList())
      for (const at::Tensor& one : results[i].toTensorVector()) fresh.push_back(upload(one));
    else if (results[i].isTensor())
      fresh.push_back(upload(results[i].toTensor()));
  }
  answer(schema, stack, results, fresh);
}

// Every operator of the device that has no kernel of its own below.
void launch(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "Could not run '", name_of(op),
                              "' on the fake device: it has no kernel for the CPU, which would compute it");
  check();
  Stack arguments(torch::jit::last(*stack, schema.arguments().size()).vec());
  if (depends_on_data(op)) return run_here(op, stack);
  give_generators(op, arguments);
  auto call = std::make_shared<Call>(op, arguments);
  Stack results;
  std::vector<at::Tensor> mirrors;
  if (!ask_meta(*call, results, mirrors)) return run_here(op, stack);
  if (resize_outputs(schema, arguments, *call, mirrors)) call = std::make_shared<Call>(op, arguments);
  std::vector<at::Tensor> fresh;
  std::vector<std::pair<Place, Bytes>> targets;
  for (const at::Tensor& mirror : made(schema, results)) {
    fresh.push_back(mirror.defined() ? empty_like_mirror(mirror) : at::Tensor());
    targets.push_back(target_of(fresh.back()));
  }
  call->forget_addresses();
  current().submit([call = std::shared_ptr<const Call>(std::move(call)), targets = std::move(targets)] {
    run_kernel(*call, targets);
  });
  answer(schema, stack, results, fresh);
}

// Torch asks a backend for its own convolutions under names of their own; the operators of all take their arguments.
void convolve(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  launch(op, stack);
}

void convolve_backward(const c10::OperatorHandle& own, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto first = stack->end() - static_cast<int64_t>(own.schema().arguments().size());
  stack->insert(first + 3, std::vector<int64_t>{first->toTensor().size(1)});  // the sizes of the bias
  launch(op, stack);
}

// ---- Copies ----

std::pair<Place, Bytes> side_of(const at::Tensor& tensor) {
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  void* const address = tensor.is_privateuseone() ? for_kernels(storage->data()) : const_cast<void*>(storage->data());
  Place place{0, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type(), {}};
  return {place, {address, storage->nbytes()}};
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const at::Tensor from = source.expand_as(target);
  TORCH_CHECK(from.is_privateuseone() || from.is_cpu(), "no copy from ", from.device(), " to the fake device");
  const at::Tensor& host = from.is_cpu() ? from : target;
  const bool crosses = host.is_cpu();
  const bool pinned = crosses && is_pinned(host.storage().data());
  const bool waits = crosses && !(non_blocking && pinned);
  Stream& stream = current();
  if (waits) forbid_capture(&stream, "a copy that waits");
  const auto number = stream.submit([read = side_of(from), written = side_of(target)] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto whole = [](const std::pair<Place, Bytes>& side) {
      return side.first.mirror({storage_of(side.second, Side::Cpu)}, Side::Cpu);
    };
    whole(written).copy_(whole(read));
  });
  if (pinned) use_pinned(host.storage().data(), {&stream, number});
  if (waits) stream.wait(number);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  Stream& stream = current();
  stream.wait(stream.submitted());
  const auto side = side_of(tensor);
  return side.first.mirror({storage_of(side.second, Side::Cpu)}, Side::Cpu).item();
}

// ---- Metadata ----

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> at, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_device(at.value_or(device()));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> at, std::optional<bool>) {
  check_device(at.value_or(device()));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> from;
  if (offset) from = offset->guard_int(__FILE__, __LINE__);
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) resize_as(self, sizes, c10::contiguous_strides(sizes));
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  const int64_t from = offset.guard_int(__FILE__, __LINE__);
  const auto packed = c10::contiguous_strides(sizes);
  grow(source, sizes, strides.empty() ? c10::IntArrayRef(packed) : strides, self.itemsize(), from);
  return at::cpu::set_(self, std::move(source), from, sizes, strides);
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return self.set_(std::move(none), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_on_stream(self.storage().data_ptr(), stream_of(stream));
}

// One kernel on the CPU: its parts would round differently. Its parts have gradients.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  const bool learns = query.requires_grad() || key.requires_grad() || value.requires_grad();
  if (learns && c10::GradMode::is_enabled())
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, {}, scale, grouped));
  at::AutoDispatchBelowAutograd below;
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", attention); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

// torch.autocast as on a GPU, but for the sums that it would keep in float32: they are, inside the CPU's kernels.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define GAPLESS_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(GAPLESS_LOWER)
#undef GAPLESS_LOWER
}

at::Tensor no_lazy_view(const at::Tensor&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake device has no views that conjugate or negate: use torch.conj_physical or torch.neg");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_conj", no_lazy_view);
  m.impl("_neg_view", no_lazy_view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
  // Backends without a kernel of their own get its parts, which round differently.
  m.impl("native_dropout", at::native::native_dropout_cpu);  // by operators that are given a generator
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&launch>());
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&launch>());
}

}  // namespace
}  // namespace gapless::fake
