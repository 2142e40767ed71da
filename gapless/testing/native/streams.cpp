// Streams, events, and what torch asks of a device.
#include "fake.h"

#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <omp.h>
#include <pthread.h>

#include <chrono>

namespace gapless::fake {
namespace {

constexpr int64_t kPool = 32;  // streams for all, as CUDA has: the next one after the last is the first
constexpr int kDenials = 8;    // questions that a lazy stream answers with no before it starts

std::atomic<bool> failed{false}, shut{false}, forked{false};
std::mutex fault_mutex;
std::string& fault_text() {
  static auto* text = new std::string;
  return *text;
}

struct Delays {
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> most_us{0};
  std::atomic<int> lazy{0};
} delays;

void fail(const std::string& text) {
  std::lock_guard lock(fault_mutex);
  if (failed) return;
  fault_text() = text;
  failed = true;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A number that looks random, always the same for these three (splitmix64).
uint64_t draw(uint64_t seed, int64_t stream, uint64_t number) {
  uint64_t x = seed * 0x9e3779b97f4a7c15 + (static_cast<uint64_t>(stream) << 40) + number;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Whether this work waits for a demand. By seed: a quarter of the runs of 16 do.
bool is_lazy(int64_t stream, uint64_t number) {
  const int lazy = delays.lazy;
  return lazy == 1 || (lazy == 2 && draw(delays.seed + 1, stream, number / 16) % 4 == 0);
}

void pause(int64_t stream, uint64_t number) {
  const int64_t most = delays.most_us;
  if (most == 0) return;
  const uint64_t random = draw(delays.seed, stream, number);
  if (random % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds((random >> 8) % (most + 1)));
}

// All streams, the default one first. Never destroyed: memory may be freed after main has ended.
struct Streams {
  std::vector<std::unique_ptr<Stream>> all;
  std::atomic<uint64_t> next{0};
  Streams() {
    for (int64_t i = 0; i <= kPool; ++i) all.push_back(std::make_unique<Stream>(i));
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

thread_local int64_t current_id = 0;

c10::Stream named(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

}  // namespace

void check() {
  TORCH_CHECK(!forked, "the fake accelerator does not survive a fork: start the process with spawn");
  if (!failed) return;
  std::lock_guard lock(fault_mutex);
  TORCH_CHECK(false, fault_text());
}

void delay(uint64_t seed, int64_t most_us, int lazy) {
  delays.seed = seed;
  delays.most_us = most_us;
  delays.lazy = lazy;
  for (Stream* stream : all_streams()) stream->wake();
}

void reset() {
  for (Stream* stream : all_streams()) TORCH_CHECK(stream->idle(), "the fake device still has work: wait for it first");
  failed = false;
}

void shut_down() {
  shut = true;
  for (Stream* stream : all_streams()) stream->wake();
  without_gil([] {
    for (Stream* stream : all_streams()) stream->end();
  });
}

void without_gil(const Task& wait) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return wait();
  struct Released {
    PyThreadState* state = PyEval_SaveThread();
    ~Released() { PyEval_RestoreThread(state); }
  } released;
  wait();
}

uint64_t Stream::submit(Task task) {
  check();
  std::lock_guard lock(mutex_);
  if (capture_) {
    capture_->tasks.push_back(std::move(task));
    return 0;
  }
  TORCH_CHECK(!stopped_ && !shut, "the fake accelerator has ended, as the process does");
  ++submitted_;
  if (!thread_.joinable()) thread_ = std::thread(&Stream::work, this);
  queue_.push_back(std::move(task));
  ready_.notify_one();
  return submitted_;
}

bool Stream::passed(uint64_t number) {
  forbid_capture(this, "a query");
  check();
  if (!quietly_passed(number)) {
    std::lock_guard lock(mutex_);
    if (++denials_ > kDenials && wanted_ < number) {
      wanted_ = number;
      ready_.notify_one();
    }
    return false;
  }
  check();  // of work that failed since the first one
  return true;
}

bool Stream::quietly_passed(uint64_t number) {
  std::lock_guard lock(mutex_);
  return completed_ >= number;
}

void Stream::wait(uint64_t number) {
  forbid_capture(this, "a wait");
  check();
  without_gil([&] { reach(number); });
  check();
}

void Stream::reach(uint64_t number) {
  std::unique_lock lock(mutex_);
  if (wanted_ < number) wanted_ = number;
  ready_.notify_one();
  done_.wait(lock, [&] { return completed_ >= number; });
}

uint64_t Stream::submitted() {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool Stream::idle() {
  std::lock_guard lock(mutex_);
  return completed_ == submitted_;
}

std::shared_ptr<Capture> Stream::capture() {
  std::lock_guard lock(mutex_);
  return capture_;
}

void Stream::capture(std::shared_ptr<Capture> into) {
  std::lock_guard lock(mutex_);
  capture_ = std::move(into);
}

void Stream::hold(bool held) {
  std::lock_guard lock(mutex_);
  held_ = held;
  ready_.notify_one();
}

void Stream::wake() {
  std::lock_guard lock(mutex_);
  if (shut) {  // not before: a thread that takes the interpreter's lock must end while there is an interpreter
    stopped_ = true;
    completed_ = submitted_;
    queue_.clear();
    done_.notify_all();
  }
  ready_.notify_one();
}

void Stream::end() {
  if (thread_.joinable()) thread_.join();
}

bool Stream::may_run(uint64_t number) const {
  return number <= wanted_ || (!held_ && !is_lazy(id_, number));
}

bool Stream::take(Task& task, uint64_t& number) {
  std::unique_lock lock(mutex_);
  ready_.wait(lock, [&] { return stopped_ || (!queue_.empty() && may_run(completed_ + 1)); });
  if (stopped_) return false;
  number = completed_ + 1;
  denials_ = 0;
  task = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void Stream::work() {
  at::init_num_threads();
  omp_set_num_threads(1);  // of this thread: a stream is one core of the device
  Task task;
  uint64_t number = 0;
  while (take(task, number)) {
    pause(id_, number);
    try {
      if (!failed) task();
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    }
    task = nullptr;
    std::lock_guard lock(mutex_);
    completed_ = std::max(completed_, number);
    done_.notify_all();
  }
}

Stream& stream_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kFake, "a stream of another device: ", stream);
  return *streams().all.at(static_cast<size_t>(stream.id()));
}

Stream& current() { return *streams().all[static_cast<size_t>(current_id)]; }

std::vector<Stream*> all_streams() {
  std::vector<Stream*> found;
  for (const auto& stream : streams().all) found.push_back(stream.get());
  return found;
}

void synchronize_device() {
  forbid_capture(nullptr, "a wait for the device");
  for (Stream* stream : all_streams()) stream->wait(stream->submitted());
}

namespace {

// One recording of an event; the event points to its last one.
struct Mark {
  Stream* stream;
  uint64_t number = 0;
  bool timed;
  std::shared_ptr<Capture> capture;
  std::atomic<int64_t> at_ns{0};
  Mark(Stream* stream, bool timed) : stream(stream), timed(timed) {}
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> last;
  std::shared_ptr<Mark> mark() {
    std::lock_guard lock(mutex);
    return last;
  }
};

std::shared_ptr<Mark> mark_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->mark();
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  // Those of newer versions of torch are not marked as overriding.
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device to) const override {
    setDevice(to);
    return device();
  }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device to) const override { check_device(to); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return named(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return named(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device to, bool) const override { return getNewStream(to, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return named(1 + static_cast<int64_t>(streams().next++ % kPool));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    stream_of(to);
    return named(std::exchange(current_id, to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return &stream_of(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const { return stream_of(stream).capture() != nullptr; }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream).passed(stream_of(stream).submitted());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    stream_of(stream).wait(stream_of(stream).submitted());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_on_stream(data, stream_of(stream));
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event;
    auto* known = static_cast<Event*>(*event);
    Stream& stream = stream_of(on);
    auto mark = std::make_shared<Mark>(&stream, flag == c10::EventFlag::BACKEND_DEFAULT);
    mark->capture = stream.capture();
    if (!mark->capture) mark->number = stream.submit([mark] { mark->at_ns = now_ns(); });
    std::lock_guard lock(known->mutex);
    known->last = std::move(mark);
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto mark = mark_of(event);
    Stream& later = stream_of(stream);
    if (!mark || mark->stream == &later) return;
    if (later.capture() || mark->capture)
      spoil(later, "dependency created on uncaptured work in another stream: a capture has one stream");
    later.submit([mark] { mark->stream->reach(mark->number); });
  }
  bool queryEvent(void* event) const override {
    const auto mark = mark_of(event);
    if (mark && mark->capture) spoil(*mark->stream, "a query of a captured event");
    return !mark || mark->stream->passed(mark->number);
  }
  void synchronizeEvent(void* event) const override {
    const auto mark = mark_of(event);
    if (mark && mark->capture) spoil(*mark->stream, "a wait for a captured event");
    if (mark) mark->stream->wait(mark->number);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto begin = mark_of(from), end = mark_of(to);
    TORCH_CHECK(begin && end && begin->timed && end->timed, "both events need enable_timing=True and a recording");
    TORCH_CHECK(begin->at_ns != 0 && end->at_ns != 0, "both events must be completed before their distance is known");
    return static_cast<double>(end->at_ns - begin->at_ns) / 1e6;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

}  // namespace
}  // namespace gapless::fake
