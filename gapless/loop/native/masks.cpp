// Masks of rows with native matchers: threads that answer each token with the mask of the next one, without the
// interpreter. `loop/masks.py` does the same in Python, and decides when a row begins, gets a slot, and ends.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gapless {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;
using Tokens = std::vector<int32_t>;

constexpr int64_t kNothing = -1, kAbandoned = -2;
constexpr size_t kNarrow = 16;  // loop.masks.NARROW
// Between two looks at the mail pass this part of the time since the last event, within these bounds.
constexpr int kPart = 16;
constexpr nanoseconds kShortest{2'000}, kLongest{100'000}, kGivesUp{10'000'000'000}, kCloses{1'000'000'000};

// gapless.base.records.MatcherFunctions
struct Functions {
  int32_t (*consume)(void*, uint32_t);
  int32_t (*write_mask)(void*, uint32_t*, size_t);
  int32_t (*rollback)(void*, size_t);
  bool (*accepts)(void*);
  const char* (*error)(void*);
  void* (*copy)(void*);
  void (*free)(void*);
};

// gapless.base.records.TokenTexts
struct Texts {
  std::string joined;
  std::vector<uint32_t> ends;

  std::string_view of(int32_t token) const {
    const size_t first = token ? ends[token - 1] : 0;
    return std::string_view(joined).substr(first, ends[token] - first);
  }
};

// The mail of a row of the tables (see `layout`), and its permitted writer.
struct Slot {
  int64_t *tags, *ahead;
  const int64_t* told;
  const int32_t *tokens, *drafted, *drafts;
  int32_t *along, *expected, *run;
  uint32_t* masks;
  std::mutex mutex;                    // held while a mask is written
  std::atomic<int64_t> key{kNothing};  // of the row that has the slot
};

// A matcher, and how many tokens it has followed since the end of the output.
struct Follower {
  std::shared_ptr<void> matcher;
  int64_t ended = 0;
};

struct Row {
  int64_t key;
  Functions functions;
  Follower now;
  int64_t length;  // tokens that the matcher has followed, the prompt's included
  std::vector<uint32_t> ends;
  size_t drafts = 0;  // in a step, at most
  std::shared_ptr<const Texts> texts;
  Slot* slot = nullptr;
  int64_t generation = 0;
  bool awaits = false;         // the next tokens
  bool ahead = false;          // whether it is to look ahead, along
  Tokens guess;                // these drafts
  Follower spare;              // a copy that has never looked ahead, from the first look on
  Tokens settled;              // which the copy is to follow

  int64_t tag() const { return generation << 32 | length; }
};

// Writes the mask after the tokens of a tag and `place` drafts, the last of them `draft`, unless another row has got
// the slot. Returns whether it has written.
bool post(Slot& slot, int64_t key, int64_t tag, const void* words, size_t bytes, size_t place = 0, int32_t draft = 0) {
  std::lock_guard lock(slot.mutex);
  if (slot.key != key) return false;
  std::memcpy(reinterpret_cast<char*>(slot.masks) + place * bytes, words, bytes);
  if (place) slot.along[place - 1] = draft;
  __atomic_store_n(slot.tags + place, tag + static_cast<int64_t>(place), __ATOMIC_RELEASE);
  return true;
}

// Writes the expected tokens after a tag, unless another row has got the slot.
void post_ahead(Slot& slot, int64_t key, int64_t tag, const Tokens& run) {
  std::lock_guard lock(slot.mutex);
  if (slot.key != key) return;
  std::copy(run.begin(), run.end(), slot.run);
  *slot.expected = static_cast<int32_t>(run.size());
  __atomic_store_n(slot.ahead, tag, __ATOMIC_RELEASE);
}

// Read by every thread.
struct Shared {
  std::vector<std::unique_ptr<Slot>> slots;
  size_t mask_bytes;
  int64_t most;  // tokens of a reply
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
  // A worker's rows, which another may take over.
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

  void admit(int64_t key, Slot* slot, int64_t generation, std::vector<int32_t> tokens) {
    leave([key, slot, generation, tokens = std::move(tokens)](Worker& worker) mutable {
      auto found = worker.work_.rows.find(key);
      if (found == worker.work_.rows.end()) return;  // its matcher has failed
      Row& row = found->second;
      row.slot = slot, row.generation = generation;
      const auto followed = std::min<size_t>(row.length, tokens.size());
      tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(followed));
      worker.go_on(row, tokens, {}, Clock::now());
    });
  }

  void end(int64_t key) {
    leave([key](Worker& worker) { worker.work_.rows.erase(key); });
  }

  void ring() { leave({}); }

  // Lets the thread end after its present work.
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

  // Carries out the news, and answers every new token. Returns whether there was one.
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
    return std::any_of(rows.begin(), rows.end(), [](const auto& one) { return one.second.awaits; });
  }

  // Answers every new token, and advances the copies; then rows look ahead until another one arrives. Returns whether
  // there was one.
  bool look() {
    const auto since = Clock::now();
    bool any = false;
    for (auto it = work_.rows.begin(); it != work_.rows.end();) {
      Row& row = it++->second;  // a row that fails is erased
      const int64_t count = row.awaits ? news_of(row) : 0;
      if (!count) continue;
      any = true;
      const Slot& slot = *row.slot;
      // Copies: the device writes the next reply once the first of these masks is ready.
      const Tokens drafts{slot.drafts, slot.drafts + *slot.drafted};
      if (!go_on(row, {slot.tokens, slot.tokens + count}, drafts, since)) return any;
    }
    for (auto& one : work_.rows)
      if (!one.second.settled.empty() && !let_copy_follow(one.second)) return any;
    for (auto it = work_.rows.begin(); it != work_.rows.end();) {
      Row& row = it++->second;
      if (row.ahead && !look_ahead(row)) break;
    }
    return any;
  }

  // The number of tokens that the row's matcher has not followed yet.
  int64_t news_of(const Row& row) const {
    const int64_t count = __atomic_load_n(row.slot->told, __ATOMIC_ACQUIRE) - row.tag();
    return count > 0 && count <= shared_->most ? count : 0;
  }

  // Has the matcher follow these tokens, and posts the mask of the next. Returns false when it took too long: by then
  // nothing of the worker but `row` is the thread's.
  bool go_on(Row& row, const Tokens& tokens, const Tokens& drafts, Clock::time_point since) {
    row.awaits = row.ahead = false;
    if (row.slot->key != row.key) return true;  // the row was given up, and another has the slot
    begin_at(row);
    const char* wrong = advance_all(row, row.now, tokens);
    row.length += static_cast<int64_t>(tokens.size());
    if (!wrong) wrong = write(row);
    if (!wrong && empty()) wrong = "the grammar allows no token";
    bool posted = false;
    if (!wrong && at_ == row.key) posted = post(*row.slot, row.key, row.tag(), words_.data(), shared_->mask_bytes);
    const auto made = Clock::now();
    if (row.spare.matcher) row.settled.insert(row.settled.end(), tokens.begin(), tokens.end());
    if (!leave_off(row)) return false;
    if (wrong) {
      fail(row, wrong);
      return true;
    }
    shared_->written += posted;
    shared_->ns += std::chrono::duration_cast<nanoseconds>(made - since).count();
    row.awaits = posted, row.ahead = posted && row.drafts, row.guess = drafts;
    return true;
  }

  // Advances the copy by the settled tokens: after the masks of all rows. Without a copy the row does not look ahead.
  // Returns false when it took too long.
  bool let_copy_follow(Row& row) {
    begin_at(row);
    if (advance_all(row, row.spare, std::exchange(row.settled, {}))) row.spare = {}, row.drafts = 0, row.ahead = false;
    return leave_off(row);
  }

  void begin_at(const Row& row) {
    began_ = Clock::now().time_since_epoch().count();
    at_ = row.key;
  }

  // Returns false when the matcher took too long.
  bool leave_off(const Row& row) {
    int64_t at = row.key;
    return at_.compare_exchange_strong(at, kNothing);
  }

  // Without a mask the device holds the row until the loop has taken it out.
  void fail(const Row& row, const char* wrong) {
    shared_->fail(row.key, wrong);
    work_.rows.erase(row.key);
  }

  // Posts what a row may need next. Returns false when there is something else to do.
  bool look_ahead(Row& row) {
    begin_at(row);
    if (!row.spare.matcher)
      row.spare = {{row.functions.copy(row.now.matcher.get()), row.functions.free}, row.now.ended};
    Tokens run;
    bool quiet = true;
    if (go_ahead(row, run, quiet) || rollback(row, run.size())) {
      // The guess has broken the matcher: the row continues with the copy, and looks ahead no more.
      row.now = std::exchange(row.spare, {});
      row.drafts = 0, quiet = true;
    }
    row.ahead = !quiet;
    return leave_off(row) && quiet;
  }

  const char* advance_all(const Row& row, Follower& follower, const Tokens& tokens) {
    for (int32_t token : tokens)
      if (const char* wrong = advance(row, follower, static_cast<uint32_t>(token))) return wrong;
    return nullptr;
  }

  // Posts the masks after each draft, up to the first that is not allowed or ends the text. Then posts the expected
  // tokens: these drafts, and the tokens after them as long as the form leaves one text. Returns the error.
  const char* go_ahead(Row& row, Tokens& run, bool& quiet) {
    const char* wrong = nullptr;
    {
      std::lock_guard lock(row.slot->mutex);
      if (row.slot->key != row.key) return nullptr;
      std::memcpy(words_.data(), row.slot->masks, shared_->mask_bytes);
    }
    for (int32_t draft : row.guess) {
      if (!(words_[draft / 32] >> draft % 32 & 1)) break;
      if ((wrong = follow(row, draft, run))) return wrong;
      if (!(quiet = !called(row))) return nullptr;
      if (empty() || !post(*row.slot, row.key, row.tag(), words_.data(), shared_->mask_bytes, run.size(), draft)) break;
    }
    const size_t known = run.size();
    while (run.size() <= known + row.drafts) {
      const int32_t token = expected_next(row);
      if (token < 0) break;
      if ((wrong = follow(row, token, run))) return wrong;
      if (!(quiet = !called(row))) return nullptr;
    }
    if (run.size() > known) post_ahead(*row.slot, row.key, row.tag(), run);
    return nullptr;
  }

  // Whether there is more to do than to look ahead: also when this row's matcher took too long.
  bool called(const Row& row) {
    std::lock_guard lock(mutex_);  // `abandon` takes the other rows
    return at_ != row.key || closing_ || !news_.empty() ||
           std::any_of(work_.rows.begin(), work_.rows.end(),
                       [this](const auto& one) { return one.second.awaits && news_of(one.second); });
  }

  // Advances the matcher by a possible token, and makes the mask after it. Returns the error.
  const char* follow(Row& row, int32_t token, Tokens& run) {
    if (const char* wrong = advance(row, row.now, static_cast<uint32_t>(token))) return wrong;
    run.push_back(token);
    return write(row);
  }

  // The token that the mask leaves, or the longest one where all that it leaves begin it; else -1.
  int32_t expected_next(const Row& row) const {
    std::array<int32_t, kNarrow> found;
    size_t count = 0;
    for (size_t at = 0; at < words_.size(); ++at)
      for (uint32_t word = words_[at]; word; word &= word - 1) {
        if (count == kNarrow) return -1;
        found[count++] = static_cast<int32_t>(32 * at) + std::countr_zero(word);
      }
    if (count == 1) return found[0];
    if (count == 0 || !row.texts || static_cast<size_t>(found[count - 1]) >= row.texts->ends.size()) return -1;
    const Texts& texts = *row.texts;
    const int32_t* longest = std::max_element(found.begin(), found.begin() + count, [&](int32_t one, int32_t other) {
      return texts.of(one).size() < texts.of(other).size();
    });
    const auto begins = [&](int32_t token) { return texts.of(*longest).starts_with(texts.of(token)); };
    return std::all_of(found.begin(), found.begin() + count, begins) ? *longest : -1;
  }

  // These three are `grammar.matcher.FormMatcher`. They return the error.
  const char* advance(const Row& row, Follower& follower, uint32_t token) {
    const bool ends = std::find(row.ends.begin(), row.ends.end(), token) != row.ends.end();
    if (follower.ended || (ends && row.functions.accepts(follower.matcher.get()))) {
      ++follower.ended;
      return ends ? nullptr : "a token came after the end of the output";
    }
    return row.functions.consume(follower.matcher.get(), token) ? reason(row, follower) : nullptr;
  }

  const char* write(Row& row) {
    if (row.now.ended)
      std::fill(words_.begin(), words_.end(), 0);
    else if (row.functions.write_mask(row.now.matcher.get(), words_.data(), shared_->mask_bytes))
      return reason(row, row.now);
    if (row.now.ended || row.functions.accepts(row.now.matcher.get()))
      for (uint32_t token : row.ends) words_[token / 32] |= 1u << token % 32;
    return nullptr;
  }

  const char* rollback(Row& row, size_t count) {
    const auto beyond = std::min(static_cast<size_t>(row.now.ended), count);
    row.now.ended -= static_cast<int64_t>(beyond);
    if (count == beyond) return nullptr;
    return row.functions.rollback(row.now.matcher.get(), count - beyond) ? reason(row, row.now) : nullptr;
  }

  bool empty() const {
    return std::all_of(words_.begin(), words_.end(), [](uint32_t word) { return word == 0; });
  }

  const char* reason(const Row& row, const Follower& follower) {
    const char* text = row.functions.error(follower.matcher.get());
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

// Rows are spread over the threads by their lexers; one thread at a time uses a lexer: a guess of one thread would
// delay the mask of another. A lexer without rows goes to the thread with the fewest lexers of its form, whose masks
// take equally long, and of these to the one with the fewest rows.
class MaskThreads {
 public:
  using Lexer = std::pair<size_t, size_t>;  // the number of its form, and its own within the form

  // `mail` is its address, `records` the number of records and the bytes of one, `parts` the words of their parts.
  MaskThreads(int threads, size_t mail, const std::array<size_t, 11>& parts, std::pair<size_t, size_t> records,
              size_t mask_bytes, bool polls)
      : threads_(threads) {
    const auto [tag, told, tokens, drafted, drafts, along, ahead, expected, run, mask, most] = parts;
    shared_->mask_bytes = mask_bytes, shared_->most = static_cast<int64_t>(most), shared_->polls = polls;
    for (size_t slot = 0; slot < records.first; ++slot) {
      auto* words = reinterpret_cast<int32_t*>(mail + slot * records.second);
      auto at = std::make_unique<Slot>();
      at->tags = reinterpret_cast<int64_t*>(words + tag), at->told = reinterpret_cast<int64_t*>(words + told);
      at->tokens = words + tokens, at->drafted = words + drafted, at->drafts = words + drafts;
      at->ahead = reinterpret_cast<int64_t*>(words + ahead), at->expected = words + expected, at->run = words + run;
      at->along = words + along, at->masks = reinterpret_cast<uint32_t*>(words + mask);
      shared_->slots.push_back(std::move(at));
    }
  }

  ~MaskThreads() { close(); }

  // Ends the threads and frees their rows. Working matchers are waited for, up to kCloses.
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
  void begin(int64_t key, Lexer lexer, const std::array<size_t, 7>& functions, size_t matcher, int64_t length,
             std::vector<uint32_t> ends, size_t drafts) {
    const auto [consume, write_mask, rollback, accepts, error, copy, free] = functions;
    const Functions calls{reinterpret_cast<decltype(Functions::consume)>(consume),
                          reinterpret_cast<decltype(Functions::write_mask)>(write_mask),
                          reinterpret_cast<decltype(Functions::rollback)>(rollback),
                          reinterpret_cast<decltype(Functions::accepts)>(accepts),
                          reinterpret_cast<decltype(Functions::error)>(error),
                          reinterpret_cast<decltype(Functions::copy)>(copy),
                          reinterpret_cast<decltype(Functions::free)>(free)};
    std::shared_ptr<void> owned(reinterpret_cast<void*>(matcher), calls.free);
    while (workers_.size() < static_cast<size_t>(threads_)) workers_.push_back(std::make_unique<Worker>(shared_));
    // Ends of sequence that the model has no logits for cannot come.
    std::erase_if(ends, [this](uint32_t token) { return token / 8 >= shared_->mask_bytes; });
    of_row_[key] = lexer;
    ++served_.try_emplace(lexer, Served{idlest(lexer.first), 0}).first->second.rows;
    of(key)->begin({.key = key, .functions = calls, .now = {owned}, .length = length, .ends = std::move(ends),
                    .drafts = drafts, .texts = texts_});
  }

  // Rows that begin from now on are of this vocabulary.
  void set_texts(std::string joined, const py::array_t<uint32_t, py::array::c_style>& ends) {
    texts_ = std::make_shared<Texts>(Texts{std::move(joined), {ends.data(), ends.data() + ends.size()}});
  }

  // From now on the row that had the slot writes no mask there; one that it is writing is waited for, by a thread.
  void give_slot(int64_t slot, int64_t key) { shared_->slots.at(slot)->key = key; }

  void admit(int64_t key, int64_t slot, int64_t generation, const py::array_t<int32_t, py::array::c_style>& tokens) {
    give_slot(slot, key);
    of(key)->admit(key, shared_->slots[slot].get(), generation, {tokens.data(), tokens.data() + tokens.size()});
  }

  // Writes a mask of a row that Python serves, unless another row has got the slot.
  void post_made(int64_t key, int64_t slot, int64_t tag, const py::array_t<int32_t, py::array::c_style>& words,
                 size_t place, int32_t draft) {
    post(*shared_->slots.at(slot), key, tag, words.data(), shared_->mask_bytes, place, draft);
  }

  void post_run(int64_t key, int64_t slot, int64_t tag, const Tokens& run) {
    post_ahead(*shared_->slots.at(slot), key, tag, run);
  }

  void end(int64_t key) {
    if (!workers_.empty()) of(key)->end(key);
    const Lexer lexer = of_row_.at(key);
    if (!--served_.at(lexer).rows) served_.erase(lexer);
    of_row_.erase(key);
  }

  // If the thread of this row has been at one matcher for so long, leaves it there and gives its other rows to another
  // thread. Returns the key of that matcher; else kNothing.
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
  // The served rows of a lexer, and their worker.
  struct Served {
    size_t worker, rows;
  };

  std::unique_ptr<Worker>& of(int64_t key) { return workers_[served_.at(of_row_.at(key)).worker]; }

  size_t idlest(size_t form) const {
    std::vector<std::pair<size_t, size_t>> load(workers_.size());  // lexers of the form, and rows
    for (const auto& [lexer, served] : served_) {
      load[served.worker].first += lexer.first == form;
      load[served.worker].second += served.rows;
    }
    return static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
  }

  const int threads_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::shared_ptr<const Texts> texts_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::map<Lexer, Served> served_;
  std::unordered_map<int64_t, Lexer> of_row_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<MaskThreads>(m, "MaskThreads")
      .def(py::init<int, size_t, std::array<size_t, 11>, std::pair<size_t, size_t>, size_t, bool>())
      .def("begin", &MaskThreads::begin)
      .def("set_texts", &MaskThreads::set_texts)
      .def("give_slot", &MaskThreads::give_slot)
      .def("post", &MaskThreads::post_made)
      .def("post_ahead", &MaskThreads::post_run)
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
