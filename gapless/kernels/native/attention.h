// Paged attention of decode rows and of prefill chunks, straight from the cache's pages.
#pragma once

#include <cstdint>

#include "vec.h"

namespace gapless {

// cache [pages, layers, 2, page_size, kv_heads, dim]; table [rows, width] int32, whole rows that may be apart. Strides
// count elements, not bytes.
template <typename T>
struct Paged {
  const T* cache;
  int64_t layers, page_size, kv_heads, dim, layer;
  const int32_t* table;
  int64_t table_stride;

  int64_t value_offset() const { return page_size * kv_heads * dim; }
  const T* key(const int32_t* pages, int64_t position, int64_t head) const {
    int64_t page = pages[position / page_size];
    return cache + (((page * layers + layer) * 2 * page_size + position % page_size) * kv_heads + head) * dim;
  }
};

// Queries as they lie in a larger tensor: token_stride apart, heads next to each other.
template <typename T>
struct Queries {
  const T* data;
  int64_t token_stride, heads;
};

// heads is a multiple of kv_heads, and every kv_len at least 1. out [batch, heads * dim].
template <typename T>
void decode_attention(
    const Queries<T>& q, int64_t batch, const Paged<T>& kv, const int64_t* rows, const int64_t* kv_lens, float scale,
    T* out);

// starts [chunks + 1] int64: each chunk's queries in q; the last query of a chunk reads kv_lens[chunk] entries. A query
// gets the bits of decode_attention, in any chunk.
template <typename T>
void prefill_attention(
    const Queries<T>& q, int64_t chunks, const Paged<T>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, T* out);

// Whether the functions below serve heads of this size, here. They do as prefill_attention, each in an order of sums of
// its own, which is the same in any chunk.
template <typename T>
bool floats_attend(int64_t dim);
bool amx_attends(int64_t dim);

template <typename T>
void prefill_attention_floats(
    const Queries<T>& q, int64_t chunks, const Paged<T>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, T* out);

void prefill_attention_amx(
    const Queries<bf16>& q, int64_t chunks, const Paged<bf16>& kv, const int64_t* rows, const int64_t* starts,
    const int64_t* kv_lens, float scale, bf16* out);

}  // namespace gapless
