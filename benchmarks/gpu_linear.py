"""Products of few rows on a GPU: cuBLAS beside our Triton kernels, cut in several ways, in the shape of Qwen3-0.6B.
`python benchmarks/gpu_linear.py` prints tables; needs a GPU, takes about a minute and a half.

A figure is the mean of 20 calls captured one behind the other in one CUDA graph, so it includes the gap between two
kernels of a graph. Weights take turns and are larger together than the GPU's cache: all are read from memory. Our
kernels do more than cuBLAS's: qkv and gate_up norm their input, gate_up applies SiLU times gate, output and down add to
the residual. "early" kernels may begin before the one in front of them has ended (programmatic dependent launch).
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from gpu_timing import seconds
from torch import Tensor
from torch.nn.functional import linear

from gapless.kernels import activation_triton, attention_triton, few_rows_triton, norm_triton, rope_triton
from gapless.kernels.few_rows_triton import FewRowsTiles, is_vector
from gapless.kernels.views import Rotation, TokenBatch

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 1024, 16, 8, 128, 3072, 151_936
LAYERS, PAGE_SIZE, LONGEST, LENGTH = 28, 16, 4096, 512
EPS = 1e-6
CALLS = 20
TURNS = 400 << 20
"""Bytes of the weights that take turns."""


class Matrix(NamedTuple):
    name: str
    columns: int
    depth: int
    norm: bool = False
    gated: bool = False
    add: bool = False

    @property
    def nbytes(self) -> int:
        return 2 * self.columns * self.depth


MATRICES = (
    Matrix("qkv", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, norm=True),
    Matrix("output", HIDDEN, HEADS * DIM, add=True),
    Matrix("gate_up", 2 * INNER, HIDDEN, norm=True, gated=True),
    Matrix("down", HIDDEN, INNER, add=True),
    Matrix("head", VOCAB, HIDDEN),
)
VECTOR = {
    1024: (FewRowsTiles(8, 512, 2), FewRowsTiles(4, 1024, 4), FewRowsTiles(8, 1024, 8), FewRowsTiles(8, 1024, 4)),
    2048: (FewRowsTiles(4, 2048, 8), FewRowsTiles(2, 2048, 4), FewRowsTiles(8, 2048, 8)),
    3072: (FewRowsTiles(4, 4096, 16), FewRowsTiles(2, 4096, 8), FewRowsTiles(4, 2048, 8)),
}
MATRIX = tuple(
    FewRowsTiles(64, *rest) for rest in ((128, 4, 6), (256, 4, 3), (256, 4, 4), (256, 4, 3, 2), (256, 4, 3, 4))
)
KINDS = ("plain", "early")


class Cut(NamedTuple):
    """One way to run one matrix with one number of rows."""

    matrix: Matrix
    rows: int
    tiles: FewRowsTiles
    kind: str

    def call(self, x: Tensor, weight: Tensor, out: Tensor, norm: Tensor) -> None:
        few_rows_triton.launch(
            x, weight, None, out, norm=norm if self.matrix.norm else None, eps=EPS, gated=self.matrix.gated,
            add=self.matrix.add, tiles=self.tiles, early=self.kind == "early",
        )  # fmt: skip


def cuts(matrix: Matrix, rows: int) -> Iterator[Cut]:
    for tiles in VECTOR[matrix.depth] if is_vector(rows, matrix.columns * matrix.depth) else MATRIX:
        for kind in KINDS:
            if tiles.splits == 1 or matrix.columns < VOCAB:
                yield Cut(matrix, rows, tiles, kind)


def buffers(matrix: Matrix, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, output and norm of a product."""
    out = torch.zeros(rows, matrix.columns // (2 if matrix.gated else 1), dtype=torch.bfloat16, device="cuda")
    return noise(rows, matrix.depth), out, noise(matrix.depth)


def compiles(cut: Cut) -> bool:
    """Runs in a process of its own and leaves the kernel in Triton's cache on disk; whether it fits."""
    x, out, norm = buffers(cut.matrix, cut.rows)
    weight = torch.empty(cut.matrix.columns, cut.matrix.depth, dtype=torch.bfloat16, device="cuda")
    try:
        cut.call(x, weight, out, norm)
        torch.cuda.synchronize()
    except Exception as error:  # what does not fit, or does not compile, is left out of the table
        print(cut, type(error).__name__, str(error)[:200], flush=True)
        return False
    return True


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.1


class Result(NamedTuple):
    cut: Cut
    seconds: float

    def __str__(self) -> str:
        tiles = self.cut.tiles
        name = "x".join(str(n) for n in tiles[:3]) + (f" stages {tiles.stages}" if tiles.stages > 1 else "")
        return f"{self.seconds * 1e6:.2f} ({name}{f' splits {tiles.splits}' if tiles.splits > 1 else ''})"


Best = dict[tuple[str, int, str], FewRowsTiles]
"""Of (matrix, rows, kind)."""


def table(rows: list[int], fits: set[Cut]) -> Best:
    """Prints the times; gives the best tiles."""
    best: Best = {}
    lines = []
    print("| matrix | rows | at 4.2 TB/s, us | cuBLAS us | ours us (columns x depth x warps) | early us |")
    print("|---|---|---|---|---|---|")
    for matrix in MATRICES:
        weights = [noise(matrix.columns, matrix.depth) for _ in range(min(CALLS, -(-TURNS // matrix.nbytes)))]
        turns = [weights[i % len(weights)] for i in range(CALLS)]
        for count in rows:
            x, out, norm = buffers(matrix, count)
            theirs = seconds([partial(linear, x, weight) for weight in turns])
            results = [
                Result(cut, seconds([partial(cut.call, x, weight, out, norm) for weight in turns]))
                for cut in cuts(matrix, count)
                if cut._replace(rows=compiled_for(count)) in fits
            ]
            shown = []
            for kind in KINDS:
                those = sorted((r for r in results if r.cut.kind == kind), key=lambda r: r.seconds)
                shown.append(str(those[0]) if those else "")
                if those:
                    best[matrix.name, count, kind] = those[0].cut.tiles
                    lines.append(f"{matrix.name} {count} {kind}: " + ", ".join(map(str, those)))
            figures = f"{matrix.nbytes / 4.2e6:.1f} | {theirs * 1e6:.2f} | " + " | ".join(shown)
            print(f"| {matrix.name} | {count} | {figures} |", flush=True)
        del weights, turns
    print("\nAll, best first:")
    print(*lines, sep="\n")
    return best


def compiled_for(rows: int) -> int:
    """Row counts share a kernel."""
    return rows if rows <= 2 else 16 if rows <= 16 else 32


class Way(NamedTuple):
    """How fused layers run."""

    name: str
    kind: str
    attention: bool = True
    early_attention: bool = False
    combined: bool = False
    """the attention's last program combines, and no second launch"""
    rotated: bool = False
    """the attention rotates and writes, and no launch before it"""


WAYS = (
    Way("fused", "plain"),
    Way("rotated", "plain", rotated=True),
    Way("early products", "early"),
    Way("early products, rotated", "early", rotated=True),
    Way("early", "early", early_attention=True),
    Way("early, rotated", "early", early_attention=True, rotated=True),
    Way("early, rotated, combined", "early", early_attention=True, rotated=True, combined=True),
    Way("early, no attention", "early", attention=False),
)


class Layer(NamedTuple):
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Layers:
    """28 layers with weights of their own, and a batch of rows of 512 tokens."""

    def __init__(self) -> None:
        self.layers = [Layer(*(noise(m.columns, m.depth) for m in MATRICES[:4])) for _ in range(LAYERS)]
        self.norm = noise(HIDDEN) + 1

    def batch(self, rows: int) -> None:
        """New tables for `rows` rows."""
        pages = LENGTH // PAGE_SIZE
        self.x = noise(rows, HIDDEN)
        self.qk_norm = noise(HEADS + KV_HEADS, DIM) + 1
        self.table = torch.randn(LONGEST, DIM, device="cuda")
        self.cache = noise(1 + rows * pages, LAYERS, 2, PAGE_SIZE, KV_HEADS, DIM)
        self.pages = torch.zeros(rows + 1, LONGEST // PAGE_SIZE, dtype=torch.int32, device="cuda")
        self.pages[1:, :pages] = torch.arange(1, 1 + rows * pages, device="cuda").view(rows, pages)
        self.rows = torch.arange(1, rows + 1, device="cuda")
        self.lens = torch.full((rows,), LENGTH, device="cuda")
        self.slots = self.pages[1:, pages - 1].long() * PAGE_SIZE + PAGE_SIZE - 1

    def attend(self, qkv: Tensor, layer: int, way: Way) -> Tensor:
        qkv = qkv.view(len(qkv), -1, DIM)
        unturned = None
        if way.rotated:
            unturned = attention_triton.Unturned(
                Rotation(self.qk_norm, EPS, self.table), TokenBatch(self.lens, self.slots)
            )
        else:
            rope_triton.rope_and_write(
                qkv, self.qk_norm, EPS, self.lens, self.table, self.slots, self.cache, layer, early=way.early_attention
            )
        return attention_triton.decode_attention(
            qkv[:, :HEADS], self.cache, layer, self.pages, self.rows, self.lens, DIM**-0.5, early=way.early_attention,
            many=way.combined, unturned=unturned,
        )  # fmt: skip

    def today(self) -> Tensor:
        x = self.x * 1  # a kernel, and no copy, which nothing could begin before the end of
        y = norm_triton.rms_norm(x, self.norm, EPS)
        for i, layer in enumerate(self.layers):
            y = linear(self.attend(linear(y, layer.qkv), i, WAYS[0]), layer.output)
            y = norm_triton.add_rms_norm(x, y, self.norm, EPS)
            y = linear(activation_triton.silu_mul(linear(y, layer.gate_up)), layer.down)
            y = norm_triton.add_rms_norm(x, y, self.norm, EPS)
        return x

    def fused(self, best: Best, way: Way) -> Tensor:
        x = self.x * 1  # a kernel, and no copy, which nothing could begin before the end of
        rows = len(x)
        call = {m.name: Cut(m, rows, best[m.name, rows, way.kind], way.kind).call for m in MATRICES}
        for i, layer in enumerate(self.layers):
            qkv = x.new_empty(rows, MATRICES[0].columns)
            call["qkv"](x, layer.qkv, qkv, self.norm)
            y = qkv.view(-1)[: rows * HEADS * DIM].view(rows, -1)
            if way.attention:
                y = self.attend(qkv, i, way)
            call["output"](y, layer.output, x, self.norm)
            y = x.new_empty(rows, INNER)
            call["gate_up"](x, layer.gate_up, y, self.norm)
            call["down"](y, layer.down, x, self.norm)
        return x


def whole_layers(rows: list[int], best: Best) -> None:
    layers = Layers()
    print(f"\n{LAYERS} layers as one graph, us a layer; rows of {LENGTH} tokens")
    print("| rows | today | " + " | ".join(way.name for way in WAYS) + " | |")
    print("|---" * (len(WAYS) + 3) + "|")
    for count in rows:
        layers.batch(count)
        programs = [layers.today, *(partial(layers.fused, best, way) for way in WAYS)]
        times = [f"{seconds([program]) * 1e6 / LAYERS:.2f}" for program in programs]
        print(f"| {count} | " + " | ".join(times) + f" | {agreement(programs)} |", flush=True)


def agreement(programs: list[Callable[[], Tensor]]) -> str:
    """How far the fused result is from today's, and whether a replayed graph gives it bit for bit."""
    want, late, early = programs[0](), programs[2](), programs[6]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = programs[6]()
    same = True
    for _ in range(20):
        graph.replay()
        same &= torch.equal(replayed, early)
    off = (early.float() - want.float()).norm() / want.float().norm()
    return f"off {off:.4f}, early {torch.equal(late, early)}, replay {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    every = [cut for m in MATRICES for rows in sorted({compiled_for(r) for r in args.rows}) for cut in cuts(m, rows)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        fits = {cut for cut, fit in zip(every, pool.map(compiles, every, chunksize=4), strict=True) if fit}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    best = table(args.rows, fits)
    whole_layers(args.rows, best)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
