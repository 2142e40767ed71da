"""Time of each Triton kernel but attention, beside its twin in plain torch, in the shape of Qwen3-0.6B.
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
from torch import Tensor

from gapless.kernels import (
    activation_triton,
    begin_triton,
    finish_triton,
    mixed_triton,
    norm_triton,
    plain,
    rope_triton,
    sampling_triton,
)
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    HEADER_WORDS,
    MAX_LEN,
    NO_TOKEN,
    PARAM_COLUMNS,
    STATE_COLUMNS,
    TEMPERATURE,
)

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
    args = (qkv, qk_norm, EPS, positions, table, slots, cache, 5)
    moved = 2 * DIM * ((HEADS + 2 * KV_HEADS) + (HEADS + KV_HEADS) + 2 * KV_HEADS)
    yield Case(
        "rope_and_write", lambda: rope_triton.rope_and_write(*args), lambda: plain.rope_and_write(*args), batch * moved
    )


def step_cases(batch: int) -> Iterator[Case]:
    rows = torch.arange(1, batch + 1, device="cuda")
    state = torch.zeros(batch + 1, STATE_COLUMNS, dtype=torch.int32, device="cuda")
    state[1:, ACTIVE], state[1:, 2:] = 1, LONGEST // 2
    params = torch.full((batch + 1, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32, device="cuda")
    params[:, MAX_LEN] = LONGEST
    params[:, TEMPERATURE : TEMPERATURE + 1].view(torch.float32)[:] = 0.8
    history = torch.zeros(batch + 1, LONGEST, dtype=torch.int32, device="cuda")
    pages = torch.ones(batch + 1, LONGEST // PAGE_SIZE, dtype=torch.int32, device="cuda")
    logits = noise(batch, VOCAB, dtype=torch.float32)
    for random in (False, True):
        args = (logits, rows, state, params, random)
        yield Case(
            "sample, random" if random else "sample, greedy", lambda args=args: sampling_triton.sample(*args),
            lambda args=args: plain.sample(*args), (2 if random else 1) * logits.nbytes,
        )  # fmt: skip
    words = torch.zeros(HEADER_WORDS + batch + 64, dtype=torch.int32, device="cuda")
    words[HEADER_WORDS : HEADER_WORDS + batch] = rows.int()
    begin = (words, batch, 16, state, history, pages, PAGE_SIZE)
    yield Case("begin_decode", lambda: begin_triton.begin_decode(*begin), lambda: plain.begin_decode(*begin), 0)
    yield mixed_case(batch, state, params, history, pages)
    tokens, good = torch.ones(batch, dtype=torch.int64, device="cuda"), torch.ones_like(rows, dtype=torch.bool)
    there = torch.zeros(2, 4 * (batch + 1), dtype=torch.int32, device="cuda")
    mapped = torch.zeros(there.shape, dtype=torch.int32, pin_memory=True)
    ends = [(words, rows, None, tokens, good, state, params, history, lines) for lines in (there, mapped)]
    yield Case("finish", lambda: finish_triton.finish(*ends[0]), lambda: plain.finish(*ends[0]), 0)
    # Torch has no way to write the host's memory from a GPU by an index of the device's.
    yield Case("finish, to the host", lambda: finish_triton.finish(*ends[1]), lambda: plain.finish(*ends[0]), 0)


def mixed_case(batch: int, state: Tensor, params: Tensor, history: Tensor, pages: Tensor) -> Case:
    """`batch` decode rows and a chunk of 2,000 tokens of the last row, with its pages. No twin outside of a step."""
    chunk, writes = 2000, 2000 // PAGE_SIZE
    head = [0, 0, *range(batch), batch, *[1] * batch, chunk]
    places = [n for entry in range(writes) for n in (batch * pages.shape[1] + entry, 1)]
    words = torch.tensor([*head, *places, *[7] * chunk], dtype=torch.int32, device="cuda")
    state[batch, COMPUTED] = 0
    args = (words, batch + 1, batch, writes, 0, batch + chunk, state, params, history, pages, PAGE_SIZE)
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
        for cases in (layer_cases, step_cases):
            for case in cases(batch):
                ours = seconds([case.ours] * args.launches)
                twin = f"{seconds([case.twin] * 5) * 1e6:.1f}" if case.twin else ""
                share = f"{case.nbytes / ours / rate:.0%}" if case.nbytes else ""
                print(f"| {case.name} | {batch} | {ours * 1e6:.1f} | {twin} | {share} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
