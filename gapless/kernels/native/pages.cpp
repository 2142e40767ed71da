#include "pages.h"

#include <cstring>

namespace gapless {

constexpr uint32_t FACTOR = 0x1E3779B1, MASK = (1u << 30) - 1;

uint64_t copy_page(const int32_t* from, int64_t words, int32_t* to) {
  std::memcpy(to, from, words * sizeof(int32_t));
  uint64_t sum = 0;
  for (uint32_t i = 0; i < uint32_t(words); i++) {
    const int32_t weight = int32_t((i * FACTOR & MASK) * 2 + 1);
    sum += uint64_t(int64_t(to[i]) * weight);
  }
  return sum;
}

}  // namespace gapless
