// Work shared by the threads that torch gives to the calling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <omp.h>

namespace gapless {

constexpr int MOST_THREADS = 256;

// Calls work(i, last) for each i of 0..count: `last` when i + 1 is not this thread's next. Every thread has a range of
// its own and walks it in order; one that is done early helps the others, since a core may be busy elsewhere.
template <typename Work>
void share(int64_t count, bool worth, const Work& work) {
  int threads = worth && count > 1 && !omp_in_parallel() ? std::min<int64_t>({omp_get_max_threads(), count, MOST_THREADS}) : 1;
  if (threads == 1) {
    for (int64_t i = 0; i < count; i++) work(i, i + 1 == count);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Range ranges[MOST_THREADS];
  for (int i = 0; i < threads; i++) {
    ranges[i].next.store(count * i / threads, std::memory_order_relaxed);
    ranges[i].end = count * (i + 1) / threads;
  }
#pragma omp parallel num_threads(threads)
  {
    int me = omp_get_thread_num();
    for (int turn = 0; turn < threads; turn++) {
      Range& range = ranges[(me + turn) % threads];
      for (;;) {
        int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= range.end) break;
        work(i, turn > 0 || i + 1 == range.end);
      }
    }
  }
}

}  // namespace gapless
