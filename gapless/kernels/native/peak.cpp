#include "peak.h"

#include <chrono>

#include "parallel.h"
#include "vec.h"

namespace gapless {

double vector_peak() {
  constexpr int CHAINS = GAPLESS_BYTES == 64 ? 16 : 12;  // more than a unit begins before the first ends
  constexpr int64_t ROUNDS = 100'000;
  const int threads = threads_here();
  const auto begun = std::chrono::steady_clock::now();
  share(threads, ANY_WORK, [](int64_t, bool) {
    Floats sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = spread(float(i));
    const Floats factor = spread(0.999f);
    for (int64_t round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 16
      for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + factor;
    }
    Floats all{};
    for (int i = 0; i < CHAINS; i++) all += sums[i];
    asm volatile("" ::"m"(all));  // so that it is computed
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  return 2.0 * double(threads) * ROUNDS * CHAINS * WIDTH / seconds.count();
}

}  // namespace gapless
