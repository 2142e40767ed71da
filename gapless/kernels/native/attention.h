// Paged attention of decode rows and of prefill chunks, straight from the cache's pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fewer_bits.h"

namespace gapless {

// A key of one head, and thereby its value.
template <typename S>
using Key = std::conditional_t<FEWER<S>, Stored<S>, const S*>;

// cache [pages, layers, 2, page_size, kv_heads, dim], or pages of fewer bits; table [rows, width] int32, whole rows
// that may be apart. Strides count elements, not bytes.
template <typename S>
struct Paged {
  const S* cache;
  int64_t layers, page_size, kv_heads, dim, layer;
  const int32_t* table;
  int64_t table_stride;

  int64_t value_offset() const { return page_size * kv_heads * dim; }
  Key<S> key(const int32_t* pages, int64_t position, int64_t head) const {
    int64_t page = pages[position / page_size];
    if constexpr (FEWER<S>) {
      const int64_t count = page_size * kv_heads, bytes = Stored<S>::page_bytes(count, dim);
      const S* from = cache + (page * layers + layer) * bytes;
      return Stored<S>::first(&from->bits, count, dim).after(position % page_size * kv_heads + head, dim);
    } else {
      return cache + (((page * layers + layer) * 2 * page_size + position % page_size) * kv_heads + head) * dim;
    }
  }
  // That of the same head in the next entry of the page, or of a head further on.
  Key<S> after(const Key<S>& key, int64_t heads) const {
    if constexpr (FEWER<S>) return key.after(heads, dim);
    else return key + heads * dim;
  }
};

// BODY(T, S) for all numbers T of a model, and all S in which its keys and values may be stored.
#define GAPLESS_EACH_KV(BODY)                            \
  BODY(float, float) BODY(float, e4m3) BODY(float, k8v4) \
  BODY(bf16, bf16) BODY(bf16, e4m3) BODY(bf16, k8v4)     \
  BODY(f16, f16) BODY(f16, e4m3) BODY(f16, k8v4)

// Queries as they lie in a larger tensor: token_stride apart, heads next to each other.
template <typename T>
struct Queries {
  const T* data;
  int64_t token_stride, heads;
};

// Entries low..high of a row, or keys of a block.
struct Range {
  int64_t low, high;
};

// The first entry that a query at position p reads: 0; p - size + 1, or 0; p - p % size.
enum class Reach : int64_t { CAUSAL, WINDOW, CHUNK };

// The arguments of a layer's attention, as in views.Attend.
struct Attend {
  float scale;
  Reach reach = Reach::CAUSAL;
  int64_t size = 0;
  float softcap = 0;             // scores become softcap * tanh(score * scale / softcap); 0: they stay
  const float* sinks = nullptr;  // [heads], or none: a further logit of each, whose weight has no value
  float values = 1;              // factor of the result: the scale of stored values

  int64_t first(int64_t position) const {
    if (reach == Reach::WINDOW) return std::max<int64_t>(position - size + 1, 0);
    return reach == Reach::CHUNK ? position - position % size : 0;
  }

  // What the query at `position` of a row of `length` entries reads. `span`: first and end of its span, or none. An
  // inert row has one entry, whatever its chunk: each of its queries reads that.
  Range readable(int64_t position, int64_t length, const int32_t* span = nullptr) const {
    Range found{first(position), position + 1};
    if (span) found = {std::min<int64_t>(found.low, span[0]), std::max<int64_t>(found.high, span[1])};
    const int64_t high = std::clamp<int64_t>(found.high, 1, std::max<int64_t>(length, 1));
    return {std::clamp<int64_t>(found.low, 0, high - 1), high};
  }

  // What a query reads at most outside spans: how much work it is.
  int64_t most(int64_t length) const { return reach == Reach::CAUSAL ? length : std::min(length, size); }
};

// Rows of the page table with their lengths, each at least 1. starts [count + 1]: their queries in q, the last of which
// is at a row's last entry; none if each has one. spans [tokens of q, 2]: see Attend::readable; none if there are none.
struct Batch {
  int64_t count;
  const int64_t *rows, *kv_lens, *starts = nullptr;
  const int32_t* spans = nullptr;
};

// `count` queries of a row at its positions from `position` on, from `token` of q on.
struct Chunk {
  const int32_t* pages;
  int64_t token, count, position, length;
  const int32_t* spans;

  Range readable(const Attend& attend, int64_t query) const {
    return attend.readable(position + query, length, spans ? spans + 2 * query : nullptr);
  }
  Chunk part(int64_t first, int64_t size) const {
    return {pages, token + first, size, position + first, length, spans ? spans + 2 * first : nullptr};
  }
};

template <typename S>
Chunk chunk_of(const Batch& batch, const Paged<S>& kv, int64_t i) {
  const int64_t token = batch.starts[i], size = batch.starts[i + 1] - token, length = batch.kv_lens[i];
  const int32_t* spans = batch.spans ? batch.spans + 2 * token : nullptr;
  return {kv.table + batch.rows[i] * kv.table_stride, token, size, length - size, length, spans};
}

// Scores that are scaled already.
inline f32x16 capped(f32x16 scores, float softcap) {
  return tanh(scores * (1 / softcap)) * softcap;
}

// The factor of a query's weighted values: 1 / the sum of the weights, which are exp(score - top), and of its sink's.
inline float normalizer(float top, float weight, const float* sink) {
  if (!sink) return 1.0f / weight;
  const float most = std::max(top, *sink), shift = most == -std::numeric_limits<float>::infinity() ? 0.0f : most;
  const float kept = exp(spread(top - shift))[0];
  return kept / (weight * kept + exp(spread(*sink - shift))[0]);
}

// heads is a multiple of kv_heads. out [batch.count, heads * dim]. S: T, or what stands for it in fewer bits.
template <typename T, typename S>
void decode_attention(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out);

// A query gets the bits of decode_attention, in any chunk, unless a span lets it read more.
template <typename T, typename S>
void prefill_attention(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out);

// Whether the functions below serve heads of this size, here. They do as prefill_attention, each in an order of sums of
// its own, which is the same in any chunk.
template <typename T>
bool floats_attend(int64_t dim);
bool amx_attends(int64_t dim);

template <typename T, typename S>
void prefill_attention_floats(
    const Queries<T>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, T* out);

template <typename S>
void prefill_attention_amx(
    const Queries<bf16>& q, const Batch& batch, const Paged<S>& kv, const Attend& attend, bf16* out);

}  // namespace gapless
