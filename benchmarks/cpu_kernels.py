"""The CPU's C++ kernels beside torch's own path, for the shapes of a tiny model and of Qwen3-0.6B, in bfloat16.

`python benchmarks/cpu_kernels.py [--threads N] [--rounds N] [--only linear]` prints one line per operation and rows.
Both sides run in turns in one process (A B A B); a figure is the lower quartile of the rounds, since a busy machine
only adds. GB/s are bytes of the weights or of the cache that is read; `read` is a plain sum over 512 MiB in the same
run. Matrices of the large model are kept in as many copies as no cache holds; those of the tiny one are left warm.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from sampled_rows import GREEDY, RANDOM, TOP_K_ROW, TOP_P_ROW, sampled_rows
from torch import Tensor

from gapless.device import build
from gapless.kernels import native, plain
from gapless.kernels.layout import score_words
from gapless.kernels.linear import TorchLinear
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.kernels.views import KV, Filters, Rotation, TokenBatch
from gapless.model.attention import PagedAttention, plan_attention
from gapless.model.seam import BatchShape, KVCache, StepInputs

ROWS = (1, 8, 32, 128)
CONTEXT, PAGE, EPS = 192, 16, 1e-6
COLD_BYTES = 96 << 20
DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """Of one model."""

    name: str
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    cold: bool

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        wide, own = (self.heads + 2 * self.kv_heads) * self.dim, self.heads * self.dim
        return {
            "qkv": (wide, self.hidden),
            "output": (self.hidden, own),
            "gate_up": (2 * self.middle, self.hidden),
            "down": (self.hidden, self.middle),
            "head": (self.vocab, self.hidden),
        }


SHAPES = (Shape("tiny", 256, 512, 4, 2, 64, 2048, False), Shape("0.6B", 1024, 3072, 16, 8, 128, 151936, True))


class Case(NamedTuple):
    """Two callables that do the same, and the bytes that each must read (0: not worth telling)."""

    name: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    bytes: int


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).to(DTYPE)


def linear_cases(shape: Shape, rows: int) -> Iterator[Case]:
    for name, (outputs, inputs) in shape.matrices.items():
        size = outputs * inputs * DTYPE.itemsize
        weights = [randn(outputs, inputs) for _ in range(max(1, COLD_BYTES // size) if shape.cold else 1)]
        ours = itertools.cycle([native.NativeLinear(weight) for weight in weights])
        torchs = itertools.cycle([TorchLinear(weight) for weight in weights])
        x = randn(rows, inputs)
        yield Case(f"linear {name}", lambda o=ours, x=x: next(o)(x), lambda t=torchs, x=x: next(t)(x), size)


def small_cases(shape: Shape, rows: int) -> Iterator[Case]:
    ours, x, delta = native.kernels(), randn(rows, shape.hidden), randn(rows, shape.hidden) * 0
    weight, gate_up = torch.ones(shape.hidden, dtype=DTYPE), randn(rows, 2 * shape.middle)
    turned = shape.heads + shape.kv_heads
    qkv, norm = randn(rows, turned + shape.kv_heads, shape.dim), torch.ones(turned, shape.dim, dtype=DTYPE)
    cache, table = (
        torch.zeros(rows + 1, 2, 2, PAGE, shape.kv_heads, shape.dim, dtype=DTYPE),
        torch.randn(512, shape.dim),
    )
    positions, slots = torch.arange(rows), torch.arange(rows) * PAGE + 3
    pages = torch.empty(0, dtype=torch.int32)
    turn = (qkv, Rotation(norm, EPS, table), KV(cache, 1, pages), TokenBatch(positions, slots))
    yield Case("rms_norm", lambda: ours.rms_norm(x, weight, EPS), lambda: plain.rms_norm(x, weight, EPS), 0)
    yield Case(
        "add_rms_norm",
        lambda: ours.add_rms_norm(x, delta, weight, EPS),
        lambda: plain.add_rms_norm(x, delta, weight, EPS),
        0,
    )
    yield Case("silu_mul", lambda: ours.silu_mul(gate_up), lambda: plain.silu_mul(gate_up), 0)
    yield Case("rope_and_write", lambda: ours.rope_and_write(*turn), lambda: plain.rope_and_write(*turn), 0)


def sampling_cases(shape: Shape, rows: int) -> Iterator[Case]:
    """Sampling of a batch, with its cut: rows of one way, and one row among greedy ones."""
    logits = randn(rows, shape.vocab) * 3
    one = [GREEDY] * (rows - 1)
    ways = {
        "all greedy": [GREEDY] * rows,
        "all random": [RANDOM] * rows,
        "one top-p row": [*one, TOP_P_ROW],
        "one top-k row": [*one, TOP_K_ROW],
        "all top-p": [TOP_P_ROW] * rows,
    }
    for name, chosen in ways.items():
        given = (logits, *sampled_rows(chosen, "cpu"))
        yield Case(
            f"sample, {name}",
            lambda given=given: draw(native.kernels(), *given),
            lambda given=given: draw(plain.KERNELS, *given),
            0,
        )


def draw(kernels: Kernels, logits: Tensor, rows: Tensor, index: Tensor, tables: Tables) -> None:
    if len(index):
        kernels.cut(logits, index, rows, tables, Filters(top_k=True, top_p=True))
    kernels.sample(logits, rows, tables, None)


def score_cases(shape: Shape, rows: int) -> Iterator[Case]:
    """Log-probabilities with five alternatives: of one row, and of all."""
    logits = randn(rows, shape.vocab) * 3
    batch, _, tables = sampled_rows([GREEDY] * rows, "cpu")
    words, tokens = torch.cat((torch.tensor([1, 1], dtype=torch.int32), batch)), logits.argmax(-1, keepdim=True).int()
    for name, count in {"one row": 1, "all rows": rows}.items():
        index = torch.arange(count, dtype=torch.int32)
        given = (logits, index, words, tokens, tables, torch.zeros(2, count * score_words(5), dtype=torch.int32), 0, 5)
        yield Case(
            f"score, {name}",
            lambda given=given: native.kernels().score(*given),
            lambda given=given: plain.KERNELS.score(*given),
            0,
        )


def attention_cases(shape: Shape, rows: int) -> Iterator[Case]:
    ours = native.kernels()
    assert ours.decode_attention is not None and ours.prefill_attention is not None
    pages = -(-CONTEXT // PAGE)
    data = randn(rows * pages + 1, 4, 2, PAGE, shape.kv_heads, shape.dim)
    table = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
    batch, lens = torch.arange(rows), torch.full((rows,), CONTEXT)
    qkv = randn(rows, shape.heads + 2 * shape.kv_heads, shape.dim)
    q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    inputs = StepInputs(batch, lens - 1, batch, lens, batch, table, pages)
    cache, kv, scale = KVCache(data), KV(data, 1, table), shape.dim**-0.5
    plan = plan_attention(BatchShape(rows, (), CONTEXT), shape.kv_heads * shape.dim)
    twin = PagedAttention(inputs, plan, cache, shape.heads)
    yield Case(
        f"decode attention, {CONTEXT} keys",
        lambda: ours.decode_attention(q, kv, inputs.batch, scale),
        lambda: twin.forward(q, k, v, 1),
        rows * CONTEXT * 2 * shape.kv_heads * shape.dim * DTYPE.itemsize,
    )
    if rows > PAGE:
        whole = StepInputs(
            batch, batch, batch, torch.tensor([rows]), batch[:1], table[:1], pages, torch.tensor([0, rows])
        )
        chunk = plan_attention(BatchShape(0, ((0, rows),), 0), shape.kv_heads * shape.dim)
        fresh = PagedAttention(whole, chunk, cache, shape.heads)
        yield Case(
            f"prefill attention, {rows} tokens",
            lambda: ours.prefill_attention(q, kv, whole.batch, scale, rows),
            lambda: fresh.forward(q, k, v, 1),
            0,
        )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def measured(case: Case, rounds: int) -> tuple[float, float]:
    """Seconds a call of ours and of torch's."""
    repeats = max(1, int(2e-4 / max(seconds(case.ours), 1e-7)))
    ours, torchs = [], []
    for _ in range(rounds):
        # The threads of torch's OpenMP look for work for a while after each call, on cores that ours would use.
        time.sleep(0.02 if torch.get_num_threads() > 1 else 0.0)
        for side, call in ((ours, case.ours), (torchs, case.torchs)):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            side.append((time.perf_counter() - start) / repeats)
    return quartile(ours), quartile(torchs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if native.load() is None:
        raise SystemExit(f"no C++ kernels here: {build.outcomes[native.NAME].reason}")
    memory = torch.zeros(128 << 20)
    print(f"{'model':5} {'rows':>4}  {'operation':28} {'ours us':>9} {'torch us':>9} ratio  GB/s")
    for shape in SHAPES:
        read = memory.numel() * 4 / quartile([seconds(memory.sum) for _ in range(8)]) / 1e9
        print(f"{shape.name:5}       plain read: {read:.1f} GB/s")
        for rows in ROWS:
            for cases in (linear_cases, small_cases, sampling_cases, score_cases, attention_cases):
                for case in cases(shape, rows):
                    if options.only not in case.name:
                        continue
                    ours, torchs = measured(case, options.rounds)
                    speed = f"{case.bytes / ours / 1e9:5.1f}" if case.bytes else ""
                    print(
                        f"{shape.name:5} {rows:4}  {case.name:28} {ours * 1e6:9.1f} {torchs * 1e6:9.1f} "
                        f"{torchs / ours:5.2f} {speed}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
