"""Depth auto beside depth 1 on a GPU, both with captured steps, in turn in one process.

`PYTHONPATH=.:benchmarks python benchmarks/gpu_all.py [--out DIR]` prints a table, and with `--out` writes gpu_all.json
there. The model has Qwen3-0.6B's shape and random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
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
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core


class Load(NamedTuple):
    """`rows` requests at once, of `prompt` tokens in and `output` out; `requests` in all, one coming as one ends."""

    rows: int
    prompt: int
    output: int
    requests: int = 0
    mixed: bool = False
    """True if both lengths are drawn from half to one and a half of their values, so that requests do not end
    together."""

    def __str__(self) -> str:
        more = f" of {self.requests}" if self.requests else ""
        return f"{self.rows}{more} x {self.prompt} in/{self.output} out{', mixed' if self.mixed else ''}"

    def lengths(self, random: np.random.Generator) -> tuple[int, int]:
        share = random.uniform(0.5, 1.5, 2) if self.mixed else np.ones(2)
        return int(self.prompt * share[0]), int(self.output * share[1])


class Result(NamedTuple):
    """One run of a load. Times of a step are medians over the steps in which all rows decode."""

    tokens_per_s: float
    step_us: float
    """Time from one step's end on the device to the next one's."""
    device_us: float
    host_us: float
    idle: float
    """Share of the whole time in which the device was idle, by the engine's timeline."""
    causes: dict[str, float]
    """Shares of it by cause, largest first"""
    graphs: float
    """Share of all steps that were replays."""
    captures_ms: list[float]
    """Graphs captured meanwhile, which the load waited for"""


def drive(core: EngineCore, load: Load, seed: int) -> Result:
    """Run a load to its end, and return its figures."""
    random = np.random.default_rng(seed)

    def submit(key: int) -> None:
        prompt, output = load.lengths(random)
        tokens = random.integers(5, core.info.vocab_size, prompt).astype(np.int32)
        core.submit(Request(key, tokens, SamplingParams(temperature=0.0), 0, (), 0, prompt + output))

    for key in range(load.rows):
        submit(key)
    sent = load.rows
    before = core.stats()
    captures = timed_captures(core)
    begin, count = time.perf_counter(), 0
    while core.has_work():
        for step in core.step()[1]:
            count += len(step.keys)
            for _ in range(min(int(np.count_nonzero(step.flags)), load.requests - sent)):
                submit(sent)
                sent += 1
    seconds = time.perf_counter() - begin
    after = core.stats()
    full = [r for r in core.loop.records if r.decode_rows == load.rows and not r.chunk_tokens][2:-2]
    wall = after.device.wall_ns - before.device.wall_ns
    idle = {cause: (ns - before.device.idle_ns[cause]) / wall for cause, ns in after.device.idle_ns.items()}
    return Result(
        tokens_per_s=count / seconds,
        step_us=(full[-1].device_end - full[0].device_end) / (len(full) - 1) / 1e3,
        device_us=statistics.median(r.device_ns for r in full) / 1e3,
        host_us=statistics.median(r.host_ns for r in full) / 1e3,
        idle=sum(idle.values()),
        causes=dict(sorted(idle.items(), key=lambda cause: -cause[1])),
        graphs=(after.steps.graph_steps - before.steps.graph_steps) / (after.steps.steps - before.steps.steps),
        captures_ms=captures,
    )


def timed_captures(core: EngineCore) -> list[float]:
    """Return a list to which each later capture adds its milliseconds."""
    took, device = [], core.loop.device
    capture = type(device).capture

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return capture(device, *args)
        finally:
            took.append((time.perf_counter() - begin) * 1e3)

    device.capture = timed
    return took


def bandwidth() -> float:
    """Return the bytes a second of a copy of 4 GiB, bytes read and written counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(seconds)


def engine(directory: Path, **options: Any) -> EngineCore:
    (directory / "config.json").write_text(json.dumps(QWEN3_06B))
    return build_core(
        EngineConfig(
            model=str(directory), load_format="dummy", device="cuda", kv_cache_memory_bytes=24 << 30, **options
        )
    )


def engines() -> Iterator[str]:
    """Yield the lines of the table."""
    speed = bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        captured = engine(Path(folder), enable_prefix_caching=False)
        ready = time.perf_counter() - begin
        reference = engine(Path(folder), enable_prefix_caching=False, depth="1")
        weights = 2 * captured.info.parameters
        floor = weights / speed * 1e6
        yield f"copy {speed / 1e12:.2f} TB/s, weights {weights / 1e9:.2f} GB: floor {floor:.0f} us a step"
        yield f"start {ready:.1f} s: {dict(captured.info.startup_seconds)}"
        memory = torch.cuda.max_memory_allocated() / 2**30
        yield f"graphs {len(captured.loop.launcher.graphs)}, peak memory of both engines {memory:.1f} GiB"
        heads = ("tok/s", "step us", "device", "host us", "idle %", "graphs")
        yield f"{'load':>28} {'arm':>14} " + " ".join(f"{head:>8}" for head in heads)
        for load in LOADS:
            name = str(load)
            ratios = []
            for turn in range(-1, 3):
                for arm, core in (("depth auto", captured), ("depth 1", reference)):
                    core.loop.log.forget()
                    got = drive(core, load, seed=turn + 1)
                    if turn < 0:
                        continue  # compiles and captures what this load needs
                    ratios.append(got.tokens_per_s)
                    yield (
                        f"{name:>28} {arm:>14} {got.tokens_per_s:8.0f} {got.step_us:8.0f} {got.device_us:8.0f} "
                        f"{got.host_us:8.0f} {100 * got.idle:8.2f} {got.graphs:8.2f}"
                    )
                    ALL.append({"load": load._asdict(), "arm": arm, **got._asdict(), "floor_us": floor})
                    if load.requests:
                        yield f"{'':>28} {'':>14} " + arrivals(got)
            pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(ratios[::2], ratios[1::2], strict=True))
            yield f"{name:>28} {'ratio':>14} {pairs}"
        for core in (captured, reference):
            core.close()


def arrivals(got: Result) -> str:
    """Return the idle time by cause and the captures as text."""
    idle = ", ".join(f"{cause} {100 * share:.2f} %" for cause, share in got.causes.items() if share > 5e-5)
    times = f", {min(got.captures_ms):.0f} to {max(got.captures_ms):.0f} ms" if got.captures_ms else ""
    return f"idle: {idle}; {len(got.captures_ms)} captures{times}"


LOADS = (
    Load(1, 128, 512), Load(32, 256, 1024), Load(256, 64, 256), Load(32, 128, 128, 256),
    Load(32, 128, 128, 512, mixed=True),
)  # fmt: skip
ALL: list[dict[str, Any]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="one small load of the demo model on a CPU, and no more")
    options = parser.parse_args()
    if options.cpu:
        core = build_core(EngineConfig(model="demo", device="cpu", kv_cache_memory_bytes=64 << 20))
        print(drive(core, Load(2, 16, 24), seed=0))
        core.close()
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here: nothing was run")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for line in engines():
        print(line, flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_all.json").write_text(json.dumps(ALL, indent=1))


if __name__ == "__main__":
    main()
