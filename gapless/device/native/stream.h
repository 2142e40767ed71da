// A stream: a first-in-first-out queue of work for one thread, which takes the interpreter's lock for Python work alone.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <variant>

#include "graph.h"

namespace gapless {

namespace py = pybind11;

// Sleeping hosts look for signals (Ctrl-C) this often.
constexpr int64_t kNapNs = 100'000'000;

// Ends a host's wait for a fence early; implements gapless.base.bell.Bell.
class Hub;
class Bell {
 public:
  explicit Bell(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}
  void ring();
  void clear() { rung_.store(false); }
  bool rung() const { return rung_.load(); }
  bool wait(double seconds);

 private:
  std::shared_ptr<Hub> hub_;
  std::atomic<bool> rung_{false};
};

// Shared by the streams of a device: whether it has failed, and the threads that sleep until a fence is passed.
class Hub {
 public:
  explicit Hub(py::object check) : check_(std::move(check)) {}
  ~Hub();

  const std::atomic<bool>& failed() const { return failed_; }
  void fail();                   // wakes all sleeping threads
  void check() { check_(); }     // raises the device's error
  void passed();                 // called when a fence is passed or a bell is rung: wakes sleeping threads
  // Sleeps until `passed` holds a time, the device fails, `bell` is rung, or `ns` have passed. Call it without the
  // interpreter's lock.
  void sleep(const std::atomic<int64_t>& passed, const Bell* bell = nullptr, int64_t ns = kNapNs);

 private:
  py::object check_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> failed_{false};
};

// A point of one stream; implements gapless.device.seam.Fence.
class Fence {
 public:
  Fence(std::shared_ptr<Hub> hub, bool timed) : hub_(std::move(hub)), timed_(timed) {}
  ~Fence();

  bool done();
  bool wait(const Bell* bell);  // returns whether it was reached: `bell`, if given, may ring before
  int64_t time() const;

  bool reached() const { return at_.load(std::memory_order_acquire) != 0; }
  void reach();        // called when the stream arrives here
  void block();        // waits until reached or the device has failed; call it without the interpreter's lock
  py::object mark;     // what a checker keeps of it; null for none, since a fence may die without the lock

 private:
  std::shared_ptr<Hub> hub_;
  bool timed_;
  std::atomic<int64_t> at_{0};  // CLOCK_MONOTONIC, ns
};

struct Program { py::object program, args; };
struct Replay { std::shared_ptr<Graph> graph; };
// Storages, not tensors: to let go of the last reference but Python's own takes the interpreter's lock.
struct Copy {
  void* to;
  const void* from;
  size_t nbytes;
  c10::Storage keep_to, keep_from;
};
struct Record { std::shared_ptr<Fence> fence; };
struct Await { std::shared_ptr<Fence> fence; };
struct Stop {};
using Work = std::variant<Stop, Program, Replay, Copy, Record, Await>;

class Stream {
 public:
  // `call(program, args)` runs a program and never raises; `report(text)` gets the text of an operator that failed.
  Stream(std::shared_ptr<Hub> hub, py::object call, py::object report)
      : hub_(std::move(hub)), call_(std::move(call)), report_(std::move(report)) {}

  void put(Work work);
  std::shared_ptr<Fence> record(bool timed);
  void work();  // works off the queue until a Stop; the thread runs this

 private:
  Work next();
  void run(Work& work);
  void with_python(const std::function<void()>& what);

  std::shared_ptr<Hub> hub_;
  py::object call_, report_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Work> queue_;
  std::atomic<size_t> size_{0};
  bool sleeping_ = false;
  PyThreadState* thread_ = nullptr;
};

}  // namespace gapless
