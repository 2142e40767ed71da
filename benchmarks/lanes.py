"""What one row of a batch asks for, and what the others pay: tokens a second with it beside the same batch without it.

`PYTHONPATH=.:benchmarks python benchmarks/lanes.py [--device cuda] [--out FILE]` prints a table. Arms alternate in one
process. Models: the demo model, and a dummy of Qwen3-0.6B's shape with `--layers` layers (all 28 on a GPU).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from shapes import QWEN3_06B

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine import checkers
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core
from gapless.lab import environment

STOP_IDS = tuple(range(100, 132))
ASKS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 5},
    "temperature": {"temperature": 1.0},
    "top-p alone": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.5},
    "penalties, bias and bad words": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "logit_bias": {300 + i: -1.0 for i in range(100)},
        "bad_words": ["as BAD_WORDS"],
    },
    "penalties and top-p": {"repetition_penalty": 1.1, "temperature": 1.0, "top_p": 0.9},
    "min_tokens": {"min_tokens": 1},
    "stop ids": {},
}
"""What one row asks for beside greedy neighbours. The last two also bring stop ids."""
BAD_WORDS = tuple((token, token + 1) for token in range(200, 240))


class Run(NamedTuple):
    """One batch from the moment in which every row decodes. `replays` is the share of steps that were."""

    tokens_per_s: float
    step_us: float
    replays: float
    missed: int


def drive(core: EngineCore, rows: int, prompt: int, output: int, asks: str | None, seed: int) -> Run:
    """`rows` greedy requests of the same length at once; the first of them asks for what `asks` names."""
    random = np.random.default_rng(seed)
    for key in range(rows):
        tokens = random.integers(200, core.info.vocab_size, prompt).astype(np.int32)
        wanted = asks is not None and key == 0
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **(ASKS[asks] if asks and wanted else {})})
        stops = STOP_IDS if wanted and asks in ("min_tokens", "stop ids") else ()
        # Stop ids are banned for as long as the row lives.
        least = prompt + output if params.min_tokens else 0
        words = BAD_WORDS if params.bad_words else ()
        core.submit(Request(key, tokens, params, key, stops, least, prompt + output, bad_words=words))
    count = 0
    while count < 2 * rows:
        count += sum(len(step.keys) for step in core.step()[1])
    before, begin, count = core.stats(), time.perf_counter(), 0
    while core.has_work():
        count += sum(len(step.keys) for step in core.step()[1])
    seconds, after = time.perf_counter() - begin, core.stats()
    steps = after.steps.steps - before.steps.steps
    replays, missed = (
        after.steps.graph_steps - before.steps.graph_steps,
        after.steps.graph_misses - before.steps.graph_misses,
    )
    return Run(count / seconds, seconds / steps * 1e6, replays / steps, missed)


def beside(core: EngineCore, rows: int, options: argparse.Namespace, asks: str) -> dict[str, Any]:
    """Measure the batch without and with a row that asks, A B A B, after a run of each that captures their graphs."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(-1, options.rounds):
        for arm, what in enumerate((None, asks)):
            run = drive(core, rows, options.prompt, options.output, what, turn + 1)
            if turn >= 0:
                runs[arm].append(run)
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(*runs, strict=True)]
    return {
        "rows": rows,
        "asks": asks,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "without": Run(*map(statistics.median, zip(*runs[0], strict=True)))._asdict(),
        "with": Run(*map(statistics.median, zip(*runs[1], strict=True)))._asdict(),
    }


def engine(model: str, options: argparse.Namespace, folder: Path) -> EngineCore:
    """The demo model, or Qwen3-0.6B's shape with as many layers as were asked for."""
    rows = max(options.rows)
    config: dict[str, Any] = {
        "device": options.device, "max_num_seqs": rows, "enable_prefix_caching": False, "depth": options.depth,
        "max_model_len": options.prompt + options.output, "max_num_batched_tokens": max(rows, 2048),
        "kv_cache_memory_bytes": (16 << 30) if options.device == "cuda" else (1 << 30),
    }  # fmt: skip
    if model == "demo":
        return build_core(EngineConfig(model="demo", **config))
    (folder / "config.json").write_text(json.dumps(QWEN3_06B | {"num_hidden_layers": options.layers}))
    return build_core(EngineConfig(model=str(folder), load_format="dummy", **config))


def batches(options: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        core = engine(model, options, Path(folder))
        for count in options.rows:
            for what in options.asks:
                yield {"model": model, **beside(core, count, options, what)}
        core.close()


def batch_table(options: argparse.Namespace, found: list[Any]) -> None:
    """Rows of a batch, what one of them asks for, and the ratio of tokens a second."""
    print("| model | rows | one row asks for | tokens/s without | with | ratio | replays | missed |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for model in options.models:
        for line in batches(options, model):
            found.append(line)
            alone, asked = line["without"], line["with"]
            low, high = line["range"]
            print(
                f"| {model} | {line['rows']} | {line['asks']} | {alone['tokens_per_s']:,.0f} "
                f"| {asked['tokens_per_s']:,.0f} | {line['ratio']:.2f} [{low:.2f}..{high:.2f}] "
                f"| {asked['replays']:.0%} | {asked['missed']:.0f} |",
                flush=True,
            )


def processor(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{environment.describe_host()['cpu']}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    checkers.connect()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", choices=("demo", "qwen"), help="of the batches; default: by device")
    parser.add_argument("--rows", type=int, nargs="+", help="of the batches; default: 32, on a GPU 8 32 256")
    parser.add_argument("--asks", nargs="+", choices=tuple(ASKS), default=tuple(ASKS))
    parser.add_argument("--layers", type=int, help="of Qwen3-0.6B's shape; default: 2, on a GPU 28")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.models = options.models or (["qwen"] if on_gpu else ["demo"])
    options.rows = options.rows or ([8, 32, 256] if on_gpu else [32])
    options.layers = options.layers or (28 if on_gpu else 2)
    name, found = processor(options.device), list[Any]()
    print(f"\n{name}: {batch_table.__doc__}\n")
    batch_table(options, found)
    if options.out:
        options.out.write_text(json.dumps({"processor": name, "batch": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
