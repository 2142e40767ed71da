// Drafts from other answers. See gapless/kernels/suffixes.py; words of an entry as in gapless/kernels/layout.py.
#pragma once

#include <cstdint>

#include "glue.h"

namespace gapless {

enum Entry { OWN_TENANT, DIGEST, NEXT, SEEN, SAME, CLAIM, SUFFIX_WORDS };

// `parts` consecutive tables of `entries` each, the last one undefined.
struct Suffixes {
  int32_t* data;
  int64_t parts, entries;
  int32_t* entry(int64_t part, uint32_t digest) const {
    return data + (part * entries + int64_t(digest % uint32_t(entries - 1))) * SUFFIX_WORDS;
  }
};

struct Rows {
  Table state, params, history;
};

struct Recall {
  int64_t most, factor, least;
};

// `tokens` [count, width], negative after the last.
void remember(
    const int32_t* rows, int64_t count, const int32_t* tokens, int64_t width, const Rows& tables,
    const Suffixes& suffixes);

void recall(
    const int32_t* rows, int64_t count, const int32_t* same, const Rows& tables, const Suffixes& suffixes,
    const Recall& asked);

}  // namespace gapless
