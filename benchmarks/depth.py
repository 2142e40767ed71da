"""Depth 1 against depth auto in one run, A B A B: output tokens a second, and how much of the time the device was idle.

`python benchmarks/depth.py --model DIR --load-format dummy --batch 32` works wherever the engine does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core


class Run(NamedTuple):
    """One round on one side."""

    tokens_per_second: float
    idle: float
    """Share of the time from the first step's start to the last step's end in which no step ran."""
    device_us: float
    """Median step, on the device."""
    host_us: float
    """Median host time of a step, waiting excluded."""


def drive(core: EngineCore, batch: int, prompt: int, output: int, seed: int, temperature: float) -> Run:
    """`batch` requests at once, each with `output` tokens to generate."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, max_tokens=None)
    for index in range(batch):
        tokens = rng.integers(0, core.info.vocab_size, prompt).astype(np.int32)
        core.submit(Request(seed * 100_000 + index, tokens, params, index, (), 0, prompt + output))
    first = max((record.step for record in core.loop.records), default=0)
    begin = time.perf_counter()
    while core.has_work():
        core.step()
    seconds = time.perf_counter() - begin
    steps = [record for record in core.loop.records if record.step > first and not record.chunk_tokens]
    gaps = [max(0, after.device_start - before.device_end) for before, after in pairwise(steps)]
    span = steps[-1].device_end - steps[0].device_start
    return Run(
        batch * output / seconds,
        sum(gaps) / span,
        statistics.median(record.device_ns for record in steps) / 1e3,
        statistics.median(record.host_ns for record in steps) / 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    sides = ("1", "auto")
    cores = {
        depth: build_core(
            EngineConfig(
                model=args.model, load_format=args.load_format, device=args.device, depth=depth,
                max_model_len=args.prompt + args.output, max_num_seqs=max(8, args.batch),
                kv_cache_memory_bytes=4 << 30, enable_prefix_caching=False,
            )
        )
        for depth in sides
    }  # fmt: skip
    runs: dict[str, list[Run]] = {depth: [] for depth in sides}
    for seed in range(args.rounds):
        for depth in sides:
            runs[depth].append(drive(cores[depth], args.batch, args.prompt, args.output, seed, args.temperature))
    info = cores["1"].info
    print(f"{info.model}, {info.parameters / 1e6:.1f} M parameters, {info.device}, {info.dtype}, batch {args.batch}")
    print("| depth | tokens/s | device idle | step on the device, us | host time of a step, us |")
    print("|---|---:|---:|---:|---:|")
    for depth in sides:
        columns = [sorted(column) for column in zip(*runs[depth], strict=True)]
        middle = Run(*(statistics.median(column) for column in columns))
        print(
            f"| {depth} | {middle.tokens_per_second:.0f} | {middle.idle:.1%} "
            f"| {middle.device_us:.0f} | {middle.host_us:.0f} |"
        )
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in zip(runs["1"], runs["auto"], strict=True)]
    print(f"auto / 1: {statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}] in {args.rounds} rounds")
    for core in cores.values():
        core.close()


if __name__ == "__main__":
    main()
