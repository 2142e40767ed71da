// Choosing tokens: the largest logit, the noise that turns the largest into a draw, and where filters end.
#pragma once

#include <cstdint>
#include <vector>

#include "vec.h"

namespace gapless {

// The largest of a row, its first place, and whether it is finite. A NaN counts as the largest, as in torch.
struct Best {
  float value;
  int64_t index;
  bool finite;
};

template <typename T>
Best best_of(const T* row, int64_t vocab);

// Down to where a row's tokens may be drawn: to this logit, and to this id among those equal to it.
struct Cut {
  float value;
  int32_t id;
};

struct Filters {
  float temperature;
  int64_t top_k;  // 0 keeps all
  float top_p, min_p;
};

// Where the filters of a row end. Sorts nothing. `spread`: the row is shared among threads.
template <typename T>
Cut cut_of(const T* row, int64_t vocab, const Filters& filters, bool spread);

// What the random words of a row's draw follow from, beside the token: gapless/kernels/random.py.
struct Stream {
  uint32_t position, key_low, key_high;
};

// A token that a draw may give, and its uniform number: its score is
// (logit - best) / temperature - log(-log1p(-uniform)).
struct Contender {
  int32_t id;
  float uniform;
  double score;  // as above to 1e-4, which is better than float32 tells apart
};

// Of the tokens that the cut keeps, the best among them, those whose score may be the greatest; ascending ids.
template <typename T>
std::vector<Contender> contenders(
    const T* row, int64_t vocab, float best, float temperature, const Cut& cut, const Stream& stream);

}  // namespace gapless
