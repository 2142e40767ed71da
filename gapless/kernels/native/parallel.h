// Work shared by as many threads as torch gives to the calling thread.
#pragma once

#include <cstdint>

namespace gapless {

using Piece = void (*)(const void* work, int64_t index, bool last);

// How many threads a call may use now: 1 inside a parallel region.
int threads_here();

// Sets, for calls from this thread, the least shared work, in times of the work worth a second thread; at first 1. A
// helper that looks for more work takes a core, which others may use better.
void share_from(int64_t times);

// The number of threads for work of this many times the least worth a second thread.
int threads_for(int64_t times);

constexpr int64_t ANY_WORK = INT64_MAX;

// Calls piece(work, i, last) for each i of 0..count: `last` when i + 1 is not this thread's next.
//
// The caller never waits for a thread that has not begun: each has a range of its own and walks it in order, and who is
// done takes from the others' ranges. So a helper that gets no core, on a busy machine, costs only the work it would
// have done. A second caller at the same time works alone. The first error of a piece comes back to the caller, once
// no thread is at work any more.
void share_pieces(int64_t count, int threads, Piece piece, const void* work);

// The same, by as many threads as are worth it: `times` is how many times the work is worth a second one.
template <typename Work>
void share(int64_t count, int64_t times, const Work& work) {
  int threads = count > 1 ? threads_for(times) : 1;
  if (threads == 1) {
    for (int64_t i = 0; i < count; i++) work(i, i + 1 == count);
    return;
  }
  share_pieces(
      count, threads, [](const void* work, int64_t i, bool last) { (*static_cast<const Work*>(work))(i, last); },
      &work);
}

}  // namespace gapless
