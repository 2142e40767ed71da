"""Time of each Triton kernel but attention, beside its reference implementation, in the shape of Qwen3-0.6B.
`python benchmarks/gpu_kernels.py` prints a table; needs a GPU, takes less than a minute.

A figure is the mean of launches captured one behind the other in one CUDA graph, so it includes the gap between two
kernels of a graph and no work of the host. Buffers are the same in every launch: what fits into the GPU's cache is read
from it, as it is when the kernel before has just written it. "of copy" is the share of the rate of a large copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from gpu_timing import Program, seconds
from sampled_rows import GREEDY, RANDOM, TOP_K_ROW, TOP_P_ROW, Way, sampled_rows
from torch import Tensor

from gapless.kernels import (
    activation_triton,
    begin_triton,
    cut_triton,
    finish_triton,
    mixed_triton,
    norm_triton,
    plain,
    rope_triton,
    sampling,
    sampling_triton,
    score_triton,
    scores,
    unpack,
)
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    HEADER_WORDS,
    LENGTH,
    MAX_LEN,
    NO_TOKEN,
    PARAM_COLUMNS,
    STATE_COLUMNS,
    score_words,
)
from gapless.kernels.tables import Tables
from gapless.kernels.views import KV, Counts, Filters, Rotation, TokenBatch

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 1024, 16, 8, 128, 3072, 151_936
LAYERS, PAGE_SIZE, LONGEST = 28, 16, 4096
EPS = 1e-6


class Case(NamedTuple):
    name: str
    ours: Program
    twin: Program | None
    nbytes: int


def copy_rate() -> float:
    """Bytes a second, read and written together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds([lambda: target.copy_(source)] * 5)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def layer_cases(batch: int) -> Iterator[Case]:
    x, delta, weight = noise(batch, HIDDEN), noise(batch, HIDDEN), noise(HIDDEN)
    row = 2 * batch * HIDDEN
    yield Case(
        "rms_norm", lambda: norm_triton.rms_norm(x, weight, EPS), lambda: plain.rms_norm(x, weight, EPS), 2 * row
    )
    yield Case(
        "add_rms_norm", lambda: norm_triton.add_rms_norm(x, delta, weight, EPS),
        lambda: plain.add_rms_norm(x, delta, weight, EPS), 4 * row,
    )  # fmt: skip
    gate_up = noise(batch, 2 * INNER)
    yield Case(
        "silu_mul", lambda: activation_triton.silu_mul(gate_up), lambda: plain.silu_mul(gate_up), 2 * 3 * batch * INNER
    )
    qkv, qk_norm = noise(batch, HEADS + 2 * KV_HEADS, DIM), noise(HEADS + KV_HEADS, DIM)
    cache, table = noise(batch + 1, LAYERS, 2, PAGE_SIZE, KV_HEADS, DIM), noise(LONGEST, DIM, dtype=torch.float32)
    positions = torch.randint(LONGEST, (batch,), device="cuda")
    slots = torch.arange(1, batch + 1, device="cuda") * PAGE_SIZE + 3
    pages = torch.empty(0, dtype=torch.int32, device="cuda")
    args = (qkv, Rotation(qk_norm, EPS, table), KV(cache, 5, pages), TokenBatch(positions, slots))
    ours = unpack.rope_and_write(rope_triton.rope_and_write)
    moved = 2 * DIM * ((HEADS + 2 * KV_HEADS) + (HEADS + KV_HEADS) + 2 * KV_HEADS)
    yield Case("rope_and_write", lambda: ours(*args), lambda: plain.rope_and_write(*args), batch * moved)


def step_cases(batch: int) -> Iterator[Case]:
    rows = torch.arange(1, batch + 1, device="cuda")
    state = torch.zeros(batch + 1, STATE_COLUMNS, dtype=torch.int32, device="cuda")
    state[1:, ACTIVE], state[1:, LENGTH : COMPUTED + 1] = 1, LONGEST // 2
    params = torch.full((batch + 1, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32, device="cuda")
    params[:, MAX_LEN] = LONGEST
    history = torch.zeros(batch + 1, LONGEST, dtype=torch.int32, device="cuda")
    pages = torch.ones(batch + 1, LONGEST // PAGE_SIZE, dtype=torch.int32, device="cuda")
    words = torch.zeros(HEADER_WORDS + batch + 64, dtype=torch.int32, device="cuda")
    words[HEADER_WORDS : HEADER_WORDS + batch] = rows.int()
    begin = (words, Counts.of_decode(batch, 16), Tables(state, params, history, pages, pages[:, None, :0]), PAGE_SIZE)
    yield Case("begin_decode", lambda: begin_triton.begin_decode(*begin), lambda: plain.begin_decode(*begin), 0)
    yield mixed_case(batch, state, params, history, pages)
    tokens, good = torch.ones(batch, dtype=torch.int64, device="cuda"), torch.ones_like(rows, dtype=torch.bool)
    there = torch.zeros(2, 4 * (batch + 1), dtype=torch.int32, device="cuda")
    mapped = torch.zeros(there.shape, dtype=torch.int32, pin_memory=True)
    tables = Tables(state, params, history, pages, pages[:, None, :0])
    out = torch.empty(batch, 1, dtype=torch.int32, device="cuda")
    ends = [(words, rows.int(), None, tokens[:, None], good, tables, lines, out) for lines in (there, mapped)]
    yield Case("finish", lambda: finish_triton.finish(*ends[0]), lambda: plain.finish(*ends[0]), 0)
    # Torch has no way to write the host's memory from a GPU by an index of the device's.
    yield Case("finish, to the host", lambda: finish_triton.finish(*ends[1]), lambda: plain.finish(*ends[0]), 0)


def sampling_cases(batch: int) -> Iterator[Case]:
    """Sampling of a batch, and the cut of a few of its rows or all; logits as a model of bfloat16 gives them."""
    logits = noise(batch, VOCAB) * 3
    for name, way in (("all greedy", GREEDY), ("all random", RANDOM), ("all top-p, cut before", TOP_P_ROW)):
        rows, index, tables = sampled_rows([way] * batch, "cuda")
        if len(index):
            cut_triton.cut(logits, index, rows, tables, filters_of(way))
        yield Case(
            f"sample, {name}", lambda rows=rows, tables=tables: sampling_triton.sample(logits, rows, tables, None),
            lambda rows=rows, tables=tables: sampling.sample(logits, rows, tables), logits.nbytes,
        )  # fmt: skip
    for name, way in (("top-p", TOP_P_ROW), ("top-k", TOP_K_ROW), ("top-k and top-p", Way(0.8, 50, 0.9))):
        for count in (count for count in (1, 4, 32, 256) if count <= batch):
            rows, index, tables = sampled_rows([way] * count + [GREEDY] * (batch - count), "cuda")
            given = (logits, index, rows, tables, filters_of(way))
            yield Case(f"cut, {count} of {name}", lambda given=given: cut_triton.cut(*given), None, 0)


def filters_of(way: Way) -> Filters:
    return Filters(way.top_k > 0, way.top_p < 1.0)


def score_cases(batch: int) -> Iterator[Case]:
    """Scores of tokens, to outboxes of the host; those of plain torch to the device's."""
    logits = noise(batch, VOCAB) * 3
    rows, _, tables = sampled_rows([GREEDY] * batch, "cuda")
    words = torch.cat((torch.zeros(HEADER_WORDS, dtype=torch.int32, device="cuda"), rows))
    tokens = logits.argmax(-1).int()[:, None]
    there = torch.zeros(2, batch * score_words(20), dtype=torch.int32, device="cuda")
    mapped = torch.zeros(there.shape, dtype=torch.int32, pin_memory=True)
    for count in (count for count in (1, 4, 32, 256) if count <= batch):
        index = torch.arange(count, dtype=torch.int32, device="cuda")
        for width in (5, 20):
            given = (logits, index, words, tokens, tables)
            yield Case(
                f"score, {count} with {width}",
                lambda given=given, width=width: score_triton.score(*given, mapped, 0, width),
                lambda given=given, width=width: scores.score(*given, there, 0, width), logits[:count].nbytes,
            )  # fmt: skip


def mixed_case(batch: int, state: Tensor, params: Tensor, history: Tensor, pages: Tensor) -> Case:
    """`batch` decode rows and a chunk of 2,000 tokens of the last row, with its pages. Not in plain torch."""
    chunk, writes = 2000, 2000 // PAGE_SIZE
    head = [0, 0, *range(batch), batch, *[1] * batch, chunk]
    places = [n for entry in range(writes) for n in (batch * pages.shape[1] + entry, 1)]
    words = torch.tensor([*head, *places, *[7] * chunk], dtype=torch.int32, device="cuda")
    state[batch, COMPUTED] = 0
    counts = Counts(batch + 1, batch, writes, 0, batch + chunk)
    args = (words, counts, Tables(state, params, history, pages, pages[:, None, :0]), PAGE_SIZE)
    return Case("begin_mixed", lambda: mixed_triton.begin_mixed(*args), None, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--launches", type=int, default=50)
    args = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {rate / 1e12:.2f} TB/s\n")
    print("| kernel | rows | us | twin us | of copy |\n|---|---|---|---|---|")
    for batch in args.batch:
        for cases in (layer_cases, step_cases, sampling_cases, score_cases):
            for case in cases(batch):
                ours = seconds([case.ours] * args.launches)
                twin = f"{seconds([case.twin] * 5) * 1e6:.1f}" if case.twin else ""
                share = f"{case.nbytes / ours / rate:.0%}" if case.nbytes else ""
                print(f"| {case.name} | {batch} | {ours * 1e6:.1f} | {twin} | {share} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
