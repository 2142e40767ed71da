// A recorded program: operators with their arguments, replayed through torch's dispatcher without Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <string>
#include <vector>

namespace gapless {

// An argument: a constant, a tensor that the program made (a place), or a list of these.
struct Argument {
  c10::IValue constant;
  int64_t place = -1;
  bool last = false;  // no later call needs the place: it is moved, and freed as soon as the operator drops it
  bool optional = false;  // for a list: its items may be None
  std::vector<Argument> items;
};

struct Operation {
  c10::OperatorHandle handle;
  std::vector<Argument> arguments;
  std::vector<std::vector<int64_t>> results;  // for each value returned: the places to keep it in, -1 for none
  std::vector<bool> unpacks;                  // whether it is a list of tensors
};

class Graph {
 public:
  Graph(std::string name, size_t places) : name_(std::move(name)), places_(places) {}

  void add(Operation operation) { operations_.push_back(std::move(operation)); }

  // Throws std::runtime_error with the name of the operator that failed; ends early once `stop` is set.
  // It keeps nothing, so two threads may run it.
  void run(const std::atomic<bool>& stop) const;

 private:
  std::string name_;
  size_t places_;
  std::vector<Operation> operations_;
};

}  // namespace gapless
