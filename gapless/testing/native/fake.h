// The fake accelerator: streams on threads of the host, and memory that the host cannot touch. Operators run on torch's
// CPU kernels, from the streams' threads.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gapless::fake {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kFake, 0}; }
inline void check_device(c10::Device asked) {
  TORCH_CHECK(asked.type() == kFake && asked.index() <= 0, "there is one fake device, fake:0, and no ", asked);
}

// Work of a stream. It holds addresses, never tensors of the device: a kernel keeps nothing alive.
using Task = std::function<void()>;
using PoolId = std::pair<unsigned long long, unsigned long long>;

// ---- streams.cpp ----

// Raises the first error of the device's work, if there was one.
void check();
// What the streams' threads do at random. `lazy`: 0 never, 1 always, 2 as the seed has it.
void delay(uint64_t seed, int64_t most_us, int lazy);
// Forgets the device's error. Raises while there is work.
void reset();
// Drops the work that has not begun and ends the threads. Work launched afterwards raises.
void shut_down();
// Runs `wait` without the interpreter's lock, if this thread holds it.
void without_gil(const Task& wait);

class Capture;

class Stream {
 public:
  explicit Stream(int64_t id) : id_(id) {}

  int64_t id() const { return id_; }
  // Enqueues, or records while the stream is captured; returns the number of the work.
  uint64_t submit(Task task);
  // Whether all work up to this number is done. Raises the device's error.
  bool passed(uint64_t number);
  bool quietly_passed(uint64_t number);  // as `passed`; raises nothing, and is no demand
  void wait(uint64_t number);
  // As `wait`, for threads of streams: raises nothing, and may be called during captures.
  void reach(uint64_t number);
  uint64_t submitted();
  bool idle();
  std::shared_ptr<Capture> capture();
  void capture(std::shared_ptr<Capture> into);
  // Takes work only on demand while held.
  void hold(bool held);
  void wake();
  void end();

 private:
  void work();
  bool may_run(uint64_t number) const;
  bool take(Task& task, uint64_t& number);

  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable ready_, done_;
  std::deque<Task> queue_;
  std::shared_ptr<Capture> capture_;
  // Numbers of work: the last that was submitted, is done, was waited for
  uint64_t submitted_ = 0, completed_ = 0, wanted_ = 0;
  int denials_ = 0;
  bool held_ = false, stopped_ = false;
  std::thread thread_;
};

Stream& stream_of(const c10::Stream& stream);
Stream& current();
std::vector<Stream*> all_streams();
void synchronize_device();

// A place in a stream's work.
struct Point {
  Stream* stream;
  uint64_t number;
};

// ---- memory.cpp ----

// The address of device memory for kernels: the one that tensors have cannot be read.
void* for_kernels(const void* address);
void register_allocators();
void resize_storage(const c10::Storage& storage, size_t bytes);
void record_on_stream(const c10::DataPtr& data, Stream& stream);
void retain_pool(PoolId pool);
void release_pool(PoolId pool);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// Keeps pinned memory, once it is freed, until the work of `point` is done.
void use_pinned(const void* address, Point point);

// ---- graphs.cpp ----

// Work recorded instead of run.
class Capture {
 public:
  explicit Capture(PoolId pool, bool relaxed) : pool(pool), relaxed(relaxed) {}
  const PoolId pool;
  const bool relaxed;
  std::vector<Task> tasks;
  std::string error;  // of a call that a capture forbids
};

// Raises, and ends the capture, if this thread or `stream` is captured: for calls that wait or ask.
void forbid_capture(Stream* stream, const char* what);
// Makes the capture of `stream` fail, if there is one, and raises.
void spoil(Stream& stream, const std::string& why);

class Graph {
 public:
  ~Graph();
  void capture_begin(PoolId pool, bool relaxed);
  void capture_end();
  void replay();
  void reset();
  PoolId pool() const { return pool_; }

 private:
  PoolId pool_{0, 0};
  Stream* stream_ = nullptr;
  std::shared_ptr<Capture> capture_;
  std::shared_ptr<const std::vector<Task>> tasks_;
};

PoolId new_pool();
void register_graphs();

// ---- operators.cpp ----

// Whose seed kernels have that were given no generator.
at::Generator& default_generator();
at::Generator new_generator(uint64_t seed);

}  // namespace gapless::fake
