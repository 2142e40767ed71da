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
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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

constexpr int64_t kNothing = -1, kAbandoned = -2;
// Between two looks at the mail pass this part of the time since the last event, within these bounds.
constexpr int kPart = 16;
constexpr nanoseconds kShortest{2'000}, kLongest{100'000}, kGivesUp{10'000'000'000}, kCloses{1'000'000'000};

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
  std::mutex mutex;                    // held while a mask is written
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

// Writes a mask to a slot, unless another row has got the slot. Returns whether it has written.
bool post(Slot& slot, int64_t key, int64_t tag, const void* words, size_t bytes) {
  std::lock_guard lock(slot.mutex);
  if (slot.key != key) return false;
  std::memcpy(slot.mask, words, bytes);
  __atomic_store_n(slot.tag, tag, __ATOMIC_RELEASE);
  return true;
}

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

// One thread and its rows. What it is to do comes as news, so that only the thread touches the rows.
class Worker {
 public:
  using News = std::function<void(Worker&)>;
  // What a worker has, and another may take over.
  struct Work {
    std::unordered_map<int64_t, Row> rows;
    std::deque<News> news;
  };

  explicit Worker(std::shared_ptr<Shared> shared, Work work = {})
      : shared_(std::move(shared)),
        work_(std::move(work)),
        words_(shared_->mask_bytes / 4),
        thread_([this] { run(); }) {}

  ~Worker() {
    if (!thread_.joinable()) return;  // abandoned
    close();
    thread_.join();
  }

  void begin(Row row) {
    leave([row = std::move(row)](Worker& worker) { worker.work_.rows.emplace(row.key, row); });
  }

  void admit(int64_t key, Slot* slot, int64_t owner, std::vector<int32_t> tokens) {
    leave([key, slot, owner, tokens = std::move(tokens)](Worker& worker) {
      auto found = worker.work_.rows.find(key);
      if (found == worker.work_.rows.end()) return;  // its matcher has failed
      Row& row = found->second;
      row.slot = slot, row.owner = owner;
      const auto followed = std::min<size_t>(row.length, tokens.size());
      worker.go_on(row, tokens.data() + followed, tokens.size() - followed, Clock::now());
    });
  }

  void end(int64_t key) {
    leave([key](Worker& worker) { worker.work_.rows.erase(key); });
  }

  void ring() { leave({}); }

  // Lets the thread end once it has done what it is at.
  void close() { leave({}, true); }
  bool over() const { return over_; }

  // If a matcher has been at work for `limit`, leaves it and the thread to themselves, for ever if need be: the thread
  // deletes the worker when the matcher is done. Returns its key, and everything else that there is to do.
  std::optional<std::pair<int64_t, Work>> abandon(nanoseconds limit) {
    std::lock_guard lock(mutex_);
    const int64_t key = at_;
    const nanoseconds began{began_};
    int64_t at = key;
    if (key == kNothing || Clock::now().time_since_epoch() - began < limit) return {};
    if (!at_.compare_exchange_strong(at, kAbandoned)) return {};
    // From here on the thread reads its own row alone.
    Work left = std::exchange(work_, {});
    work_.rows.insert(left.rows.extract(key));
    std::move(news_.begin(), news_.end(), std::back_inserter(left.news));
    thread_.detach();
    return std::pair{key, std::move(left)};
  }

 private:
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
    while (at_ != kAbandoned) {
      bool heard;
      {
        std::unique_lock lock(mutex_);
        wait(lock, Clock::now() - last);
        if (closing_) {
          over_ = true;
          return;
        }
        heard = std::exchange(rung_, false);
        std::move(news_.begin(), news_.end(), std::back_inserter(work_.news));
        news_.clear();
      }
      if (answer() || heard) last = Clock::now();
    }
    { std::lock_guard lock(mutex_); }  // `abandon` has returned
    delete this;
  }

  // Does what came as news, and answers every token that has come. Returns whether there was one.
  bool answer() {
    while (at_ != kAbandoned && !work_.news.empty()) {
      const News one = std::move(work_.news.front());
      work_.news.pop_front();
      one(*this);
    }
    return at_ != kAbandoned && look();
  }

  // Waits for a ring, or until it is time to look again.
  void wait(std::unique_lock<std::mutex>& lock, nanoseconds quiet) {
    const auto rung = [this] { return rung_; };
    if (!shared_->polls || quiet > kGivesUp || !awaits())
      woken_.wait(lock, rung);
    else
      woken_.wait_for(lock, std::clamp<nanoseconds>(quiet / kPart, kShortest, kLongest), rung);
  }

  bool awaits() const {
    const auto& rows = work_.rows;
    return std::any_of(rows.begin(), rows.end(), [](const auto& one) { return one.second.awaited != kNothing; });
  }

  bool look() {
    const auto since = Clock::now();
    bool any = false;
    for (auto it = work_.rows.begin(); it != work_.rows.end();) {
      Row& row = it++->second;  // a row that fails is erased
      if (row.awaited == kNothing || __atomic_load_n(row.slot->told, __ATOMIC_ACQUIRE) != row.awaited) continue;
      const int32_t token = __atomic_load_n(row.slot->token, __ATOMIC_RELAXED);
      any = true;
      if (!go_on(row, &token, 1, since)) break;
    }
    return any;
  }

  // Has the matcher follow these tokens, and posts the mask of the next. Returns false when it took too long: by then
  // nothing of the worker but `row` is the thread's.
  bool go_on(Row& row, const int32_t* tokens, size_t count, Clock::time_point since) {
    row.awaited = kNothing;
    if (row.slot->key != row.key) return true;  // the row was given up, and another has the slot
    began_ = Clock::now().time_since_epoch().count();
    at_ = row.key;
    const char* wrong = nullptr;
    for (size_t i = 0; i < count && !wrong; ++i) wrong = advance(row, static_cast<uint32_t>(tokens[i]));
    if (!wrong) wrong = write(row);
    int64_t at = row.key;
    if (!at_.compare_exchange_strong(at, kNothing)) return false;
    if (wrong) {
      // Without a mask the device holds the row until the loop has taken it out.
      shared_->fail(row.key, wrong);
      work_.rows.erase(row.key);
      return true;
    }
    row.length += static_cast<int64_t>(count);
    if (!post(*row.slot, row.key, row.owner << 32 | row.length, words_.data(), shared_->mask_bytes)) return true;
    row.awaited = row.owner << 32 | (row.length + 1);
    ++shared_->written;
    shared_->ns += std::chrono::duration_cast<nanoseconds>(Clock::now() - since).count();
    return true;
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
    if (row.ended)
      std::fill(words_.begin(), words_.end(), 0);
    else if (row.functions.write_mask(row.matcher.get(), words_.data(), shared_->mask_bytes))
      return reason(row);
    if (row.ended || row.functions.accepts(row.matcher.get()))
      for (uint32_t token : row.ends) words_[token / 32] |= 1u << token % 32;
    const bool empty = std::all_of(words_.begin(), words_.end(), [](uint32_t word) { return word == 0; });
    return empty ? "the grammar allows no token" : nullptr;
  }

  const char* reason(Row& row) {
    const char* text = row.functions.error(row.matcher.get());
    return text ? text : "no token can follow";
  }

  const std::shared_ptr<Shared> shared_;
  Work work_;                             // the thread's
  std::vector<uint32_t> words_;           // the thread's: the mask that it makes
  std::atomic<int64_t> at_{kNothing};     // the key of the row whose matcher is at work
  std::atomic<int64_t> began_{0};         // when it began, ns
  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<News> news_;
  bool rung_ = false, closing_ = false;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

// Rows are spread over the threads, so that each matcher is used by one alone.
class MaskThreads {
 public:
  // `mail` has the addresses of the first record's tag, its reply's tag, token and mask.
  MaskThreads(int threads, const std::tuple<size_t, size_t, size_t, size_t>& mail, int64_t slots, size_t record_bytes,
              size_t mask_bytes, bool polls)
      : threads_(threads) {
    shared_->mask_bytes = mask_bytes, shared_->polls = polls;
    const auto [tag, told, token, mask] = mail;
    for (int64_t slot = 0; slot < slots; ++slot) {
      auto at = std::make_unique<Slot>();
      const size_t offset = static_cast<size_t>(slot) * record_bytes;
      at->tag = reinterpret_cast<int64_t*>(tag + offset), at->told = reinterpret_cast<int64_t*>(told + offset);
      at->token = reinterpret_cast<int32_t*>(token + offset), at->mask = reinterpret_cast<uint32_t*>(mask + offset);
      shared_->slots.push_back(std::move(at));
    }
  }

  ~MaskThreads() { close(); }

  // Ends the threads; what they had is freed. Matchers that are at work are waited for, up to kCloses.
  void close() {
    py::gil_scoped_release release;
    for (auto& worker : workers_) worker->close();
    const auto end = Clock::now() + kCloses;
    for (auto& worker : workers_) {
      while (!worker->over() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!worker->over() && worker->abandon(nanoseconds{0})) static_cast<void>(worker.release());
    }
    workers_.clear();
  }

  // Takes over a matcher. The first one starts the threads.
  void begin(int64_t key, const std::tuple<size_t, size_t, size_t, size_t, size_t>& functions, size_t matcher,
             int64_t length, std::vector<uint32_t> ends) {
    const auto [consume, write_mask, accepts, error, free] = functions;
    const Functions calls{reinterpret_cast<decltype(Functions::consume)>(consume),
                          reinterpret_cast<decltype(Functions::write_mask)>(write_mask),
                          reinterpret_cast<decltype(Functions::accepts)>(accepts),
                          reinterpret_cast<decltype(Functions::error)>(error),
                          reinterpret_cast<decltype(Functions::free)>(free)};
    std::shared_ptr<void> owned(reinterpret_cast<void*>(matcher), calls.free);
    while (workers_.size() < static_cast<size_t>(threads_)) workers_.push_back(std::make_unique<Worker>(shared_));
    // Ends of sequence that the model has no logits for cannot come.
    std::erase_if(ends, [this](uint32_t token) { return token / 8 >= shared_->mask_bytes; });
    of(key)->begin({.key = key, .functions = calls, .matcher = owned, .length = length, .ends = std::move(ends)});
  }

  // From now on the row that had the slot writes no mask there; one that it is writing is waited for, by a thread.
  void give_slot(int64_t slot, int64_t key) { shared_->slots.at(slot)->key = key; }

  void admit(int64_t key, int64_t slot, int64_t owner, const py::array_t<int32_t, py::array::c_style>& tokens) {
    give_slot(slot, key);
    of(key)->admit(key, shared_->slots[slot].get(), owner, {tokens.data(), tokens.data() + tokens.size()});
  }

  // Writes the mask of a row that Python serves, unless another row has got the slot.
  void post_made(int64_t key, int64_t slot, int64_t tag, const py::array_t<int32_t, py::array::c_style>& words) {
    post(*shared_->slots.at(slot), key, tag, words.data(), shared_->mask_bytes);
  }

  void end(int64_t key) {
    if (!workers_.empty()) of(key)->end(key);
  }

  // If the thread of this row has been at one matcher for so long, leaves it there and has another thread go on with
  // its other rows. Returns the key of that matcher; else kNothing.
  int64_t give_up(int64_t key, double seconds) {
    auto left = of(key)->abandon(nanoseconds{static_cast<int64_t>(seconds * 1e9)});
    if (!left) return kNothing;
    static_cast<void>(of(key).release());  // it deletes itself
    of(key) = std::make_unique<Worker>(shared_, std::move(left->second));
    of(key)->ring();
    return left->first;
  }

  void ring() {
    for (auto& worker : workers_) worker->ring();
  }

  std::vector<std::pair<int64_t, std::string>> take_failures() {
    std::lock_guard lock(shared_->mutex);
    shared_->failed = false;
    return std::exchange(shared_->failures, {});
  }

  bool polls() const { return shared_->polls; }
  bool failed() const { return shared_->failed; }
  int64_t written() const { return shared_->written; }
  int64_t ns() const { return shared_->ns; }

 private:
  std::unique_ptr<Worker>& of(int64_t key) { return workers_[static_cast<size_t>(key) % workers_.size()]; }

  const int threads_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<MaskThreads>(m, "MaskThreads")
      .def(py::init<int, std::tuple<size_t, size_t, size_t, size_t>, int64_t, size_t, size_t, bool>())
      .def("begin", &MaskThreads::begin)
      .def("give_slot", &MaskThreads::give_slot)
      .def("post", &MaskThreads::post_made)
      .def("admit", &MaskThreads::admit)
      .def("end", &MaskThreads::end)
      .def("give_up", &MaskThreads::give_up)
      .def("close", &MaskThreads::close)
      .def("ring", &MaskThreads::ring)
      .def("take_failures", &MaskThreads::take_failures)
      .def_property_readonly("polls", &MaskThreads::polls)
      .def_property_readonly("failed", &MaskThreads::failed)
      .def_property_readonly("written", &MaskThreads::written)
      .def_property_readonly("ns", &MaskThreads::ns);
}

}  // namespace gapless
