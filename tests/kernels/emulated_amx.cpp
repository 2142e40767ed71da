// What tests call of the kernels for AMX, built with emulated tiles.
#include <omp.h>

#include "amx.h"
#include "attention.h"
#include "linear.h"
#include "tiles.h"
using namespace gapless;
#define SEEN extern "C" __attribute__((visibility("default")))

SEEN int64_t packed_size(int64_t n, int64_t k) { return packed_elements<bf16>(n, k); }
SEEN void pack_weight(const bf16* weight, int64_t n, int64_t k, bf16* packed) { pack(weight, n, k, packed); }

// What a processor would have refused; empty for nothing.
SEEN const char* product(
    const bf16* x, int64_t stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias, bf16* out,
    int64_t threads) {
  omp_set_num_threads(threads);
  fence = reinterpret_cast<const char*>(x + (m - 1) * stride + k + k % 2);
  try {
    linear_amx(x, stride, m, packed, n, k + k % 2, bias, out);
  } catch (const std::logic_error& error) {
    static std::string refused;
    refused = error.what();
    return refused.c_str();
  }
  return here.shapes[0] ? "tiles were kept" : "";
}

SEEN bool attends(int64_t dim) { return amx_attends(dim); }

// What a processor would have refused; empty for nothing. Of fewer bits, `stored` is 1 for e4m3 and 2 for k8v4.
SEEN const char* attend(
    const bf16* q, int64_t token_stride, int64_t heads, int64_t chunks, int64_t stored, const void* cache,
    int64_t layers, int64_t page_size, int64_t kv_heads, int64_t dim, int64_t layer, const int32_t* table,
    int64_t table_stride, const int64_t* rows, const int64_t* starts, const int64_t* kv_lens, const int32_t* spans,
    int64_t reach, int64_t size, const float* sinks, bf16* out, int64_t threads, float scale, float softcap,
    float values) {
  omp_set_num_threads(threads);
  fence = nullptr;
  try {
    auto call = [&]<typename S>(const S* pages) {
      prefill_attention_amx<S>(
          {q, token_stride, heads}, {chunks, rows, kv_lens, starts, spans},
          {pages, layers, page_size, kv_heads, dim, layer, table, table_stride},
          {scale, Reach(reach), size, softcap, sinks, values}, out);
    };
    if (stored == 0) call(static_cast<const bf16*>(cache));
    else if (stored == 1) call(static_cast<const e4m3*>(cache));
    else call(static_cast<const k8v4*>(cache));
  } catch (const std::logic_error& error) {
    static std::string refused;
    refused = error.what();
    return refused.c_str();
  }
  return here.shapes[0] ? "tiles were kept" : "";
}

static const char* text(std::string found) {
  static std::string kept;
  kept = found;
  return kept.c_str();
}
SEEN void set_fault(int wanted) { fault = wanted; }
SEEN void set_refusal(const char* wanted) { refusal = wanted; }
SEEN const char* trial() { return text(try_amx()); }
SEEN const char* missing() { return text(amx_missing()); }
