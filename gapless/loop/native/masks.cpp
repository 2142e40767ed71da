// Masks of rows whose matchers are native: threads that answer each token with the mask of the next one, without the
// interpreter. `loop/masks.py` is the same in Python, and says when a row begins, gets a slot, and ends.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gapless {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr int64_t kNothing = -1;
// Between two looks at the mail pass this part of the time since the last event, within these bounds.
constexpr int kPart = 16;
constexpr nanoseconds kShortest{2'000}, kLongest{100'000}, kGivesUp{10'000'000'000};

// gapless.base.records.MatcherFunctions
struct Functions {
  int32_t (*consume)(void*, uint32_t);
  int32_t (*write_mask)(void*, uint32_t*, size_t);
  bool (*accepts)(void*);
  const char* (*error)(void*);
  void (*free)(void*);
};

// A slot of the mail, `layout` says what it holds; and who may write to it.
struct Slot {
  int64_t* tag;
  const int64_t* told;
  const int32_t* token;
  uint32_t* mask;
  std::mutex mutex;
  std::atomic<int64_t> key{kNothing};  // of the row that has the slot
};

struct Row {
  int64_t key;
  Functions functions;
  std::shared_ptr<void> matcher;
  int64_t length;  // tokens that the matcher has followed, the prompt's included
  std::vector<uint32_t> ends;
  int64_t ended = 0;  // tokens since the end of the output
  Slot* slot = nullptr;
  int64_t owner = 0;
  int64_t awaited = kNothing;  // the tag of the next token
};

// What every thread reads.
struct Shared {
  std::vector<std::unique_ptr<Slot>> slots;
  size_t mask_bytes;
  bool polls;
  std::atomic<int64_t> written{0}, ns{0};
  std::mutex mutex;
  std::vector<std::pair<int64_t, std::string>> failures;
  std::atomic<bool> failed{false};

  void fail(int64_t key, std::string text) {
    std::lock_guard lock(mutex);
    failures.emplace_back(key, std::move(text));
    failed = true;
  }
};

class Worker {
 public:
  explicit Worker(Shared& shared) : shared_(shared), thread_([this] { run(); }) {}

  ~Worker() {
    leave({}, true);
    thread_.join();
  }

  void begin(Row row) {
    leave([this, row = std::move(row)]() mutable { rows_.emplace(row.key, std::move(row)); });
  }

  void admit(int64_t key, Slot* slot, int64_t owner, std::vector<int32_t> tokens) {
    leave([this, key, slot, owner, tokens = std::move(tokens)] {
      auto found = rows_.find(key);
      if (found == rows_.end()) return;  // its matcher has failed
      Row& row = found->second;
      row.slot = slot, row.owner = owner;
      const auto followed = std::min<size_t>(row.length, tokens.size());
      go_on(row, tokens.data() + followed, tokens.size() - followed, Clock::now());
    });
  }

  void end(int64_t key) {
    leave([this, key] { rows_.erase(key); });
  }

  void ring() { leave({}); }

 private:
  using News = std::function<void()>;

  void leave(News news, bool closing = false) {
    {
      std::lock_guard lock(mutex_);
      if (news) news_.push_back(std::move(news));
      closing_ |= closing;
      rung_ = true;
    }
    woken_.notify_one();
  }

  void run() {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1);  // sleeps of microseconds
#endif
    auto last = Clock::now();
    std::vector<News> news;
    for (;;) {
      bool heard;
      {
        std::unique_lock lock(mutex_);
        wait(lock, Clock::now() - last);
        if (closing_) return;
        heard = std::exchange(rung_, false);
        news.swap(news_);
      }
      for (News& one : news) one();
      news.clear();
      if (look() || heard) last = Clock::now();
    }
  }

  // Waits for a ring, or until it is time to look again.
  void wait(std::unique_lock<std::mutex>& lock, nanoseconds quiet) {
    const auto rung = [this] { return rung_; };
    if (!shared_.polls || quiet > kGivesUp || !awaits())
      woken_.wait(lock, rung);
    else
      woken_.wait_for(lock, std::clamp<nanoseconds>(quiet / kPart, kShortest, kLongest), rung);
  }

  bool awaits() const {
    return std::any_of(rows_.begin(), rows_.end(), [](const auto& one) { return one.second.awaited != kNothing; });
  }

  // Answers every token that has come.
  bool look() {
    const auto since = Clock::now();
    bool any = false;
    for (auto it = rows_.begin(); it != rows_.end();) {
      Row& row = it++->second;  // a row that fails is erased
      if (row.awaited == kNothing || __atomic_load_n(row.slot->told, __ATOMIC_ACQUIRE) != row.awaited) continue;
      const int32_t token = __atomic_load_n(row.slot->token, __ATOMIC_RELAXED);
      go_on(row, &token, 1, since);
      any = true;
    }
    return any;
  }

  // Has the matcher follow these tokens, and writes the mask of the next.
  void go_on(Row& row, const int32_t* tokens, size_t count, Clock::time_point since) {
    std::lock_guard lock(row.slot->mutex);
    row.awaited = kNothing;
    if (row.slot->key != row.key) return;  // the row was given up, and another has the slot
    const char* wrong = nullptr;
    for (size_t i = 0; i < count && !wrong; ++i) wrong = advance(row, static_cast<uint32_t>(tokens[i]));
    if (!wrong) wrong = write(row);
    if (wrong) {
      // Without a mask the device holds the row until the loop has taken it out.
      shared_.fail(row.key, wrong);
      rows_.erase(row.key);
      return;
    }
    row.length += static_cast<int64_t>(count);
    __atomic_store_n(row.slot->tag, row.owner << 32 | row.length, __ATOMIC_RELEASE);
    row.awaited = row.owner << 32 | (row.length + 1);
    ++shared_.written;
    shared_.ns += std::chrono::duration_cast<nanoseconds>(Clock::now() - since).count();
  }

  // These two are `grammar.matcher.FormMatcher`. They return what is wrong.
  const char* advance(Row& row, uint32_t token) {
    const bool ends = std::find(row.ends.begin(), row.ends.end(), token) != row.ends.end();
    if (row.ended || (ends && row.functions.accepts(row.matcher.get()))) {
      ++row.ended;
      return ends ? nullptr : "a token came after the end of the output";
    }
    return row.functions.consume(row.matcher.get(), token) ? reason(row) : nullptr;
  }

  const char* write(Row& row) {
    uint32_t* words = row.slot->mask;
    if (row.ended)
      std::memset(words, 0, shared_.mask_bytes);
    else if (row.functions.write_mask(row.matcher.get(), words, shared_.mask_bytes))
      return reason(row);
    if (row.ended || row.functions.accepts(row.matcher.get()))
      for (uint32_t token : row.ends) words[token / 32] |= 1u << token % 32;
    return nullptr;
  }

  const char* reason(Row& row) {
    const char* text = row.functions.error(row.matcher.get());
    return text ? text : "no token can follow";
  }

  Shared& shared_;
  std::unordered_map<int64_t, Row> rows_;  // the thread's
  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<News> news_;
  bool rung_ = false, closing_ = false;
  std::thread thread_;
};

// Rows are spread over the threads, so that each matcher is used by one alone.
class MaskThreads {
 public:
  // `mail` has the addresses of the first record's tag, its reply's tag, token and mask.
  MaskThreads(int threads, const std::tuple<size_t, size_t, size_t, size_t>& mail, int64_t slots, size_t record_bytes,
              size_t mask_bytes, bool polls)
      : threads_(threads) {
    shared_.mask_bytes = mask_bytes, shared_.polls = polls;
    const auto [tag, told, token, mask] = mail;
    for (int64_t slot = 0; slot < slots; ++slot) {
      auto at = std::make_unique<Slot>();
      const size_t offset = static_cast<size_t>(slot) * record_bytes;
      at->tag = reinterpret_cast<int64_t*>(tag + offset), at->told = reinterpret_cast<int64_t*>(told + offset);
      at->token = reinterpret_cast<int32_t*>(token + offset), at->mask = reinterpret_cast<uint32_t*>(mask + offset);
      shared_.slots.push_back(std::move(at));
    }
  }

  ~MaskThreads() { close(); }

  // Ends the threads; what they had is freed.
  void close() {
    py::gil_scoped_release release;
    workers_.clear();
  }

  // Takes over a matcher. The first one starts the threads.
  void begin(int64_t key, const std::tuple<size_t, size_t, size_t, size_t, size_t>& functions, size_t matcher,
             int64_t length, std::vector<uint32_t> ends) {
    while (workers_.size() < static_cast<size_t>(threads_)) workers_.push_back(std::make_unique<Worker>(shared_));
    // Ends of sequence that the model has no logits for cannot come.
    std::erase_if(ends, [this](uint32_t token) { return token / 8 >= shared_.mask_bytes; });
    const auto [consume, write_mask, accepts, error, free] = functions;
    const Functions calls{reinterpret_cast<decltype(Functions::consume)>(consume),
                          reinterpret_cast<decltype(Functions::write_mask)>(write_mask),
                          reinterpret_cast<decltype(Functions::accepts)>(accepts),
                          reinterpret_cast<decltype(Functions::error)>(error),
                          reinterpret_cast<decltype(Functions::free)>(free)};
    std::shared_ptr<void> owned(reinterpret_cast<void*>(matcher), calls.free);
    of(key).begin({.key = key, .functions = calls, .matcher = owned, .length = length, .ends = std::move(ends)});
  }

  // From now on the row that had the slot begins no mask there; one that it has begun is waited for, by a thread.
  void give_slot(int64_t slot, int64_t key) { shared_.slots.at(slot)->key = key; }

  void admit(int64_t key, int64_t slot, int64_t owner, const py::array_t<int32_t, py::array::c_style>& tokens) {
    give_slot(slot, key);
    of(key).admit(key, shared_.slots[slot].get(), owner, {tokens.data(), tokens.data() + tokens.size()});
  }

  // Writes the mask of a row that Python serves, unless another row has got the slot.
  void post(int64_t key, int64_t slot, int64_t tag, const py::array_t<int32_t, py::array::c_style>& words) {
    Slot& at = *shared_.slots.at(slot);
    py::gil_scoped_release release;
    std::lock_guard lock(at.mutex);
    if (at.key != key) return;
    std::memcpy(at.mask, words.data(), shared_.mask_bytes);
    __atomic_store_n(at.tag, tag, __ATOMIC_RELEASE);
  }

  void end(int64_t key) {
    if (!workers_.empty()) of(key).end(key);
  }

  void ring() {
    for (auto& worker : workers_) worker->ring();
  }

  std::vector<std::pair<int64_t, std::string>> take_failures() {
    std::lock_guard lock(shared_.mutex);
    shared_.failed = false;
    return std::exchange(shared_.failures, {});
  }

  bool polls() const { return shared_.polls; }
  bool failed() const { return shared_.failed; }
  int64_t written() const { return shared_.written; }
  int64_t ns() const { return shared_.ns; }

 private:
  Worker& of(int64_t key) { return *workers_[static_cast<size_t>(key) % workers_.size()]; }

  const int threads_;
  Shared shared_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<MaskThreads>(m, "MaskThreads")
      .def(py::init<int, std::tuple<size_t, size_t, size_t, size_t>, int64_t, size_t, size_t, bool>())
      .def("begin", &MaskThreads::begin)
      .def("give_slot", &MaskThreads::give_slot)
      .def("post", &MaskThreads::post)
      .def("admit", &MaskThreads::admit)
      .def("end", &MaskThreads::end)
      .def("close", &MaskThreads::close)
      .def("ring", &MaskThreads::ring)
      .def("take_failures", &MaskThreads::take_failures)
      .def_property_readonly("polls", &MaskThreads::polls)
      .def_property_readonly("failed", &MaskThreads::failed)
      .def_property_readonly("written", &MaskThreads::written)
      .def_property_readonly("ns", &MaskThreads::ns);
}

}  // namespace gapless
