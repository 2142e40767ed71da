"""What a hand-over between blocks of one persistent launch costs while weights stream into shared memory, on Hopper.
`PYTHONPATH=.:benchmarks python benchmarks/gpu_handover.py` prints a table; takes some seconds.

Each of 128 blocks gives eight values to all others, as 64-bit words of a value and a flag, and waits for theirs, again
and again, as a launch for all layers of one row would. In the meantime a warp of each block copies distinct memory to
shared memory. The table varies the bytes of a bulk copy, the copies in flight and the cycles between two copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

BLOCKS, THREADS, RING, ROUNDS = 128, 288, 13 << 14, 2000
STREAMED = 2 << 30
"""Bytes that are streamed in turns, many times the cache."""
COPIES = [
    (0, 0, 0),
    (16, 1, 0),
    (16, 2, 0),
    (16, 4, 0),
    (16, 13, 0),
    *((8, 26, pace) for pace in (1200, 1000, 800, 600, 500)),
]
"""KiB a copy, copies in flight, least cycles from one to the next; the first copies nothing."""

SOURCE = r"""
typedef unsigned int u32; typedef unsigned long long u64;
__device__ __forceinline__ u32 clock_() { u32 v; asm volatile("mov.u32 %0, %%clock;" : "=r"(v) :: "memory"); return v; }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    for (u32 done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
// words [2, 1024], results: [0] bytes that were copied, [1] values that were wrong
extern "C" __global__ void __launch_bounds__(288, 1) handover(
    u64* words, u64* results, const char* from, u64 span, u32 base, u32 rounds, u32 bytes, u32 depth, u32 pace) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ u64 full[32];
    __shared__ volatile u32 ended;
    const u32 t = threadIdx.x, p = blockIdx.x, first = (u32)__cvta_generic_to_shared(full);
    if (t == 0) ended = 0;
    if (t < 32) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(first + t * 8));
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (t >= 256) {
        u32 issued = 0, awaited = 0, last = clock_() - pace;
        while (t == 256 && depth && !ended) {
            if (issued - awaited == depth) wait(first + awaited % depth * 8, awaited / depth & 1), awaited++;
            while (clock_() - last < pace) {}
            last = clock_();
            const u32 slot = issued % depth, barrier = first + slot * 8;
            const char* place = from + ((u64)issued * gridDim.x + p) * bytes % span;
            const u32 to = (u32)__cvta_generic_to_shared(ring) + slot * bytes;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes)
                         : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         :: "r"(to), "l"(place), "r"(bytes), "r"(barrier) : "memory");
            issued++;
        }
        for (; awaited < issued; awaited++) wait(first + awaited % depth * 8, awaited / depth & 1);
        if (t == 256) atomicAdd(results, (u64)issued * bytes);
        return;
    }
    u32 wrong = 0;
    for (u32 round = 0; round < rounds; round++) {
        u64* own = words + round % 2 * 1024;
        const u64 word = (u64)(base + round) << 32 | (round + p * 8 + t / 32);
        if (t % 32 == 0)
            asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(own + p * 8 + t / 32), "l"(word) : "memory");
        u64 v[4];
        do {
            for (int i = 0; i < 2; i++)
                asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                             : "=l"(v[2 * i]), "=l"(v[2 * i + 1]) : "l"(own + i * 512 + 2 * t) : "memory");
        } while (v[0] >> 32 != base + round || v[1] >> 32 != base + round || v[2] >> 32 != base + round ||
                 v[3] >> 32 != base + round);
        for (u32 i = 0; i < 4; i++) wrong += (u32)v[i] != round + i / 2 * 512 + 2 * t + i % 2;
        asm volatile("bar.sync 1, 256;" ::: "memory");
    }
    if (wrong) atomicAdd(results + 1, (u64)wrong);
    ended = 1;
}
"""


def check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def nvrtc() -> ctypes.CDLL:
    """The compiler that comes with torch for CUDA: by its name, or from the wheel beside torch."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        [folder] = {path.parent for path in (Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}")}
    for part in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(part))  # which it asks for by name
    return ctypes.CDLL(str(folder / name))


def compiled(library: ctypes.CDLL) -> bytes:
    program, size, flag = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p(b"--gpu-architecture=sm_90a")
    check(library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"handover.cu", 0, None, None))
    check(library.nvrtcCompileProgram(program, 1, ctypes.byref(flag)))
    check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    check(library.nvrtcGetCUBIN(program, binary))
    return binary.raw


class Handover:
    """The kernel on the current device, whose blocks must all run at once."""

    def __init__(self) -> None:
        self.words = torch.zeros(2048, dtype=torch.int64, device="cuda")
        self.memory = torch.empty(STREAMED, dtype=torch.uint8, device="cuda")
        self.rounds = 1
        self.driver, module, self.kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        check(self.driver.cuModuleLoadData(ctypes.byref(module), compiled(nvrtc())))
        check(self.driver.cuModuleGetFunction(ctypes.byref(self.kernel), module, b"handover"))
        check(self.driver.cuFuncSetAttribute(self.kernel, 8, RING))  # dynamic shared memory

    def __call__(self, copies: tuple[int, int, int]) -> tuple[float, float]:
        """Microseconds of a hand-over, and TB/s of the copies beside it."""
        results, (size, depth, pace) = torch.zeros(2, dtype=torch.int64, device="cuda"), copies
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._launch(
            [ctypes.c_void_p(t.data_ptr()) for t in (self.words, results, self.memory)]
            + [ctypes.c_ulonglong(STREAMED), *map(ctypes.c_uint, (self.rounds, ROUNDS, size << 10, depth, pace))]
        )
        end.record()
        end.synchronize()
        self.rounds += ROUNDS
        copied, wrong = results.tolist()
        assert not wrong, f"{wrong} values were not those that had been handed over"
        seconds = begin.elapsed_time(end) / 1e3
        return seconds / ROUNDS * 1e6, copied / seconds / 1e12

    def _launch(self, arguments: Sequence[Any]) -> None:
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (BLOCKS, 1, 1, THREADS, 1, 1, RING)
        check(self.driver.cuLaunchCooperativeKernel(self.kernel, *sizes, stream, places))


def main() -> None:
    handover = Handover()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {BLOCKS} blocks, {ROUNDS} rounds, best of 5\n")
    print("| KiB a copy | in flight | cycles apart | hand-over, us | copies, TB/s |\n|---:|---:|---:|---:|---:|")
    for copies in COPIES:
        handover(copies)
        best, speed = min(handover(copies) for _ in range(5))
        print(f"| {' | '.join(map(str, copies))} | {best:.2f} | {speed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
