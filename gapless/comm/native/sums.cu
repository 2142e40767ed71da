// What the ranks of one host do together on their GPUs. NVRTC compiles this text, without headers, with -DWORLD=ranks.
//
// Each rank has an arena that all ranks map. Ranks launch the same kernels in the same order with the same grids, and
// block b of one rank waits for blocks b of the others alone: so blocks of a launch must fit the GPU at once, beside
// the ones of every rank on it. A launch has an epoch, counted in device memory, so that graphs can be replayed.
//
// Small sums: a rank puts its values into every arena as cells of 16 bytes, 8 of them data and twice the epoch: each
// half of a cell arrives whole, and tells that it has. Large sums: 16-byte units, then a flag a block, stored with
// release and loaded with acquire; a rank sums its share for all. Halves of an arena take turns by the epoch's parity: a
// rank that begins epoch e + 2 has got something of every rank's epoch e + 1, which began once its epoch e had ended.
//
// A wait ends with the stop word in the host's memory: one thread of a block looks at it every half millisecond. After
// that all kernels end at once, with undefined results.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MOST_RANKS = 8, MOST_BLOCKS = 64, SEGMENT = 16 << 10, SLOTS = 2, LOOK_US = 500;
enum { SUMS, LARGE_SUMS, TELLS, OPERATIONS };
enum { BF16, F16, F32, I64 };

struct State {
  u32 epoch[4];    // of the last launch, by operation
  u32 arrived[4];  // ended blocks of the launch in progress
  u32 muted, stopped;
  u64 waited;  // ns
  u32 sent[MOST_BLOCKS], got[MOST_RANKS][MOST_BLOCKS];
};

struct Call {
  char* arena[MOST_RANKS];  // by rank, at this process's addresses
  u64 sums, tells, acks, flags, inbox, outbox, slots, lines, mail, receipts;  // offsets in an arena
  State* state;
  u32* stop;   // the host's stop word
  u64* board;  // this rank's words on the host: its nanoseconds of waiting, and after the next word its launches
  void *x, *y, *out;
  const float* weight;
  float eps;
  u32 rank, cells, half, part;   // sizes of a place: cells of a sum, cells of a tell, units of a large sum
  u32 early;  // whether the next kernel may begin: where ranks share a GPU, it could keep another rank's blocks out
  u32 count, rows, width, pitch;  // of this launch
};

#ifdef EMULATED
#include "emulated_cuda.h"
#else
#define SHARED(type, name) __shared__ type name
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define ARGUMENT const __grid_constant__ Call c
constexpr u32 THREADS = 512, WARP = 32, LOOK_SPINS = 1024;

__device__ __forceinline__ void put(uint4* at, u32 a, u32 b, u32 epoch) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(at), "r"(a), "r"(epoch), "r"(b) : "memory");
}
__device__ __forceinline__ uint4 get(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store(uint4* at, uint4 v) { *at = v; }
__device__ __forceinline__ uint4 load(const uint4* at) { return get(at); }
__device__ __forceinline__ void release(u32* at, u32 value) {
  asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
template <class T> __device__ __forceinline__ T peek(const T* at) { return *(const volatile T*)at; }
template <class T> __device__ __forceinline__ void poke(T* at, T value) { *(volatile T*)at = value; }
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ u64 now() {
  u64 ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
__device__ __forceinline__ float warp_sum(float v) {
  for (int away = 16; away; away /= 2) v += __shfl_xor_sync(~0u, v, away);
  return v;
}
__device__ __forceinline__ float of_half(unsigned short bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
__device__ __forceinline__ unsigned short to_half(float v) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
#endif
static_assert(THREADS >= WORLD && WORLD <= MOST_RANKS, "a thread of a block meets each rank");

// Numbers of 8 bytes, as the wide type that they are summed in.
__device__ __forceinline__ float of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 to_bfloat(float v) {
  u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <int KIND> struct Numbers;
template <> struct Numbers<BF16> {
  typedef float Wide;
  static constexpr int count = 4;
  static __device__ __forceinline__ void unpack(uint2 v, float* to) {
    to[0] = of_bits(v.x << 16), to[1] = of_bits(v.x & 0xffff0000);
    to[2] = of_bits(v.y << 16), to[3] = of_bits(v.y & 0xffff0000);
  }
  static __device__ __forceinline__ uint2 pack(const float* v) {
    return make_uint2(to_bfloat(v[0]) | to_bfloat(v[1]) << 16, to_bfloat(v[2]) | to_bfloat(v[3]) << 16);
  }
};
template <> struct Numbers<F16> {
  typedef float Wide;
  static constexpr int count = 4;
  static __device__ __forceinline__ void unpack(uint2 v, float* to) {
    to[0] = of_half(v.x & 0xffff), to[1] = of_half(v.x >> 16), to[2] = of_half(v.y & 0xffff), to[3] = of_half(v.y >> 16);
  }
  static __device__ __forceinline__ uint2 pack(const float* v) {
    return make_uint2(to_half(v[0]) | (u32)to_half(v[1]) << 16, to_half(v[2]) | (u32)to_half(v[3]) << 16);
  }
};
template <> struct Numbers<F32> {
  typedef float Wide;
  static constexpr int count = 2;
  static __device__ __forceinline__ void unpack(uint2 v, float* to) { to[0] = of_bits(v.x), to[1] = of_bits(v.y); }
  static __device__ __forceinline__ uint2 pack(const float* v) {
    return make_uint2(__float_as_uint(v[0]), __float_as_uint(v[1]));
  }
};
template <> struct Numbers<I64> {
  typedef u64 Wide;
  static constexpr int count = 1;
  static __device__ __forceinline__ void unpack(uint2 v, u64* to) { to[0] = (u64)v.y << 32 | v.x; }
  static __device__ __forceinline__ uint2 pack(const u64* v) { return make_uint2((u32)v[0], (u32)(v[0] >> 32)); }
};

// The numbers of all ranks at one place, summed in the order of ranks and rounded once.
template <int KIND> __device__ __forceinline__ uint2 summed(const uint2* parts) {
  using N = Numbers<KIND>;
  typename N::Wide sum[N::count], part[N::count];
  N::unpack(parts[0], sum);
#pragma unroll
  for (int r = 1; r < WORLD; ++r) {
    N::unpack(parts[r], part);
    for (int i = 0; i < N::count; ++i) sum[i] += part[i];
  }
  return N::pack(sum);
}

struct Block {
  u32 epoch, quiet, ended, looked, bytes;
  float sums[THREADS / WARP];
};

__device__ __forceinline__ u32 micros() { return (u32)(now() >> 10); }

// Whether this launch has work. Sets the block up.
__device__ __forceinline__ bool begins(Block& here, const Call& c, int operation) {
  if (threadIdx.x == 0) {
    const u32 last = peek(&c.state->epoch[operation]);
    here.epoch = last == ~0u ? 2 : last + 1;  // never 0, which fresh memory has; the parity goes on
    here.quiet = peek(&c.state->muted) | peek(&c.state->stopped);
    here.ended = 0, here.looked = micros();
  }
  if (c.early) let_next_begin();
  __syncthreads();
  return !here.quiet;
}

__device__ __forceinline__ void ends(Block& here, const Call& c, int operation, u64 waited) {
  __syncthreads();
  if (threadIdx.x) return;
  State* s = c.state;
  if (blockIdx.x == 0) poke(&s->waited, peek(&s->waited) + waited);
  if (atomicAdd(&s->arrived[operation], 1) == gridDim.x - 1) {
    poke(&s->arrived[operation], 0u);
    poke(&s->epoch[operation], here.epoch);
  }
}

// Tells the host of launches that ended, and of `more`: the rank with the least is the one that others wait for.
__device__ __forceinline__ void tell_host(const Call& c, u32 more) {
  const u32* epoch = c.state->epoch;
  poke(c.board, peek(&c.state->waited));
  poke(c.board + 2, (u64)(peek(epoch) + peek(epoch + 1) + peek(epoch + 2) + more));
}

struct Wait {
  Block& here;
  const Call& c;
  u32 spins = 0;
  // Whether to wait on.
  __device__ __forceinline__ bool on() {
    if (++spins & 63) return true;
    if (peek(&here.ended)) return false;
    if (spins & (LOOK_SPINS - 1)) return true;
    const u32 time = micros(), last = peek(&here.looked);
    if (time - last < LOOK_US || atomicCAS(&here.looked, last, time) != last) return true;
    tell_host(c, 1);
    if (!peek(c.stop)) return true;
    poke(&here.ended, 1u), poke(&c.state->stopped, 1u);
    return false;
  }
};

__device__ __forceinline__ bool fresh(uint4 v, u32 epoch) { return v.y == epoch && v.w == epoch; }

__device__ __forceinline__ uint4* sums_of(const Call& c, u32 of, u32 from, u32 epoch) {
  return (uint4*)(c.arena[of] + c.sums) + (u64)((epoch & 1) * WORLD + from) * c.cells;
}

__device__ __forceinline__ void put_all(const Call& c, u32 place, uint2 v, u32 epoch) {
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r)
    if (r != c.rank) put(sums_of(c, r, c.rank, epoch) + place, v.x, v.y, epoch);
}

// The sum at one place, once all ranks have put their part there.
template <int KIND> __device__ __forceinline__ uint2 take_all(Wait& wait, u32 place, uint2 own, u32 epoch) {
  const Call& c = wait.c;
  uint4 got[WORLD];
  uint2 parts[WORLD];
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r)
    if (r != c.rank) got[r] = get(sums_of(c, c.rank, r, epoch) + place);
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    if (r == c.rank) {
      parts[r] = own;
      continue;
    }
    while (!fresh(got[r], epoch) && wait.on()) got[r] = get(sums_of(c, c.rank, r, epoch) + place);
    parts[r] = make_uint2(got[r].x, got[r].z);
  }
  return summed<KIND>(parts);
}

// y, `count` cells, becomes the sum over ranks.
template <int KIND> __device__ __forceinline__ void add(const Call& c, Block& here) {
  if (!begins(here, c, SUMS)) return;
  const u32 e = here.epoch, step = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  uint2* y = (uint2*)c.y;
  Wait wait{here, c};
  for (u32 i = first; i < c.count; i += step) put_all(c, i, y[i], e);
  const u64 since = now();
  for (u32 i = first; i < c.count; i += step) y[i] = take_all<KIND>(wait, i, y[i], e);
  ends(here, c, SUMS, now() - since);
}

__device__ __forceinline__ float block_sum(Block& here, float v) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % WARP == 0) here.sums[threadIdx.x / WARP] = v;
  __syncthreads();
  v = 0;
  for (u32 w = 0; w < THREADS / WARP; ++w) v += here.sums[w];
  return v;
}

template <int KIND> __device__ __forceinline__ uint2 plus(uint2 x, uint2 y, float& square) {
  using N = Numbers<KIND>;
  float a[N::count], b[N::count];
  N::unpack(x, a), N::unpack(y, b);
  for (int i = 0; i < N::count; ++i) a[i] += b[i];
  x = N::pack(a);
  N::unpack(x, a);
  for (int i = 0; i < N::count; ++i) square += a[i] * a[i];
  return x;
}

template <int KIND> __device__ __forceinline__ uint2 scaled(uint2 x, const float* weight, float scale) {
  using N = Numbers<KIND>;
  float v[N::count];
  N::unpack(x, v);
  for (int i = 0; i < N::count; ++i) v[i] = v[i] * scale * weight[i];
  return N::pack(v);
}

constexpr int KEPT = 8;  // most cells of a row that a thread keeps

// x [rows, width cells] += the sum of y over ranks, rounded as by `add`; out = its norm. A block has whole rows.
template <int KIND> __device__ __forceinline__ void add_norm(const Call& c, Block& here) {
  if (!begins(here, c, SUMS)) return;
  constexpr int N = Numbers<KIND>::count;
  const u32 e = here.epoch, t = threadIdx.x;
  uint2 *x = (uint2*)c.x, *y = (uint2*)c.y, *out = (uint2*)c.out;
  Wait wait{here, c};
  for (u32 row = blockIdx.x; row < c.rows; row += gridDim.x)
    for (u32 i = row * c.width + t; i < (row + 1) * c.width; i += THREADS) put_all(c, i, y[i], e);
  u64 waited = 0;
  for (u32 row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const u32 at = row * c.width;
    uint2 kept[KEPT];
    float square = 0;
    const u64 since = now();
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
      const u32 i = t + k * THREADS;
      if (i >= c.width) break;
      kept[k] = plus<KIND>(x[at + i], take_all<KIND>(wait, at + i, y[at + i], e), square);
      x[at + i] = kept[k];
    }
    waited += now() - since;
    const float scale = rsqrtf(block_sum(here, square) / (c.width * N) + c.eps);
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
      const u32 i = t + k * THREADS;
      if (i >= c.width) break;
      out[at + i] = scaled<KIND>(kept[k], c.weight + i * N, scale);
    }
  }
  ends(here, c, SUMS, waited);
}

// As add_norm after `add`: y is the sum already. A block a row, of any width; waits for nobody.
template <int KIND> __device__ __forceinline__ void norm(const Call& c, Block& here) {
  constexpr int N = Numbers<KIND>::count;
  const u64 at = (u64)blockIdx.x * c.width;
  uint2 *x = (uint2*)c.x + at, *y = (uint2*)c.y + at, *out = (uint2*)c.out + at;
  float square = 0;
  for (u32 i = threadIdx.x; i < c.width; i += THREADS) x[i] = plus<KIND>(x[i], y[i], square);
  const float scale = rsqrtf(block_sum(here, square) / (c.width * N) + c.eps);
  for (u32 i = threadIdx.x; i < c.width; i += THREADS) out[i] = scaled<KIND>(x[i], c.weight + i * N, scale);
}

__device__ __forceinline__ u32* flag_of(const Call& c, u32 of, u32 phase, u32 from) {
  return (u32*)(c.arena[of] + c.flags) + (phase * WORLD + from) * MOST_BLOCKS + blockIdx.x;
}

// All of the block has stored for the others, and then reads what the others stored.
__device__ __forceinline__ void meet(Wait& wait, u32 phase, u32 epoch) {
  const u32 t = threadIdx.x;
  __syncthreads();
  if (t < WORLD && t != wait.c.rank) {
    release(flag_of(wait.c, t, phase, wait.c.rank), epoch);
    while (acquire(flag_of(wait.c, wait.c.rank, phase, t)) != epoch && wait.on()) {
    }
  }
  __syncthreads();
}

__device__ __forceinline__ uint4* units_of(const Call& c, u64 where, u32 of, u32 from, u32 epoch) {
  return (uint4*)(c.arena[of] + where) + (u64)((epoch & 1) * WORLD + from) * c.part;
}

// y, `count` units of 16 bytes, becomes the sum over ranks. Each rank sums its share and gives it to the others.
template <int KIND> __device__ __forceinline__ void add_large(const Call& c, Block& here) {
  if (!begins(here, c, LARGE_SUMS)) return;
  const u32 e = here.epoch, step = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  const u32 share = (c.count + WORLD - 1) / WORLD;
  uint4* y = (uint4*)c.y;
  Wait wait{here, c};
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (c.rank + k) % WORLD, low = r * share, end = min(low + share, c.count);
    uint4* to = units_of(c, c.inbox, r, c.rank, e);
    for (u32 i = low + first; i < end; i += step) store(to + (i - low), y[i]);
  }
  u64 since = now();
  meet(wait, 0, e);
  u64 waited = now() - since;
  const u32 low = c.rank * share, end = min(low + share, c.count);
  for (u32 i = low + first; i < end; i += step) {
    uint4 got[WORLD];
    uint2 front[WORLD], back[WORLD];
#pragma unroll
    for (u32 r = 0; r < WORLD; ++r) got[r] = r == c.rank ? y[i] : load(units_of(c, c.inbox, c.rank, r, e) + (i - low));
#pragma unroll
    for (u32 r = 0; r < WORLD; ++r) front[r] = make_uint2(got[r].x, got[r].y), back[r] = make_uint2(got[r].z, got[r].w);
    const uint2 a = summed<KIND>(front), b = summed<KIND>(back);
    const uint4 sum = make_uint4(a.x, a.y, b.x, b.y);
    y[i] = sum;
#pragma unroll
    for (u32 r = 0; r < WORLD; ++r)
      if (r != c.rank) store(units_of(c, c.outbox, r, c.rank, e) + (i - low), sum);
  }
  since = now();
  meet(wait, 1, e);
  waited += now() - since;
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (c.rank + k) % WORLD, from = r * share, to = min(from + share, c.count);
    const uint4* box = units_of(c, c.outbox, c.rank, r, e);
    for (u32 i = from + first; i < to; i += step) y[i] = load(box + (i - from));
  }
  ends(here, c, LARGE_SUMS, waited);
}

// x, `count` words, becomes the leader's. Every other rank says that it has come.
KERNEL tell(ARGUMENT) {
  SHARED(Block, here);
  if (!begins(here, c, TELLS)) return;
  const u32 e = here.epoch, step = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  u32* x = (u32*)c.x;
  uint4* acks = (uint4*)(c.arena[0] + c.acks) + (e & 1) * WORLD;
  const u64 turn = (u64)(e & 1) * c.half;
  Wait wait{here, c};
  u64 since = now();
  if (c.rank == 0) {
    for (u32 i = first; 2 * i < c.count; i += step)
      for (u32 r = 1; r < WORLD; ++r)
        put((uint4*)(c.arena[r] + c.tells) + turn + i, x[2 * i], 2 * i + 1 < c.count ? x[2 * i + 1] : 0, e);
    if (first && first < WORLD)
      while (!fresh(get(acks + first), e) && wait.on()) {
      }
  } else {
    if (first == 0) put(acks + c.rank, 0, 0, e);
    for (u32 i = first; 2 * i < c.count; i += step) {
      const uint4* at = (uint4*)(c.arena[c.rank] + c.tells) + turn + i;
      uint4 v = get(at);
      while (!fresh(v, e) && wait.on()) v = get(at);
      x[2 * i] = v.x;
      if (2 * i + 1 < c.count) x[2 * i + 1] = v.z;
    }
  }
  if (first == 0) tell_host(c, 1);
  ends(here, c, TELLS, now() - since);
}

// Bytes of own memory, or of a slot; both sides may be of any alignment that numbers of two bytes have.
__device__ __forceinline__ void copy(char* to, const char* from, u32 bytes) {
  if ((((u64)to | (u64)from | bytes) & 15) == 0)
    for (u32 i = threadIdx.x; i < bytes / 16; i += THREADS) store((uint4*)to + i, load((const uint4*)from + i));
  else
    for (u32 i = threadIdx.x; i < bytes / 2; i += THREADS)
      poke((unsigned short*)to + i, peek((const unsigned short*)from + i));
}

struct Channel {  // from block b of a rank to block b of the leader
  char* slots;
  u32 *lines, *mail, *receipt;
};

__device__ __forceinline__ Channel channel(const Call& c, u32 from) {
  const u64 at = (u64)from * MOST_BLOCKS + blockIdx.x;
  char* leader = c.arena[0];
  return {leader + c.slots + at * SLOTS * SEGMENT, (u32*)(leader + c.lines) + at * SLOTS, (u32*)(leader + c.mail) + at,
          (u32*)(c.arena[from] + c.receipts) + blockIdx.x};
}

struct Piece {  // piece u of rows of `bytes` bytes
  u32 row, low, bytes;
  __device__ __forceinline__ Piece(u32 u, u32 all) {
    const u32 pieces = (all + SEGMENT - 1) / SEGMENT;
    row = u / pieces, low = u % pieces * SEGMENT, bytes = min(SEGMENT, all - low);
  }
};

__device__ __forceinline__ u32 pieces_of(u32 rows, u32 bytes) { return rows * ((bytes + SEGMENT - 1) / SEGMENT); }

// Gives x [rows, width bytes] to the leader: each block its pieces, at least one message.
KERNEL give(ARGUMENT) {
  SHARED(Block, here);
  if (!begins(here, c, OPERATIONS)) return;
  Wait wait{here, c};
  const Channel to = channel(c, c.rank);
  const u32 pieces = pieces_of(c.rows, c.width);
  u32 sent = peek(&c.state->sent[blockIdx.x]), u = blockIdx.x;
  do {
    if (threadIdx.x == 0)
      while (sent - acquire(to.receipt) >= SLOTS && wait.on()) {
      }
    __syncthreads();
    if (peek(&here.ended)) return;
    if (u < pieces) {
      const Piece p(u, c.width);
      copy(to.slots + sent % SLOTS * SEGMENT, (char*)c.x + (u64)p.row * c.width + p.low, p.bytes);
    }
    if (threadIdx.x == 0) poke(&to.lines[sent % SLOTS], c.width);
    __syncthreads();
    ++sent;
    if (threadIdx.x == 0) release(to.mail, sent);
    u += gridDim.x;
  } while (u < pieces);
  if (threadIdx.x == 0) poke(&c.state->sent[blockIdx.x], sent);
}

// Writes to out [rows, pitch bytes] the columns of every rank: x [rows, width bytes], then what the others give.
KERNEL take(ARGUMENT) {
  SHARED(Block, here);
  if (!begins(here, c, OPERATIONS)) return;
  Wait wait{here, c};
  char* out = (char*)c.out;
  for (u32 u = blockIdx.x; u < pieces_of(c.rows, c.width); u += gridDim.x) {
    const Piece p(u, c.width);
    copy(out + (u64)p.row * c.pitch + p.low, (char*)c.x + (u64)p.row * c.width + p.low, p.bytes);
  }
  u32 column = c.width;
  for (u32 r = 1; r < WORLD; ++r) {
    const Channel from = channel(c, r);
    u32 got = peek(&c.state->got[r][blockIdx.x]), u = blockIdx.x, bytes = 0, pieces = 0;
    do {
      if (threadIdx.x == 0) {
        while (acquire(from.mail) == got && wait.on()) {
        }
        here.bytes = peek(&from.lines[got % SLOTS]);
      }
      __syncthreads();
      if (peek(&here.ended)) return;
      bytes = here.bytes, pieces = column + bytes <= c.pitch ? pieces_of(c.rows, bytes) : 0;
      if (u < pieces) {
        const Piece p(u, bytes);
        copy(out + (u64)p.row * c.pitch + column + p.low, from.slots + got % SLOTS * SEGMENT, p.bytes);
      }
      __syncthreads();
      ++got;
      if (threadIdx.x == 0) release(from.receipt, got);
      u += gridDim.x;
    } while (u < pieces);
    if (threadIdx.x == 0) poke(&c.state->got[r][blockIdx.x], got);
    column += bytes;
  }
}

#define FOR_KIND(name, kind)        \
  KERNEL add_##name(ARGUMENT) {     \
    SHARED(Block, here);            \
    add<kind>(c, here);             \
  }                                 \
  KERNEL add_large_##name(ARGUMENT) { \
    SHARED(Block, here);            \
    add_large<kind>(c, here);       \
  }
#define FOR_FLOATS(name, kind)      \
  FOR_KIND(name, kind)              \
  KERNEL add_norm_##name(ARGUMENT) { \
    SHARED(Block, here);            \
    add_norm<kind>(c, here);        \
  }                                 \
  KERNEL norm_##name(ARGUMENT) {    \
    SHARED(Block, here);            \
    norm<kind>(c, here);            \
  }
FOR_FLOATS(bf16, BF16)
FOR_FLOATS(f16, F16)
FOR_FLOATS(f32, F32)
FOR_KIND(i64, I64)
