"""Speed of the Triton attention kernels on a GPU, beside the bandwidth of a copy on the same GPU. Under a minute.

    PYTHONPATH=. python benchmarks/gpu_attention.py [--only decode prefill tiles splits launch]

Each figure is the mean of calls in one CUDA graph that goes over layers of a cache larger than the L2 cache, so keys
and values come from memory, as in a step. Bytes are those of keys and values; a copy counts what it reads and writes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gapless.kernels import attention_triton as kernels
from gapless.kernels.attention_triton import AttentionTiles

CUDA = torch.device("cuda")
DTYPE, ITEM = torch.bfloat16, 2
PAGE = 16
BUFFER_BYTES = 40 << 30
MOST_LAYERS = 64
COLD_BYTES = 256 << 20
"""A cycle over the layers reads more than this, where the buffer allows."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def entry_bytes(self) -> int:
        """Key and value of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEM


QWEN, LLAMA = Shape(16, 8, 128), Shape(32, 8, 128)


class Batch(NamedTuple):
    """What an attention call needs; `layers` that can be read in turn."""

    cache: Tensor
    page_table: Tensor
    rows: Tensor
    kv_lens: Tensor

    @property
    def layers(self) -> int:
        return self.cache.shape[1]


def batch_of(buffer: Tensor, shape: Shape, lengths: list[int], longest: int = 40960) -> Batch:
    """Rows on pages in random order; the page table is as wide as a model's longest sequence."""
    needed = [-(-n // PAGE) for n in lengths]
    pages = sum(needed) + 1
    layer_bytes = pages * PAGE * shape.entry_bytes
    layers = max(1, min(MOST_LAYERS, buffer.numel() * ITEM // layer_bytes, 1 + COLD_BYTES // layer_bytes))
    size = pages * layers * PAGE * shape.entry_bytes // ITEM
    cache = buffer[:size].view(pages, layers, 2, PAGE, shape.kv_heads, shape.head_dim)
    table = torch.zeros((len(lengths), longest // PAGE), dtype=torch.int32)
    for row, ids in enumerate((torch.randperm(pages - 1) + 1).int().split(needed)):
        table[row, : len(ids)] = ids
    return Batch(cache, table.to(CUDA), torch.arange(len(lengths), device=CUDA), torch.tensor(lengths, device=CUDA))


def queries(tokens: int, shape: Shape) -> Tensor:
    fused = torch.randn((tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim), dtype=DTYPE, device=CUDA)
    return fused[:, : shape.heads]


def microseconds(call: Callable[[int], Any], layers: int, calls: int = 40, rounds: int = 5) -> float:
    """Mean time of one call of a graph of about `calls`, median of `rounds` replays."""
    calls = max(layers, calls) if layers > 8 else calls
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        call(0)
        torch.cuda.synchronize()
        # torch.cuda.graph() would collect garbage first, which takes longer than all the rest here.
        graph.capture_begin()
        for i in range(calls):
            call(i % layers)
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def copy_bandwidth(buffer: Tensor) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    part = (1 << 30) // ITEM
    source, target = buffer[:part], buffer[part : 2 * part]
    return 2 * (1 << 30) / microseconds(lambda _: target.copy_(source), 1, calls=5) * 1e6


def decode_time(buffer: Tensor, shape: Shape, lengths: list[int], **how: Any) -> float:
    batch, q = batch_of(buffer, shape, lengths), queries(len(lengths), shape)
    scale = shape.head_dim**-0.5
    calls = 40 if sum(lengths) < 1 << 19 else 6
    return microseconds(
        lambda layer: kernels.decode_attention(q, batch.cache, layer, *batch[1:], scale, **how), batch.layers, calls
    )


def rate(shape: Shape, lengths: list[int], taken: float) -> float:
    """Bytes of keys and values per second."""
    return sum(lengths) * shape.entry_bytes / taken * 1e6


def decode_table(buffer: Tensor, bandwidth: float) -> None:
    lengths = (512, 2048, 8192, 32768)
    for shape in (QWEN, LLAMA):
        print(f"\ndecode, {shape.heads}/{shape.kv_heads} heads, D {shape.head_dim}: us, GB/s, share of the copy's")
        print("batch  " + "".join(f"{f'x {n}':>24}" for n in lengths))
        for size in (1, 8, 32, 128):
            cells = []
            for length in lengths:
                if size * length * shape.entry_bytes > buffer.numel() * ITEM:
                    cells.append(f"{'-':>24}")
                    continue
                taken = decode_time(buffer, shape, [length] * size)
                reached = rate(shape, [length] * size, taken)
                cells.append(f"{taken:9.1f} {reached / 1e9:7.0f} {reached / bandwidth:6.1%}")
            print(f"{size:5d}  " + "".join(cells), flush=True)


CASES = {
    "1x512": [512], "1x4k": [4096], "1x32k": [32768], "8x2k": [2048] * 8, "8x16k": [16384] * 8, "32x300": [300] * 32,
    "32x2k": [2048] * 32, "128x1k": [1024] * 128, "ragged": [32768] + [256] * 31,
}  # fmt: skip
DEFAULT = {"tiles": AttentionTiles(16, 64, 4, 3), "per_sm": 2, "grid": kernels.GRID_PER_SM, "least": 64, "many": False}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"many": True},
    {"per_sm": 1},
    {"per_sm": 3},
    {"per_sm": 4},
    {"grid": 2},
    {"grid": 4},
    {"least": 128},
    {"least": 256},
    {"tiles": AttentionTiles(16, 32, 4, 3)},
    {"tiles": AttentionTiles(16, 64, 4, 2)},
    {"tiles": AttentionTiles(16, 64, 4, 4)},
    {"tiles": AttentionTiles(16, 64, 8, 3)},
    {"tiles": AttentionTiles(16, 128, 8, 2)},
)


def cut(tiles: AttentionTiles | None) -> str:
    """Tiles in short: 128x64 w8 s3."""
    if tiles is None:
        return "the table's"
    return f"{tiles.rows}x{tiles.entries} w{tiles.warps} s{tiles.stages}"


def tiles_table(buffer: Tensor) -> None:
    default = {name: cut(value) if name == "tiles" else value for name, value in DEFAULT.items()}
    print(f"\ndecode, us by what differs from {default}, 16/8 heads")
    print(" " * 42 + "".join(f"{name:>8}" for name in CASES))
    for way in WAYS:
        how = {**DEFAULT, **way}
        times = [decode_time(buffer, QWEN, lengths, **how) for lengths in CASES.values()]
        named = ", ".join(f"{k} {cut(v) if isinstance(v, AttentionTiles) else v}" for k, v in way.items()) or "nothing"
        print(f"{named:42}" + "".join(f"{t:8.1f}" for t in times), flush=True)


def prefill_time(buffer: Tensor, shape: Shape, sizes: list[int], before: int, **how: Any) -> float:
    batch = batch_of(buffer, shape, [before + size for size in sizes])
    starts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)], device=CUDA)
    q, scale, most = queries(sum(sizes), shape), shape.head_dim**-0.5, max(sizes)
    args = (batch.page_table, batch.rows, starts, batch.kv_lens, scale, most)
    return microseconds(
        lambda layer: kernels.prefill_attention(q, batch.cache, layer, *args, **how), batch.layers, calls=10
    )


def operations(shape: Shape, sizes: list[int], before: int) -> float:
    """Multiplications and additions of both products, the masked half left out."""
    return sum(4 * shape.heads * shape.head_dim * size * (before + (size + 1) / 2) for size in sizes)


def sdpa_time(shape: Shape, size: int) -> float:
    """Torch's own attention on one contiguous sequence, to hold the paged one against."""
    q, k, v = (torch.randn((1, heads, size, shape.head_dim), dtype=DTYPE, device=CUDA) for heads in (shape.heads,) * 3)
    return microseconds(lambda _: scaled_dot_product_attention(q, k, v, is_causal=True), 1, calls=10)


PREFILLS = {
    "128": ([128], 0), "512": ([512], 0), "2048": ([2048], 0), "8192": ([8192], 0), "512 after 8k": ([512], 8192),
    "16 x 128": ([128] * 16, 0), "32 x 1 and 512 after 2k": ([1] * 32 + [512], 2048),
}  # fmt: skip
PREFILL_TILES = (AttentionTiles(128, 64, 8, 3), AttentionTiles(64, 64, 4, 3), AttentionTiles(128, 128, 8, 2))


def prefill_table(buffer: Tensor) -> None:
    for shape in (QWEN, LLAMA):
        tried = (None, *PREFILL_TILES) if shape == QWEN else (None,)
        print(f"\nprefill, {shape.heads}/{shape.kv_heads} heads: us (TFLOP/s) by tiles")
        print(f"{'chunks':26}" + "".join(f"{cut(t):>21}" for t in tried) + "   no pages, SDPA")
        for name, (sizes, before) in PREFILLS.items():
            times = [prefill_time(buffer, shape, sizes, before, tiles=tiles) for tiles in tried]
            if len(sizes) == 1 and not before:
                times.append(sdpa_time(shape, sizes[0]))
            work = operations(shape, sizes, before)
            print(f"{name:26}" + "".join(f"{f'{t:.1f} ({work / t / 1e6:.0f})':>21}" for t in times), flush=True)


def splits_table(buffer: Tensor) -> None:
    print("\na few tokens after a long context, 32/8 heads: us unsplit, as chosen, with 4 and with 16 splits")
    for size in (1, 12, 32, 128, 256):
        for before in (0, 256, 1024, 4096, 32768):
            times = [prefill_time(buffer, LLAMA, [size], before, splits=splits) for splits in (1, None, 4, 16)]
            print(f"{size:4} after {before:6}" + "".join(f"{t:9.1f}" for t in times), flush=True)


def launch_table(buffer: Tensor) -> None:
    """Time of the host to launch eagerly, which a captured step does not pay."""
    batch, q = batch_of(buffer, QWEN, [512]), queries(1, QWEN)
    call = torch.ops.gapless.triton_decode_attention.default
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            call(q, batch.cache, 0, *batch[1:], 0.1)
        taken = (time.perf_counter() - begin) / 200
    print(f"\nhost time of one eager decode call (two kernels): {taken * 1e6:.1f} us")


def main() -> None:
    parts = {"decode": decode_table, "tiles": tiles_table, "prefill": prefill_table}
    parts |= {"splits": splits_table, "launch": launch_table}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=tuple(parts), default=tuple(parts))
    chosen = parser.parse_args().only
    began = time.perf_counter()
    torch.manual_seed(0)
    size = min(BUFFER_BYTES, int(torch.cuda.mem_get_info()[0] * 0.7)) // ITEM
    buffer = torch.empty(size, dtype=DTYPE, device=CUDA).normal_()
    bandwidth = copy_bandwidth(buffer)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy reaches {bandwidth / 1e9:.0f} GB/s")
    for name in chosen:
        parts[name](buffer, *([bandwidth] if name == "decode" else []))
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
