// Pages of KV as whole numbers.
#pragma once

#include <cstdint>

namespace gapless {

// Copies a page and returns the checksum of the copy, as defined in gapless/kernels/pages.py.
uint64_t copy_page(const int32_t* from, int64_t words, int32_t* to);

}  // namespace gapless
