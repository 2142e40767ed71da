#include "commons.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "sums.h"

namespace gapless {
namespace {

constexpr uint64_t kMagic = 0x3153454c50414701;  // changes with the layout
constexpr int kLooks = 50;
// A waiting program keeps its core this long, as a reader of orders does, and then sleeps; it sleeps at once if the rank
// that it waits for was last on the same core. It never yields: a busy machine's other programs would then keep the core
// for milliseconds, while one that was asleep gets it back at once.
constexpr int64_t kKeepNs = 100'000, kReaderKeepNs = 30'000;
// The longest sleep before another look at all: a lost wake-up costs no more.
constexpr int64_t kNapNs = 2'000'000, kReaderNapNs = 1'000'000'000;
constexpr std::chrono::milliseconds kPulse{50};
constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a futex is the low half of the ring's head");

int64_t aligned(int64_t nbytes, int64_t to) { return (nbytes + to - 1) / to * to; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(const void* word, uint32_t seen, int64_t ns) {
  const timespec longest{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &longest, nullptr, 0);
}

void futex_wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// After a store that ends a wait: wakes the ones that sleep. Either the sleeper is seen here, or it sees the store.
void wake(const void* word, const std::atomic<uint32_t>& sleepers) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers.load(kRelaxed) != 0) futex_wake(word);
}

struct Patience {
  int64_t keeps, nap, longest;
};

// Looks for a while, then sleeps on the word until `ready`, or for the longest time.
template <typename Ready>
bool wait_until(const Ready& ready, const void* word, std::atomic<uint32_t>& sleepers, const Patience& patience) {
  const auto look = [&] {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      pause();
    }
    return ready();
  };
  if (look()) return true;
  const int64_t begin = now_ns();
  for (int64_t waited = 0; !ready(); waited = now_ns() - begin) {
    if (waited >= patience.longest) return false;
    if (waited < patience.keeps) {
      if (look()) return true;
      continue;
    }
    sleepers.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t seen = reinterpret_cast<const std::atomic<uint32_t>*>(word)->load(kAcquire);
    if (!ready()) futex_wait(word, seen, std::min(patience.nap, patience.longest - waited));
    sleepers.fetch_sub(1);
  }
  return true;
}

bool has(const Place& place, uint32_t call) { return int32_t(place.begun.load(kAcquire) - call) >= 0; }

const char* name_of(What what) {
  switch (what) {
    case What::ADD: return "add";
    case What::ADD_NORM: return "add_norm";
    case What::GATHER: return "gather";
    case What::TELL: return "tell";
  }
  return "nothing";
}

std::string text_of(const Tag& tag) {
  static const char* kinds[] = {"float32", "bfloat16", "float16", "int64", "int32"};
  return std::string(name_of(tag.what)) + " of " + std::to_string(tag.rows) + " rows, " + std::to_string(tag.nbytes) +
      " bytes of " + kinds[tag.kind % 5];
}

template <typename T>
T* carve(char*& at, int64_t count) {
  T* found = reinterpret_cast<T*>(at);
  at += count * sizeof(T);
  return found;
}

}  // namespace

int64_t Commons::board_at() { return sizeof(Head); }

int64_t Commons::nbytes(int world) {
  const int64_t small = sizeof(Head) + sizeof(Ring) + world * (sizeof(BoardLine) + sizeof(Place) + sizeof(Cursor));
  return aligned(small, 4096) + kRingBytes + 2 * world * kSlotBytes;
}

Commons::Commons(int fd, int rank, int world) : rank(rank), world(world) {
  struct stat found;
  const int64_t size = nbytes(world);
  if (world < 1 || world > kMostRanks || rank < 0 || rank >= world || fstat(fd, &found) || found.st_size != size)
    throw std::runtime_error("the memory of the ranks has another size than " + std::to_string(world) + " ranks need");
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the memory of the ranks cannot be mapped");
  char* at = memory_ = static_cast<char*>(memory);
  head_ = carve<Head>(at, 1);
  board_ = carve<BoardLine>(at, world);
  places_ = carve<Place>(at, world);
  ring_ = carve<Ring>(at, 1);
  cursors_ = carve<Cursor>(at, world);
  frames_ = memory_ + aligned(at - memory_, 4096);
  parts_ = frames_ + kRingBytes;
  if (head_->magic == 0) {  // a new file is all zeros, and its maker maps it before any other
    head_->world = uint32_t(world);
    head_->magic = kMagic;
  }
  if (head_->magic != kMagic || head_->world != uint32_t(world)) {
    munmap(memory, size);
    throw std::runtime_error("the memory of the ranks is another version's, or of another number of ranks");
  }
  board_[rank].pulse.store(uint64_t(now_ns()), kRelaxed);
  pulse_ = std::thread(&Commons::beat, this);
}

Commons::~Commons() {
  {
    std::lock_guard lock(mutex_);
    closes_ = true;
  }
  closing_.notify_one();
  pulse_.join();
  munmap(memory_, nbytes(world));
}

// Its own thread: a host that loads weights, or holds the interpreter's lock for long, is alive all the same.
void Commons::beat() {
  std::unique_lock lock(mutex_);
  while (!closing_.wait_for(lock, kPulse, [this] { return closes_; }))
    board_[rank].pulse.store(uint64_t(now_ns()), kRelaxed);
}

void Commons::stop() {
  head_->stopped.store(1, kRelease);
  for (int other = 0; other < world; ++other) futex_wake(&places_[other].begun);
  futex_wake(&ring_->head);
}

void Commons::check() const {
  if (stopped()) throw std::runtime_error("the ranks were stopped");
}

// Notes the tag of the next call. The place that it takes was the call's before the last: all ranks have left that.
uint32_t Commons::begin(const Tag& tag) {
  const int64_t thread = syscall(SYS_gettid);
  int64_t known = 0;
  if (!thread_.compare_exchange_strong(known, thread) && known != thread)
    throw std::runtime_error("a second thread uses the ranks' group, which belongs to one stream");
  check();
  const uint32_t call = ++call_;
  for (int other = 0; other < world; ++other)
    if (other != rank) await(other, call - 1);
  places_[rank].tags[call & 1] = tag;
  return call;
}

void Commons::publish(uint32_t call) {
  Place& place = places_[rank];
  place.core.store(sched_getcpu(), kRelaxed);
  place.begun.store(call, kRelease);
  board_[rank].calls.store(call, kRelaxed);
  wake(&place.begun, place.sleepers);
}

void Commons::await(int other, uint32_t call) {
  Place& place = places_[other];
  if (!has(place, call)) await_slowly(place, call);
}

void Commons::await_slowly(Place& place, uint32_t call) {
  BoardLine& line = board_[rank];
  const int64_t begin = now_ns();
  line.waiting_since.store(uint64_t(begin), kRelaxed);
  const auto ready = [&] { return has(place, call) || stopped(); };
  const int64_t keeps = place.core.load(kRelaxed) == sched_getcpu() ? 0 : kKeepNs;
  wait_until(ready, &place.begun, place.sleepers, {keeps, kNapNs, INT64_MAX});
  line.waited.store(line.waited.load(kRelaxed) + uint64_t(now_ns() - begin), kRelaxed);
  line.waiting_since.store(0, kRelaxed);
  if (!has(place, call)) check();
}

void Commons::await_all(uint32_t call, const Tag& tag) {
  for (int other = 0; other < world; ++other)
    if (other != rank) {
      await(other, call);
      compare(other, call, tag);
    }
}

void Commons::compare(int other, uint32_t call, const Tag& mine) const {
  const Tag& theirs = tag(other, call);
  const bool same = theirs.what == mine.what && theirs.kind == mine.kind && theirs.rows == mine.rows;
  if (same && (mine.what == What::GATHER || theirs.nbytes == mine.nbytes)) return;
  throw std::runtime_error(
      "the ranks do different things: call " + std::to_string(call) + " of rank " + std::to_string(rank) + " is " +
      text_of(mine) + ", of rank " + std::to_string(other) + " " + text_of(theirs));
}

void Commons::add(void* y, int64_t count, Kind kind) {
  const int64_t size = kind == LONG ? 8 : kind == FLOAT ? 4 : 2, most = kSlotBytes / size;
  const void* parts[kMostRanks];
  for (int64_t done = 0; done < count; done += most) {
    const int64_t some = std::min(most, count - done);
    char* own = static_cast<char*>(y) + done * size;
    const Tag tag{What::ADD, kind, 1, some * size};
    const uint32_t call = begin(tag);
    std::memcpy(part(rank, call), own, some * size);
    publish(call);
    await_all(call, tag);
    for (int other = 0; other < world; ++other) parts[other] = other == rank ? own : part(other, call);
    sum_parts(parts, world, some, kind, own);
  }
}

void Commons::add_norm(void* x, const void* y, int64_t rows, int64_t size, Kind kind, Norm norm, void* out) {
  const int64_t width = size * (kind == FLOAT ? 4 : 2), most = kSlotBytes / std::max<int64_t>(width, 1);
  if (most < 1) throw std::runtime_error("a row of this width does not fit a place for parts");
  const void* parts[kMostRanks];
  for (int64_t done = 0; done < rows; done += most) {
    const int64_t some = std::min(most, rows - done);
    const char* own = static_cast<const char*>(y) + done * width;
    const Tag tag{What::ADD_NORM, kind, some, some * width};
    const uint32_t call = begin(tag);
    std::memcpy(part(rank, call), own, some * width);
    publish(call);
    await_all(call, tag);
    for (int other = 0; other < world; ++other) parts[other] = other == rank ? own : part(other, call);
    sum_and_norm(
        parts, world, some, size, kind, norm, static_cast<char*>(x) + done * width,
        static_cast<char*>(out) + done * width);
  }
}

// A rank's part is a stream of bytes, in as many calls as the longest needs: all see the lengths in the first.
void Commons::gather(const void* from, int64_t rows, int64_t width, void* out, int64_t out_width) {
  const int64_t total = rows * width;
  int64_t longest = total, widths = width;
  for (int64_t done = 0; done == 0 || done < longest; done += kSlotBytes) {
    const Tag tag{What::GATHER, WORD, rows, total};
    const uint32_t call = begin(tag);
    const int64_t some = std::clamp<int64_t>(total - done, 0, kSlotBytes);
    if (rank != 0) std::memcpy(part(rank, call), static_cast<const char*>(from) + done, some);
    publish(call);
    if (done == 0 || rank == 0) await_all(call, tag);
    if (done == 0)
      for (int other = 0; other < world; ++other)
        if (other != rank) {
          longest = std::max(longest, this->tag(other, call).nbytes);
          widths += rows ? this->tag(other, call).nbytes / rows : 0;
        }
    if (rank != 0) continue;
    if (rows && widths != out_width) throw std::runtime_error("the ranks' columns do not make up the leader's");
    place_gathered(call, done, rows, static_cast<char*>(out), out_width);
  }
  if (rank != 0) return;
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<char*>(out) + row * out_width, static_cast<const char*>(from) + row * width, width);
}

// Copies the followers' bytes from `begin` on into their columns.
void Commons::place_gathered(uint32_t call, int64_t begin, int64_t rows, char* out, int64_t out_width) const {
  int64_t column = rows ? tag(0, call).nbytes / rows : 0;
  for (int other = 1; other < world; ++other) {
    const int64_t total = tag(other, call).nbytes, width = rows ? total / rows : 0;
    const int64_t end = std::min(total, begin + kSlotBytes);
    const char* from = part(other, call);
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / width, inside = at % width, some = std::min(width - inside, end - at);
      std::memcpy(out + row * out_width + column + inside, from + at - begin, some);
      at += some;
    }
    column += width;
  }
}

void Commons::tell(void* x, int64_t nbytes) {
  for (int64_t done = 0; done < nbytes; done += kSlotBytes) {
    const int64_t some = std::min(kSlotBytes, nbytes - done);
    char* own = static_cast<char*>(x) + done;
    const Tag tag{What::TELL, WORD, 1, some};
    const uint32_t call = begin(tag);
    if (rank == 0) std::memcpy(part(0, call), own, some);
    publish(call);
    if (rank == 0) continue;
    await(0, call);
    compare(0, call, tag);
    std::memcpy(own, part(0, call), some);
  }
}

// Where a frame of this size begins, and how many bytes before it are skipped.
uint64_t Commons::where(int64_t nbytes, uint64_t& skipped) const {
  const uint64_t head = ring_->head.load(kRelaxed), left = kRingBytes - head % kRingBytes;
  skipped = left < uint64_t(8 + aligned(nbytes, 8)) ? left : 0;
  return head + skipped;
}

bool Commons::room(int64_t nbytes) const {
  uint64_t skipped, oldest = ring_->head.load(kRelaxed);
  const uint64_t end = where(nbytes, skipped) + 8 + aligned(nbytes, 8);
  for (int reader = 1; reader < world; ++reader) oldest = std::min(oldest, cursors_[reader].at.load(kAcquire));
  return nbytes <= kMostFrame && end - oldest <= uint64_t(kRingBytes);
}

void Commons::put(const void* from, int64_t nbytes) {
  uint64_t skipped;
  const uint64_t at = where(nbytes, skipped);
  if (skipped) std::memcpy(frames_ + (at - skipped) % kRingBytes, &kSkip, 8);
  char* to = frames_ + at % kRingBytes;
  const uint64_t length = nbytes;
  std::memcpy(to, &length, 8);
  std::memcpy(to + 8, from, nbytes);
  ring_->head.store(at + 8 + aligned(nbytes, 8), kRelease);
  wake(&ring_->head, ring_->sleepers);
}

int64_t Commons::take(void* to) {
  std::atomic<uint64_t>& cursor = cursors_[rank].at;
  uint64_t at = cursor.load(kRelaxed), length;
  const uint64_t head = ring_->head.load(kAcquire);
  if (at == head) return -1;
  std::memcpy(&length, frames_ + at % kRingBytes, 8);
  if (length == kSkip) {
    at += kRingBytes - at % kRingBytes;
    std::memcpy(&length, frames_, 8);
  }
  if (length > uint64_t(kMostFrame) || at + 8 + length > head) throw std::runtime_error("the ring is broken");
  std::memcpy(to, frames_ + at % kRingBytes + 8, length);
  cursor.store(at + 8 + aligned(length, 8), kRelease);
  return int64_t(length);
}

bool Commons::wait(int64_t ns) {
  const auto full = [&] { return cursors_[rank].at.load(kRelaxed) != ring_->head.load(kAcquire); };
  const auto ready = [&] { return full() || stopped(); };
  wait_until(ready, &ring_->head, ring_->sleepers, {kReaderKeepNs, kReaderNapNs, ns});
  return full();
}

}  // namespace gapless
