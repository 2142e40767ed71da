#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <omp.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif

namespace gapless {
namespace {

constexpr int MOST_THREADS = 128;
// How long a helper looks for more work before it sleeps: longer than the gaps between a step's operations.
constexpr auto AWAKE = std::chrono::microseconds(100);
// Looks before the caller offers its core to a helper that is inside a piece but does not run.
constexpr int PATIENCE = 2000;

// Whether helpers pay. They win time, and lose it when one is stopped inside a piece that the caller then waits for: on
// a machine whose cores are wanted by others that is more than they win. Then the caller works alone for a while.
using Clock = std::chrono::steady_clock;
constexpr double MOST_CREDIT = 20e-3, LEAST_CREDIT = -5e-3;
constexpr auto REST = std::chrono::milliseconds(50);

struct Credit {
  double seconds = 0;
  Clock::time_point rest_until{};

  void note(double won, double lost, Clock::time_point now) {
    seconds = std::min(seconds + won - lost, MOST_CREDIT);
    if (seconds > LEAST_CREDIT) return;
    seconds = 0;
    rest_until = now + REST;
  }
};

struct alignas(64) Range {
  std::atomic<int64_t> next;
  int64_t end;
};

// A helper's place. The scheduler leaves one woken on its caller's processor there, on a busy machine for many
// milliseconds; so the caller sends it to the other processors that it may use itself.
struct Helper {
  std::atomic<int> processor{-1}, id{0};

  void here() {
#ifdef __linux__
    if (!id.load(std::memory_order_relaxed)) id.store(gettid(), std::memory_order_relaxed);
    processor.store(sched_getcpu(), std::memory_order_release);
#endif
  }

  void send_away(int from) {
#ifdef __linux__
    cpu_set_t others;
    // Acquired: the id is set before the processor. An id of 0 would mean the caller.
    if (from < 0 || processor.load(std::memory_order_acquire) != from) return;
    if (sched_getaffinity(0, sizeof(others), &others)) return;
    CPU_CLR(from, &others);
    // Both may fail where processors are taken away meanwhile; then it stays.
    if (CPU_COUNT(&others) && !sched_setaffinity(id.load(std::memory_order_relaxed), sizeof(others), &others))
      processor.store(-1, std::memory_order_relaxed);
#endif
  }
};

// Between two looks at a value that another thread will change.
inline void breathe() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

int processor_here() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

struct Pool {
  std::mutex busy;
  // The number of the job; helpers wait for another one. Odd while the job takes helpers in.
  alignas(64) std::atomic<uint32_t> job{0};
  alignas(64) std::atomic<int> inside{0};
  int threads = 0, helpers = 0;
  Piece piece = nullptr;
  const void* work = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // of the first piece that raised, which set `failed`
  Range ranges[MOST_THREADS];
  Helper places[MOST_THREADS];
  Credit credit;

  // An error must not end a helper, nor the caller before the helpers are out of its work.
  void attempt(int64_t i, bool last) {
    try {
      if (!failed.load(std::memory_order_relaxed)) piece(work, i, last);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }

  // How many pieces it did.
  int64_t walk(int me) {
    int64_t done = 0;
    for (int turn = 0; turn < threads; turn++) {
      Range& range = ranges[(me + turn) % threads];
      for (;;) {
        int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= range.end) break;
        attempt(i, turn > 0 || i + 1 == range.end);
        done++;
      }
    }
    return done;
  }

  void help(int me) {
    for (uint32_t seen = 0;;) {
      places[me].here();
      seen = next_job(seen);
      if (seen % 2 == 0) continue;
      inside.fetch_add(1);
      // Still open after we signalled that we are inside: the caller will wait for us.
      if (job.load() == seen && me < threads) walk(me);
      inside.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t next_job(uint32_t seen) {
    auto until = Clock::now() + AWAKE;
    for (int look = 1;; look++) {
      uint32_t now = job.load(std::memory_order_acquire);
      if (now != seen) return now;
      breathe();
      if (look % 64) continue;
      if (Clock::now() < until) continue;
      job.wait(seen);
    }
  }

  // Hires a helper for each thread but the caller's own; the holder of `busy` calls it.
  void hire(int threads) {
    for (; helpers < threads - 1; helpers++) std::thread(&Pool::help, this, helpers + 1).detach();
  }

  void run(int64_t count) {
    hire(threads);
    for (int i = 0; i < threads; i++) {
      ranges[i].next.store(count * i / threads, std::memory_order_relaxed);
      ranges[i].end = count * (i + 1) / threads;
    }
    int here = processor_here();
    for (int i = 1; i < threads; i++) places[i].send_away(here);
    job.fetch_add(1);
    job.notify_all();
    auto begun = Clock::now();
    int64_t own = walk(0);
    auto walked = Clock::now();
    job.fetch_add(1);
    for (int look = 0; inside.load(); look++) {
      if (look < PATIENCE) breathe();
      else std::this_thread::yield();
    }
    auto seconds = [](auto span) { return std::chrono::duration<double>(span).count(); };
    auto now = Clock::now();
    double helped = double(count - own) / double(std::max<int64_t>(own, 1));
    credit.note(seconds(walked - begun) * helped, seconds(now - walked), now);
    if (!failed.load()) return;
    failed.store(false);
    std::rethrow_exception(std::exchange(error, nullptr));
  }
};

// Never taken down: helpers may look at it while the process ends.
Pool* team = nullptr;

// In a child that was forked there are no helpers; one that was inside would be waited for without end.
void begin_anew() { team = new Pool; }

Pool& pool() {
  static const bool made = [] {
    begin_anew();
    pthread_atfork(nullptr, nullptr, begin_anew);
    return true;
  }();
  (void)made;
  return *team;
}

}  // namespace

static thread_local int64_t least_times = 1;

// Helpers begin now: a process then has as many threads after its first long prompt as before.
void share_from(int64_t times) {
  least_times = times;
  Pool& all = pool();
  std::lock_guard<std::mutex> alone(all.busy);
  all.hire(threads_here());
}

int threads_for(int64_t times) { return times >= least_times ? threads_here() : 1; }

int threads_here() { return omp_in_parallel() ? 1 : std::min(omp_get_max_threads(), MOST_THREADS); }

void share_pieces(int64_t count, int threads, Piece piece, const void* work) {
  Pool& all = pool();
  std::unique_lock<std::mutex> alone(all.busy, std::try_to_lock);
  if (!alone || Clock::now() < all.credit.rest_until) {
    for (int64_t i = 0; i < count; i++) piece(work, i, i + 1 == count);
    return;
  }
  all.threads = int(std::min<int64_t>(threads, count));
  all.piece = piece;
  all.work = work;
  all.run(count);
}

}  // namespace gapless
