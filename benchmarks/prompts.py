"""TTFT of prompts of mixed lengths, one at a time, alone or beside decoding rows, as a server has them after its start.

`PYTHONPATH=.:benchmarks python benchmarks/prompts.py [--device cuda] [--beside 0 31] [--out FILE]` prints a table. The
shape is Qwen3-0.6B's, with `--layers` layers and random weights. Lengths are log-uniform from 10 to `--longest`. Arms:
"rest" lets the engine capture, between two prompts, what steps have missed, as its driver does when there is no work;
"busy" leaves no time for that. Each arm is an engine of its own, and every prompt comes once.
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
from ab_depth import QWEN3_06B

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore, build_core

EDGES = (10, 64, 256, 1024, 4096)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def submit(core: EngineCore, key: int, length: int, output: int) -> None:
    tokens = np.random.default_rng(key).integers(200, core.info.vocab_size, length).astype(np.int32)
    core.submit(Request(key, tokens, GREEDY, key, (), 0, length + output))


def ttft_ms(core: EngineCore, key: int, length: int) -> float:
    """From the request to its first token, the only one that it wants."""
    begin = time.perf_counter()
    submit(core, key, length, 1)
    while not any(key in step.keys for step in core.step()[1]):
        pass
    return (time.perf_counter() - begin) * 1e3


def arm(options: argparse.Namespace, folder: str, beside: int, rests: bool) -> dict[str, Any]:
    core = build_core(
        EngineConfig(
            model=folder, load_format="dummy", device=options.device, max_num_seqs=64, max_model_len=4096,
            enable_prefix_caching=False, kv_cache_memory_bytes=(32 << 30) if options.device == "cuda" else (1 << 30),
        )
    )  # fmt: skip
    lengths = np.exp(np.random.default_rng(1).uniform(np.log(10), np.log(options.longest), options.prompts)).astype(int)
    for row in range(beside):
        submit(core, row, 64, 4000)
    for _ in range(50):
        core.step()
    before, times = core.stats(), []
    for number, length in enumerate(lengths.tolist()):
        times.append((length, ttft_ms(core, beside + number, length)))
        for _ in range(20 if beside else 0):
            core.step()
        while not beside and (core.has_work() or (rests and core.rest())):
            core.step()
    after = core.stats()
    core.close()
    missed = after.graph_misses - before.graph_misses
    return {"beside": beside, "arm": "rest" if rests else "busy", "missed": missed, "ttft_ms": times}


def show(result: dict[str, Any]) -> None:
    cells = []
    for low, high in pairwise(EDGES):
        times = sorted(ms for length, ms in result["ttft_ms"] if low <= length < high)
        cells.append(f"{statistics.median(times):.1f} / {times[-1]:.1f}" if times else "-")
    print(f"| {result['beside']} | {result['arm']} | {result['missed']} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 31], help="rows that decode all the time")
    parser.add_argument("--layers", type=int, help="default: 2, on a GPU 28")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--longest", type=int, default=3900)
    parser.add_argument("--out", type=Path, help="all times as JSON")
    options = parser.parse_args()
    layers = options.layers or (28 if options.device == "cuda" else 2)
    print("| rows beside | arm | missed steps | " + " | ".join(f"{a} to {b}" for a, b in pairwise(EDGES)) + " |")
    print("|---:|---|---:|" + "---:|" * (len(EDGES) - 1))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B | {"num_hidden_layers": layers}))
        for beside in options.beside:
            for rests in (False, True) if not beside else (False,):
                found.append(arm(options, folder, beside, rests))
                show(found[-1])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
