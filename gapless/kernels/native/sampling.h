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

// The end of a row's candidates: this logit, and this id among tokens equal to it.
struct Cut {
  float value;
  int32_t id;
};

struct Filters {
  float temperature;
  int64_t top_k;  // 0 keeps all
  float top_p, min_p;
};

// The cut of a row's filters. Sorts nothing. `spread`: the row is shared among threads.
template <typename T>
Cut cut_of(const T* row, int64_t vocab, const Filters& filters, bool spread);

// Inputs of a row's random words, besides the token: gapless/kernels/random.py.
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

// The kept tokens that may have the greatest score, the best among them; ascending ids.
template <typename T>
std::vector<Contender> contenders(
    const T* row, int64_t vocab, float best, float temperature, const Cut& cut, const Stream& stream);

}  // namespace gapless
