"""What one row of a batch asks for, and what the others pay: tokens a second with it beside the same batch without it.

`PYTHONPATH=.:benchmarks python benchmarks/lanes.py [--device cuda] [--only batch,vocab] [--out FILE]` prints one short
table a part: what is asked on the host comes first, batches last. Arms alternate in one process. Models: the demo
model, and a dummy of Qwen3-0.6B's shape with `--layers` layers (all 28 on a GPU).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import host_step
import numpy as np
import torch
from ab_depth import QWEN3_06B
from host_step import NullModel

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine import checkers
from gapless.engine.core import EngineCore, build_core
from gapless.lab import environment
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.testing.sim import SimDevice

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
    steps = after.steps - before.steps
    replays, missed = after.graph_steps - before.graph_steps, after.graph_misses - before.graph_misses
    return Run(count / seconds, seconds / steps * 1e6, replays / steps, missed)


def beside(core: EngineCore, rows: int, options: argparse.Namespace, asks: str) -> dict[str, Any]:
    """A B A B: the batch without and with a row that asks, after a run of each that captures what it needs."""
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


def batches(options: argparse.Namespace, rows: list[int], asks: list[str], model: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        core = engine(model, options, Path(folder))
        for count in rows:
            for what in asks:
                yield {"model": model, **beside(core, count, options, what)}
        core.close()


def batch_table(options: argparse.Namespace, found: list[Any]) -> None:
    """Rows of a batch, what one of them asks for, and the ratio of tokens a second."""
    print("| model | rows | one row asks for | tokens/s without | with | ratio | replays | missed |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for model in options.models:
        for line in batches(options, options.rows, list(options.asks), model):
            found.append(line)
            alone, asked = line["without"], line["with"]
            low, high = line["range"]
            print(
                f"| {model} | {line['rows']} | {line['asks']} | {alone['tokens_per_s']:,.0f} "
                f"| {asked['tokens_per_s']:,.0f} | {line['ratio']:.2f} [{low:.2f}..{high:.2f}] "
                f"| {asked['replays']:.0%} | {asked['missed']:.0f} |",
                flush=True,
            )


def vocab_table(options: argparse.Namespace, found: list[Any]) -> None:
    """16 rows over a vocabulary of 152k, one with top-p alone: time of a step."""
    print("| rows, vocabulary | all greedy, ms a step | one row with top-p alone | ratio |\n|---|---:|---:|---:|")
    for line in batches(options, [16], ["top-p alone"], "qwen"):
        found.append(line)
        alone, asked = line["without"]["step_us"] / 1e3, line["with"]["step_us"] / 1e3
        low, high = (1 / ratio for ratio in line["range"][::-1])
        print(f"| 16, 152k | {alone:.1f} | {asked:.1f} | {1 / line['ratio']:.2f} [{low:.2f}..{high:.2f}] |", flush=True)


def null_loop(sizes: Sizes, depth: int | None, **options: Any) -> Loop:
    """A loop over a model that does nothing, on a device that runs everything at once."""
    return build_loop(SimDevice(0, "eager"), NullModel(), sizes, depth, buckets=(), **options)


def ask(loop: Loop, key: int, tokens: Any, output: int, priority: int = 0) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    loop.submit(Request(key, tokens, params, 0, (), 0, len(tokens) + output, priority))


def plan_table(options: argparse.Namespace, found: list[Any]) -> None:
    """plan() while 12 requests wait that share a cached prefix and do not fit, beside 128 rows that decode."""
    print("| cached prefix, tokens | plan(), 128 rows, empty queue, us | 12 wait | p95 |\n|---:|---:|---:|---:|")
    for prefix in (2_000, 16_000, 100_000):
        spent = {waiting: planning(prefix, waiting) for waiting in (0, 12)}
        middle = {waiting: statistics.median(times) for waiting, times in spent.items()}
        p95 = statistics.quantiles(spent[12], n=20)[-1]
        found.append({"prefix": prefix, "alone_us": middle[0], "waiting_us": middle[12], "p95_us": p95})
        print(f"| {prefix:,} | {middle[0]:.0f} | {middle[12]:.0f} | {p95:.0f} |", flush=True)


def planning(prefix: int, waiting: int, runners: int = 128, steps: int = 200) -> list[float]:
    """Microseconds of each plan(), processor time, so that a busy machine is left out."""
    pages = prefix // 16 + 300 + 20 * runners
    loop = null_loop(Sizes(256, 140_000, pages, 16, 8192, queue=1_000), 1)
    base = np.arange(prefix, dtype=np.int32) % host_step.VOCAB
    ask(loop, 0, base, 3000)
    while loop.planner.room.running < 1 or loop.generation_tokens < 2:
        loop.turn()
    for key in range(1, runners):
        ask(loop, key, np.full(16 + key % 16, key % host_step.VOCAB, np.int32), 3000)
    while loop.generation_tokens < 4 * runners:
        loop.turn()
    # More pages than are free, beside those that are cached.
    further = min(16 * (loop.pool.available() + 5), 139_000 - prefix)
    for key in range(1_000, 1_000 + waiting):
        ask(loop, key, np.concatenate([base, np.full(further, key % host_step.VOCAB, np.int32)]), 800)
    spent: list[float] = []
    plan: Callable[..., Any] = loop.planner.plan

    def timed(*args: Any) -> Any:
        begin = time.thread_time_ns()
        planned = plan(*args)
        spent.append((time.thread_time_ns() - begin) / 1e3)
        return planned

    loop.planner.plan = timed  # type: ignore[method-assign]
    for _ in range(steps + 8):
        loop.turn()
    assert len(loop.planner.waiting) == waiting, "the waiting requests were meant not to fit"
    return spent[8:]


def share_table(options: argparse.Namespace, found: list[Any]) -> None:
    """n=16 of one prompt: prompt tokens that were computed."""
    print("| n=16 of 512 tokens, budget | depth 1 | depth 2 | depth 8 | of |\n|---:|---:|---:|---:|---:|")
    for budget in (1024, 8192):
        computed = []
        for depth in (1, 2, 8):
            loop = null_loop(Sizes(32, 700, 32 * 44, 16, budget, 64), depth)
            prompt = np.arange(512, dtype=np.int32) % host_step.VOCAB
            for key in range(16):
                ask(loop, key, prompt, 4)
            while loop.has_work():
                loop.turn()
            computed.append(loop.counters.prompt_tokens)
        found.append({"budget": budget, "computed": computed})
        print(f"| {budget:,} | {computed[0]:,} | {computed[1]:,} | {computed[2]:,} | {16 * 512:,} |", flush=True)


def line_table(options: argparse.Namespace, found: list[Any]) -> None:
    """A prompt of 20 tokens comes one step after one of 131,072: steps until its first token."""
    print("| token budget | steps to the first token | with a better priority |\n|---:|---:|---:|")
    for budget in (1024, 8192):
        steps = []
        for by_priority in (False, True):
            loop = null_loop(Sizes(64, 140_000, 9_200, 16, budget, 64), 1, by_priority=by_priority)
            ask(loop, 0, np.zeros(131_072, np.int32), 10, priority=5)
            loop.turn()
            came = loop.counters.steps
            ask(loop, 1, np.ones(20, np.int32), 10, priority=-5)
            while not any(1 in step.keys for step in loop.turn().tokens):
                pass
            steps.append(loop.counters.steps - came)
        found.append({"budget": budget, "steps": steps})
        print(f"| {budget:,} | {steps[0]} | {steps[1]} |", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace, list[Any]], None]] = {
    "plan": plan_table, "share": share_table, "line": line_table,
    "vocab": vocab_table, "batch": batch_table,
}  # fmt: skip


def processor(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{environment.describe_host()['cpu']}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    checkers.connect()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--models", nargs="+", choices=("demo", "qwen"), help="of the batches; default: by device")
    parser.add_argument("--rows", type=int, nargs="+", help="of the batches; default: 32, on a GPU 8 32 256")
    parser.add_argument("--asks", nargs="+", choices=tuple(ASKS), default=tuple(ASKS))
    parser.add_argument("--layers", type=int, help="of Qwen3-0.6B's shape; default: 2, on a GPU 28")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="of the host's part")
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.models = options.models or (["qwen"] if on_gpu else ["demo"])
    options.rows = options.rows or ([8, 32, 256] if on_gpu else [32])
    options.layers = options.layers or (28 if on_gpu else 2)
    name, found = processor(options.device), {}
    for part in options.only.split(","):
        print(f"\n{name}: {PARTS[part].__doc__}\n")
        PARTS[part](options, found.setdefault(part, []))
    if options.out:
        options.out.write_text(json.dumps({"processor": name, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
