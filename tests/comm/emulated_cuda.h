// Stands in for a GPU in sums.cu: a thread of the host for each of its threads, and barriers for its blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct Dim {
  u32 x;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
using std::min;

constexpr u32 THREADS = WORLD > 4 ? 8 : 4, WARP = 1, LOOK_SPINS = 64;

struct Team {
  std::barrier<> barrier{THREADS};
  alignas(16) char shared[4096];
};
inline thread_local Dim threadIdx, blockIdx, gridDim;
inline thread_local Team* team;

#define __device__
#define __forceinline__ inline
#define SHARED(type, name) type& name = *(type*)team->shared
#define KERNEL extern "C" __attribute__((visibility("default"))) void
#define ARGUMENT const Call& c
inline void __syncthreads() { team->barrier.arrive_and_wait(); }

template <class T> inline std::atomic_ref<T> shared_word(const T* at) { return std::atomic_ref<T>(*const_cast<T*>(at)); }
template <class T> inline T peek(const T* at) { return shared_word(at).load(std::memory_order_relaxed); }
template <class T> inline void poke(T* at, T value) { shared_word(at).store(value, std::memory_order_relaxed); }
inline u32 atomicAdd(u32* at, u32 by) { return shared_word(at).fetch_add(by); }
inline u32 atomicCAS(u32* at, u32 old, u32 value) {
  shared_word(at).compare_exchange_strong(old, value);
  return old;
}

// Each half of a cell arrives whole, the second one first.
inline void put(uint4* at, u32 a, u32 b, u32 epoch) {
  poke((u64*)at + 1, (u64)epoch << 32 | b);
  poke((u64*)at, (u64)epoch << 32 | a);
}
inline uint4 get(const uint4* at) {
  const u64 front = peek((const u64*)at), back = peek((const u64*)at + 1);
  std::this_thread::yield();
  return {(u32)front, (u32)(front >> 32), (u32)back, (u32)(back >> 32)};
}
// Ordered by flags alone: a sanitizer of threads sees what is not.
inline void store(uint4* at, uint4 v) { *at = v; }
inline uint4 load(const uint4* at) { return *at; }
inline void release(u32* at, u32 value) { shared_word(at).store(value, std::memory_order_release); }
inline u32 acquire(const u32* at) {
  std::this_thread::yield();
  return shared_word(at).load(std::memory_order_acquire);
}
inline void let_next_begin() {}
inline u64 now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline float warp_sum(float v) { return v; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
template <class To, class From> inline To same_bits(From v) {
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
inline u32 __float_as_uint(float v) { return same_bits<u32>(v); }
inline float of_half(unsigned short bits) { return same_bits<_Float16>(bits); }
inline unsigned short to_half(float v) { return same_bits<unsigned short>((_Float16)v); }

// Runs a launch to its end.
inline void launch(void (*kernel)(const Call&), u32 blocks, const Call& call) {
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<std::thread> threads;
  for (u32 b = 0; b < blocks; ++b) {
    teams.push_back(std::make_unique<Team>());
    for (u32 t = 0; t < THREADS; ++t)
      threads.emplace_back([=, &call, own = teams.back().get()] {
        threadIdx = {t}, blockIdx = {b}, gridDim = {blocks}, team = own;
        kernel(call);
        own->barrier.arrive_and_drop();
      });
  }
  for (auto& thread : threads) thread.join();
}
