// Sums of the ranks' parts: in float32, in the order of ranks, rounded once.
#pragma once

#include <cstdint>

#include "commons.h"

namespace gapless {

// out = the sum of `world` parts; `out` may be one of them.
void sum_parts(const void* const* parts, int world, int64_t count, Kind kind, void* out);

// x += the rounded sum of the parts, all [rows, size], and out = the norm of x.
void sum_and_norm(
    const void* const* parts, int world, int64_t rows, int64_t size, Kind kind, Commons::Norm norm, void* x, void* out);

}  // namespace gapless
