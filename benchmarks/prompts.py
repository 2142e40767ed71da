"""TTFT of prompts of mixed lengths, one at a time, alone or beside decoding rows, as a server has them after its start.

`PYTHONPATH=.:benchmarks python benchmarks/prompts.py [--device cuda] [--beside 0 31] [--out FILE]` prints a table. The
shape is Qwen3-0.6B's, with `--layers` layers and random weights, or that of the `config.json` in `--model`. Lengths are
log-uniform from `--shortest` to `--longest`. Arms: "rest" lets the engine capture, between two prompts, what steps have
missed, as its driver does when there is no work; "busy" leaves no time for that, and captures a program once it was
missed `--patience` times. Each arm is an engine of its own, and every prompt comes once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from shapes import QWEN3_06B

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core
from gapless.step.graphs import MISSES_BEFORE_CAPTURE

EDGES = (10, 64, 256, 1024, 4096)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def submit(core: EngineCore, key: int, length: int, output: int) -> None:
    tokens = np.random.default_rng(key).integers(200, core.info.vocab_size, length).astype(np.int32)
    core.submit(Request(key, tokens, GREEDY, key, (), 0, length + output))


class Watch:
    """Steps an engine, and notes when the first decoding row gets its tokens."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.times: list[float] = []

    def step(self, key: int = -1) -> bool:
        """Run one turn; return whether request `key` got a token."""
        keys = [one for step in self.core.step()[1] for one in step.keys.tolist()]
        self.times += [time.perf_counter()] * keys.count(0)
        return key in keys

    def ttft_ms(self, key: int, length: int) -> float:
        """Submit a request for one token, and measure the time until it comes."""
        begin = time.perf_counter()
        submit(self.core, key, length, 1)
        while not self.step(key):
            pass
        return (time.perf_counter() - begin) * 1e3


def arm(options: argparse.Namespace, folder: str, beside: int, name: str) -> dict[str, Any]:
    core = build_core(
        EngineConfig(
            model=folder, load_format="dummy", device=options.device, max_num_seqs=64,
            max_model_len=options.max_model_len, enable_prefix_caching=False, max_num_batched_tokens=options.tokens,
            kv_cache_memory_bytes=(32 << 30) if options.device == "cuda" else (1 << 30),
        )
    )  # fmt: skip
    core.loop.launcher.graphs._patience = options.patience
    lengths = np.exp(
        np.random.default_rng(1).uniform(np.log(options.shortest), np.log(options.longest), options.prompts)
    ).astype(int)
    for row in range(beside):
        submit(core, row, 64, options.max_model_len - 96)
    watch = Watch(core)
    for _ in range(50 if beside else 0):  # an engine without work waits
        watch.step()
    before, times = core.stats(), []
    watch.times.clear()
    for number, length in enumerate(lengths.tolist(), 1):
        times.append((length, watch.ttft_ms(beside + number, length)))
        for _ in range(20 if beside else 0):
            watch.step()
        while not beside and (core.has_work() or (name == "rest" and core.rest())):
            core.step()
    after = core.stats()
    core.close()
    missed, itl = after.steps.graph_misses - before.steps.graph_misses, (np.diff(watch.times) * 1e3).tolist()
    return {"beside": beside, "arm": name, "missed": missed, "ttft_ms": times, "itl_ms": itl}


def show(result: dict[str, Any]) -> None:
    cells = []
    for low, high in pairwise(EDGES):
        times = sorted(ms for length, ms in result["ttft_ms"] if low <= length < high)
        cells.append(f"{statistics.median(times):.1f} / {times[-1]:.1f}" if times else "-")
    p50, p99 = np.percentile(result["itl_ms"], (50, 99)) if result["itl_ms"] else (0.0, 0.0)
    cells.append(f"{p50:.1f} / {p99:.1f}" if result["itl_ms"] else "-")
    print(f"| {result['beside']} | {result['arm']} | {result['missed']} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 31], help="rows that decode all the time")
    parser.add_argument("--model", help="a directory with another config.json; no weights are read")
    parser.add_argument("--patience", type=int, default=MISSES_BEFORE_CAPTURE, help="misses before a capture")
    parser.add_argument("--layers", type=int, help="default: 2, on a GPU 28")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=0, help="budget of a step; 0: the engine's own choice")
    parser.add_argument("--shortest", type=int, default=10)
    parser.add_argument("--longest", type=int, default=3900)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="all times as JSON")
    options = parser.parse_args()
    layers = options.layers or (28 if options.device == "cuda" else 2)
    spans = [f"{a} to {b}" for a, b in pairwise(EDGES)]
    print("Prompt tokens: TTFT, ms, median / longest. Last: ITL of a decoding row, ms, p50 / p99.\n")
    print("| rows beside | arm | missed steps | " + " | ".join(spans) + " | ITL |")
    print("|---:|---|---:|" + "---:|" * len(EDGES))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B | {"num_hidden_layers": layers}))
        for beside in options.beside:
            for name in ("busy",) if beside else ("busy", "rest"):
                found.append(arm(options, options.model or folder, beside, name))
                show(found[-1])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
