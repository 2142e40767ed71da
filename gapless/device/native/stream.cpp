#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace gapless {
namespace {

// A thread that sleeps takes about 35 us to wake, so a short wait is cheaper awake. Cores are few: no longer than that.
constexpr int64_t kSpinNs = 30'000;

int64_t now_ns() {
  // On Linux this is CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns.
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Ready>
bool spin(Ready ready) {
  const int64_t end = now_ns() + kSpinNs;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (now_ns() < end);
  return false;
}

}  // namespace

void Bell::ring() {
  rung_.store(true);
  hub_->passed();
}

bool Bell::wait(double seconds) {
  static const std::atomic<int64_t> never{0};
  const int64_t end = now_ns() + static_cast<int64_t>(seconds * 1e9);
  for (;;) {
    if (hub_->failed()) hub_->check();
    const int64_t left = end - now_ns();
    if (rung() || left <= 0) return rung();
    {
      py::gil_scoped_release unlocked;
      hub_->sleep(never, this, std::min(left, kNapNs));
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

Hub::~Hub() {
  py::gil_scoped_acquire lock;
  check_ = py::object();
}

void Hub::fail() {
  failed_.store(true);
  std::lock_guard lock(mutex_);
  woken_.notify_all();
}

void Hub::passed() {
  // In this order with `sleep`: either the sleeper is seen here, or the sleeper sees the time.
  if (sleepers_.load() == 0) return;
  std::lock_guard lock(mutex_);
  woken_.notify_all();
}

void Hub::sleep(const std::atomic<int64_t>& passed, const Bell* bell, int64_t ns) {
  const auto ready = [&] { return passed.load() != 0 || failed_.load() || (bell != nullptr && bell->rung()); };
  if (spin(ready)) return;
  std::unique_lock lock(mutex_);
  ++sleepers_;
  woken_.wait_for(lock, std::chrono::nanoseconds(ns), ready);
  --sleepers_;
}

Fence::~Fence() {
  if (!mark) return;
  py::gil_scoped_acquire lock;
  mark = py::object();
}

bool Fence::done() {
  if (!reached()) {
    if (hub_->failed()) hub_->check();
    return false;
  }
  if (mark) mark.attr("passed")();
  return true;
}

bool Fence::wait(const Bell* bell) {
  while (!reached()) {
    if (hub_->failed()) hub_->check();
    if (bell != nullptr && bell->rung()) return false;
    {
      py::gil_scoped_release unlocked;
      hub_->sleep(at_, bell);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  if (mark) mark.attr("passed")();
  return true;
}

int64_t Fence::time() const {
  if (timed_ && reached()) return at_.load();
  PyErr_SetString(PyExc_AssertionError, "time() needs record(timed=True) and a fence that is done");
  throw py::error_already_set();
}

void Fence::reach() {
  at_.store(now_ns());
  hub_->passed();
}

void Fence::block() {
  while (!reached() && !hub_->failed()) hub_->sleep(at_);
}

void Stream::put(Work work) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    size_.store(queue_.size(), std::memory_order_release);
    wake = sleeping_;
  }
  if (wake) filled_.notify_one();
}

std::shared_ptr<Fence> Stream::record(bool timed) {
  auto fence = std::make_shared<Fence>(hub_, timed);
  put(Record{fence});
  return fence;
}

Work Stream::next() {
  spin([this] { return size_.load(std::memory_order_acquire) != 0; });
  std::unique_lock lock(mutex_);
  sleeping_ = true;
  filled_.wait(lock, [this] { return !queue_.empty(); });
  sleeping_ = false;
  Work work = std::move(queue_.front());
  queue_.pop_front();
  size_.store(queue_.size(), std::memory_order_release);
  return work;
}

void Stream::work() {
  thread_ = PyEval_SaveThread();
  for (;;) {
    Work work = next();
    if (std::holds_alternative<Stop>(work)) break;
    if (std::holds_alternative<Program>(work)) {
      // The lock is taken for dropped work too: Python's objects die with it held.
      with_python([&] {
        if (!hub_->failed()) run(work);
        work = Stop{};
      });
    } else if (!hub_->failed()) {
      run(work);
    }
  }
  PyEval_RestoreThread(thread_);
}

void Stream::with_python(const std::function<void()>& what) {
  PyEval_RestoreThread(thread_);
  what();
  // An interrupt may strike between two programs.
  if (PyErr_Occurred()) PyErr_Clear();
  thread_ = PyEval_SaveThread();
}

void Stream::run(Work& work) {
  if (auto* item = std::get_if<Program>(&work)) {
    py::object(py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(call_.ptr(), item->program.ptr(), item->args.ptr(), nullptr)));
  } else if (auto* item = std::get_if<Replay>(&work)) {
    try {
      item->graph->run(hub_->failed());
    } catch (const std::runtime_error& error) {
      with_python([&] { report_(error.what()); });
    }
  } else if (auto* item = std::get_if<Copy>(&work)) {
    std::memcpy(item->to, item->from, item->nbytes);
  } else if (auto* item = std::get_if<Record>(&work)) {
    item->fence->reach();
  } else if (auto* item = std::get_if<Await>(&work)) {
    item->fence->block();
  }
}

}  // namespace gapless
