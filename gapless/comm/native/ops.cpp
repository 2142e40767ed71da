// The group's calls as operators of torch, which a recorded step replays; and the names that Python calls by ctypes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <pthread.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "commons.h"

#define GAPLESS_EXPORT extern "C" __attribute__((visibility("default")))

namespace gapless {
namespace {

using at::Tensor;

// Never destroyed: threads may still use them when the process ends.
auto& guard = *new std::mutex;
auto& known = *new std::map<int64_t, std::shared_ptr<Commons>>;
int64_t last = 0;

// A process that is forked off is no rank.
const int at_fork = pthread_atfork(
    [] { guard.lock(); }, [] { guard.unlock(); },
    [] {
      for (auto& [number, one] : known) new std::shared_ptr<Commons>(std::move(one));  // never unmapped there
      known.clear();
      guard.unlock();
    });

Kind kind_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return FLOAT;
    case at::kBFloat16: return BFLOAT16;
    case at::kHalf: return HALF;
    case at::kLong: return LONG;
    default: TORCH_CHECK(false, "ranks add float32, bfloat16, float16 and int64, not ", x.scalar_type());
  }
}

void whole(const Tensor& x) { TORCH_CHECK(x.is_contiguous(), "ranks share contiguous tensors"); }

void add(const Tensor& y, int64_t group) {
  whole(y);
  const auto ranks = commons(group);
  if (!ranks->muted()) ranks->add(y.mutable_data_ptr(), y.numel(), kind_of(y));
}

Tensor add_norm(const Tensor& x, const Tensor& y, const Tensor& weight, double eps, int64_t group) {
  whole(x), whole(y), whole(weight);
  TORCH_CHECK(
      x.dim() == 2 && y.sizes() == x.sizes() && weight.numel() == x.size(1) && y.scalar_type() == x.scalar_type() &&
          weight.scalar_type() == at::kFloat && x.scalar_type() != at::kLong,
      "ranks' add_norm of other shapes or dtypes");
  Tensor out = at::empty_like(x);
  const auto ranks = commons(group);
  if (!ranks->muted())
    ranks->add_norm(
        x.mutable_data_ptr(), y.const_data_ptr(), x.size(0), x.size(1), kind_of(x),
        {weight.const_data_ptr<float>(), float(eps)}, out.mutable_data_ptr());
  return out;
}

void gather(const Tensor& part, const Tensor& out, int64_t group) {
  whole(part), whole(out);
  const auto ranks = commons(group);
  TORCH_CHECK(
      part.dim() == 2 && out.dim() == 2 && part.size(0) == out.size(0) && part.scalar_type() == out.scalar_type() &&
          (ranks->rank == 0 || out.size(1) == 0),
      "ranks' gather of other shapes or dtypes");
  const int64_t bytes = part.element_size();
  if (!ranks->muted())
    ranks->gather(
        part.const_data_ptr(), part.size(0), part.size(1) * bytes, out.mutable_data_ptr(), out.size(1) * bytes);
}

void tell(const Tensor& x, int64_t group) {
  whole(x);
  TORCH_CHECK(x.scalar_type() == at::kInt, "ranks tell int32, not ", x.scalar_type());
  const auto ranks = commons(group);
  if (!ranks->muted()) ranks->tell(x.mutable_data_ptr(), x.nbytes());
}

}  // namespace

std::shared_ptr<Commons> commons(int64_t number) {
  std::lock_guard lock(guard);
  const auto found = known.find(number);
  if (found == known.end()) throw std::runtime_error("the memory of the ranks is closed");
  return found->second;
}

TORCH_LIBRARY(gapless_comm, m) {
  m.def("add(Tensor(a!) y, int group) -> ()");
  m.def("add_norm(Tensor(a!) x, Tensor y, Tensor weight, float eps, int group) -> Tensor");
  m.def("gather(Tensor part, Tensor(a!) out, int group) -> ()");
  m.def("tell(Tensor(a!) x, int group) -> ()");
}

TORCH_LIBRARY_IMPL(gapless_comm, CPU, m) {
  m.impl("add", add);
  m.impl("add_norm", add_norm);
  m.impl("gather", gather);
  m.impl("tell", tell);
}

}  // namespace gapless

using gapless::commons;

GAPLESS_EXPORT int64_t gapless_comm_bytes(int32_t world) { return gapless::Commons::nbytes(world); }
GAPLESS_EXPORT int64_t gapless_comm_board_at() { return gapless::Commons::board_at(); }

// Returns the number of the commons, or 0, with the reason in `error`.
GAPLESS_EXPORT int64_t gapless_comm_open(int32_t fd, int32_t rank, int32_t world, char* error, int64_t size) {
  try {
    auto made = std::make_shared<gapless::Commons>(fd, rank, world);
    std::lock_guard lock(gapless::guard);
    gapless::known[++gapless::last] = std::move(made);
    return gapless::last;
  } catch (const std::exception& reason) {
    std::strncpy(error, reason.what(), size - 1);
    return 0;
  }
}

GAPLESS_EXPORT int64_t gapless_comm_close(int64_t number) {
  std::shared_ptr<gapless::Commons> gone;  // unmapped without the lock
  std::lock_guard lock(gapless::guard);
  if (const auto found = gapless::known.find(number); found != gapless::known.end()) {
    gone = std::move(found->second);
    gapless::known.erase(found);
  }
  return 0;
}

namespace {

constexpr int64_t kNothing = -1, kClosed = -2, kBroken = -3;

// No exception passes a call of ctypes.
template <typename Body>
int64_t with(int64_t number, const Body& body) {
  std::shared_ptr<gapless::Commons> found;
  try {
    found = commons(number);
  } catch (const std::exception&) {
    return kClosed;
  }
  try {
    return body(*found);
  } catch (const std::exception&) {
    return kBroken;
  }
}

}  // namespace

GAPLESS_EXPORT int64_t gapless_comm_mute(int64_t number, int32_t by) {
  return with(number, [&](auto& found) { return found.mute(by), 0; });
}

GAPLESS_EXPORT int64_t gapless_comm_stop(int64_t number) {
  return with(number, [](auto& found) { return found.stop(), 0; });
}

GAPLESS_EXPORT int64_t gapless_comm_stopped(int64_t number) {
  return with(number, [](auto& found) { return int64_t(found.stopped()); });
}

GAPLESS_EXPORT int64_t gapless_comm_room(int64_t number, int64_t nbytes) {
  return with(number, [&](auto& found) { return int64_t(found.room(nbytes)); });
}

// Returns kNothing if there is no room.
GAPLESS_EXPORT int64_t gapless_comm_put(int64_t number, const void* from, int64_t nbytes) {
  return with(number, [&](auto& found) { return found.room(nbytes) ? (found.put(from, nbytes), 0) : kNothing; });
}

// Copies the next frame to `to`, which holds any, and returns its length; kNothing if there is none.
GAPLESS_EXPORT int64_t gapless_comm_take(int64_t number, void* to) {
  return with(number, [&](auto& found) { return found.take(to); });
}

GAPLESS_EXPORT int64_t gapless_comm_wait(int64_t number, int64_t ns) {
  return with(number, [&](auto& found) { return int64_t(found.wait(ns)); });
}
