#pragma once

namespace gapless {

// Operations a second of multiply-adds in float32 by all threads of this call, in registers. Takes some milliseconds.
double vector_peak();

}  // namespace gapless
