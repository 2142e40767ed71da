#include "graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <optional>
#include <stdexcept>

namespace gapless {
namespace {

using Places = std::vector<c10::IValue>;

c10::IValue one(const Argument& argument, Places& places) {
  if (argument.place < 0) return argument.constant;
  c10::IValue& value = places[argument.place];
  return argument.last ? std::move(value) : value;
}

c10::IValue list(const Argument& argument, Places& places) {
  if (argument.optional) {
    c10::List<std::optional<at::Tensor>> items;
    items.reserve(argument.items.size());
    for (const auto& item : argument.items) items.push_back(one(item, places).to<std::optional<at::Tensor>>());
    return items;
  }
  c10::List<at::Tensor> items;
  items.reserve(argument.items.size());
  for (const auto& item : argument.items) items.push_back(one(item, places).toTensor());
  return items;
}

void keep(const Operation& operation, torch::jit::Stack& stack, Places& places) {
  for (size_t i = 0; i < operation.results.size(); ++i) {
    const auto& wanted = operation.results[i];
    if (!operation.unpacks[i]) {
      if (wanted[0] >= 0) places[wanted[0]] = std::move(stack[i]);
      continue;
    }
    auto items = stack[i].toTensorList();
    for (size_t j = 0; j < wanted.size(); ++j)
      if (wanted[j] >= 0) places[wanted[j]] = items.get(j);
  }
}

std::string full_name(const Operation& operation) { return c10::toString(operation.handle.operator_name()); }

}  // namespace

void Graph::run(const std::atomic<bool>& stop) const {
  // No gradients, and no counting of versions for a backward pass that never comes.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Places places(places_);
  torch::jit::Stack stack;
  stack.reserve(32);
  const Operation* now = nullptr;
  try {
    for (const auto& operation : operations_) {
      if (stop.load(std::memory_order_relaxed)) return;
      now = &operation;
      stack.clear();
      for (const auto& argument : operation.arguments)
        stack.push_back(argument.items.empty() ? one(argument, places) : list(argument, places));
      operation.handle.callBoxed(stack);
      keep(operation, stack, places);
    }
  } catch (const c10::Error& error) {
    throw std::runtime_error(full_name(*now) + " in " + name_ + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(full_name(*now) + " in " + name_ + ": " + error.what());
  }
}

}  // namespace gapless
