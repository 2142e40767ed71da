"""Host time of one step: plan + pack + launch + observe + commit + retire, in steady decode, with a model that does
nothing. Steps are captured where the device can (`--no-graphs`: they are not). The figures of docs/evidence are of
`python benchmarks/host_step.py --chains --out docs/measurements/host-step.json`.

The figure is processor time of the loop's thread, so that the stream's thread and a busy machine are left out. The
last column but one leaves out what falling asleep on a fence and waking up cost, which is the operating system's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.engine import checkers
from gapless.kernels.layout import DRAFTED, LENGTH
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.lab import environment
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.memory.groups import PageGroup
from gapless.model.drafting.prompt_lookup import PromptLookup
from gapless.model.drafting.seam import Drafter
from gapless.model.seam import BatchShape, KVCache, StepInputs
from gapless.pace.draft_gate import Verify
from gapless.step.speculation import Speculation
from gapless.testing.loops import loop_of

VOCAB = 8
PROMPT = 16
WINDOW = 32
"""Steps in which every row begins two pages."""


class NullModel:
    """A model whose every token is 0."""

    vocab_size = VOCAB
    dtype = torch.float32
    max_model_len = 1 << 20
    bounded = False

    def groups(self) -> tuple[PageGroup, ...]:
        return (PageGroup(),)

    def page_bytes(self, page_size: int) -> int:
        return 2 * page_size

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        return KVCache.zeros(pages, 1, page_size, 1, 1, dtype=torch.uint8, device=device)

    def plan(self, shape: BatchShape) -> None:
        return None

    def forward(self, inputs: StepInputs, plan: Any, cache: KVCache) -> Tensor:
        return torch.zeros(inputs.ids.shape[0], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], VOCAB)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        out.zero_()


def request(key: int, length: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return Request(key, np.zeros(PROMPT, np.int32), params, 0, (), 0, length)


class WrongDrafts(NamedTuple):
    """A drafter whose drafts are always wrong: it drafts the tokens that a history has held since `steady_loop`
    began."""

    drafts: int

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        rows = rows.long()
        length = tables.state[:, LENGTH].index_select(0, rows)
        tables.state[:, DRAFTED].index_copy_(0, rows, length + self.drafts)


def steady_loop(
    rows: int, waiting: int, steps: int, depth: int | None, graphs: bool, chain: int | None = None, drafts: int = 0,
    drafter: Drafter | None = None,
) -> tuple[CpuDevice, Loop]:  # fmt: skip
    """A loop with `rows` requests in decode for at least `steps` more steps, and `waiting` in the queue. With `drafts`,
    each step has as many for each row, which are right unless another `drafter` has them."""
    length = PROMPT + (steps + 64) * (1 + drafts)
    pages = rows * -(-length // 16) + 1
    device = CpuDevice(threads=1)
    sizes = Sizes(rows, length, pages, 16, max(rows, 2048), queue=rows + waiting + 1)
    buckets = (rows,) if graphs else ()
    loop = loop_of(
        device, NullModel(), sizes, depth, prefix_caching=True, buckets=buckets, chain=chain,
        speculation=Speculation(drafts, drafter or PromptLookup(drafts, 1, 2), rows) if drafts else None,
    )  # fmt: skip
    if drafter is not None:
        loop.launcher.program.tables.history.fill_(1)
    loop.capture()
    for key in range(rows + waiting):
        loop.submit(request(key, length))
    while loop.planner.room.running < rows or loop.in_flight < (depth or 2) - 1:
        loop.turn()
    for _ in range(16):
        loop.turn()
    return device, loop


class WaitMeter:
    """Processor time of the calling thread inside a fence's wait: falling asleep and waking up, not sleeping."""

    def __init__(self, device: CpuDevice) -> None:
        self.spent_ns = 0
        self._fences: Any = type(device.compute.record())
        self._wait = self._fences.wait

    def __enter__(self) -> WaitMeter:
        meter = self

        def wait(fence: Any, *bell: Any) -> Any:
            begin = time.thread_time_ns()
            passed = meter._wait(fence, *bell)
            meter.spent_ns += time.thread_time_ns() - begin
            return passed

        self._fences.wait = wait
        return self

    def __exit__(self, *_: object) -> None:
        self._fences.wait = self._wait


class Measured(NamedTuple):
    """Host time of a step, microseconds. `awake` is the median without the wait call; `captured` a share of steps."""

    median: float
    mean: float
    p99: float
    awake: float
    captured: float


def measure(rows: int, waiting: int, steps: int, depth: int, graphs: bool) -> Measured:
    device, loop = steady_loop(rows, waiting, steps, depth, graphs)
    spent, awake = [], []
    captured = loop.counters.graph_steps
    with WaitMeter(device) as meter:
        for _ in range(steps):
            meter.spent_ns = 0
            begin = time.thread_time_ns()
            loop.turn()
            spent.append((time.thread_time_ns() - begin) / 1e3)
            awake.append(spent[-1] - meter.spent_ns / 1e3)
    captured = loop.counters.graph_steps - captured
    device.close()
    quantile = statistics.quantiles(spent, n=100)[98]
    return Measured(
        statistics.median(spent), statistics.fmean(spent), quantile, statistics.median(awake), captured / steps
    )


def window(loop: Loop) -> float:
    """Host time of a step over the next WINDOW steps, in microseconds."""
    first, begin = loop.counters.steps, time.thread_time_ns()
    while loop.counters.steps < first + WINDOW:
        assert loop.planner.has_work(), "the requests are too short for as many steps"
        loop.turn()
    return (time.thread_time_ns() - begin) / 1e3 / (loop.counters.steps - first)


def usual(windows: list[float]) -> float:
    """Return the 10th percentile: the other windows hold the other work of a shared machine."""
    return statistics.quantiles(windows, n=10)[0]


def chained(rows: int, steps: int, chain: int | None) -> tuple[float, float]:
    """Host time of a step at automatic depth with such chains, in microseconds, and steps of a visit."""
    device, loop = steady_loop(rows, 0, steps, None, True, chain)
    before, joined = loop.counters.steps, loop.counters.chained_steps
    windows = []
    while loop.counters.steps < before + steps - 150:
        windows.append(window(loop))
    done, joined = loop.counters.steps - before, loop.counters.chained_steps - joined
    device.close()
    return usual(windows), done / max(1, done - joined)


class Chains(NamedTuple):
    """Host time of a step with one step a visit and with automatic chains, microseconds; `visit` steps of a visit."""

    rows: int
    one: float
    auto: float
    ratio: float
    visit: float


def compare_chains(rows: int, steps: int) -> Chains:
    """Measure one step a visit beside automatic chains, A B A B; return medians of three pairs."""
    runs = [(chained(rows, steps, 1), chained(rows, steps, None)) for _ in range(3)]
    one, auto = (statistics.median(run[arm][0] for run in runs) for arm in (0, 1))
    ratio = statistics.median(run[1][0] / run[0][0] for run in runs)
    return Chains(rows, one, auto, ratio, statistics.median(run[1][1] for run in runs))


def print_chains(sizes: Sequence[int], steps: int, path: Path | None) -> None:
    """The table of chains, and its figures as JSON with the processor."""
    print("| rows | one a visit, us | auto, us | ratio | steps of a visit |")
    print("|---:|---:|---:|---:|---:|")
    found = []
    for rows in sizes:
        found.append(compare_chains(rows, steps))
        _, one, auto, ratio, visit = found[-1]
        print(f"| {rows} | {one:.0f} | {auto:.0f} | {ratio:.2f} | {visit:.1f} |", flush=True)
    if path:
        name = f"{environment.describe_host()['cpu']}, torch {torch.__version__}"
        rows = [one._asdict() for one in found]
        figures = {"date": f"{date.today()}", "processor": name, "steps": steps, "rows": rows}
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


@contextmanager
def deciding(loop: Loop, verify: Verify) -> Iterator[None]:
    """The loop's gate decides as always, and its steps do this."""
    gate = loop.launcher.gate
    assert gate is not None
    decide = gate.decide
    with mock.patch.object(gate, "decide", lambda decode: (decide(decode), verify)[1]):
        yield


def beside_drafts(rows: int, steps: int, drafts: int) -> list[float]:
    """Host times of a step, one step a visit, in microseconds: of an engine without speculation, of one that runs none
    of the drafts that its rows may have, of one whose drafts are all wrong and of one whose are all right. Windows of
    the four engines alternate."""
    arms = ((0, None), (drafts, None), (drafts, WrongDrafts(drafts)), (drafts, None))
    # A turn may run several steps, and a window some more than its own.
    engines = [steady_loop(rows, 0, 2 * steps, None, True, 1, most, drafter) for most, drafter in arms]
    loops = [loop for _, loop in engines]
    with deciding(loops[1], Verify(1, drafts=True)), deciding(loops[2], Verify(1 + drafts, drafts=True)):
        windows = [[window(loop) for loop in loops] for _ in range(steps // WINDOW)]
    for device, _ in engines:
        device.close()
    return [usual(list(times)) for times in zip(*windows, strict=True)]


def print_drafts(steps: int, drafts: int) -> None:
    """The table of steps with drafts beside those of an engine without, and beside steps that run none of theirs:
    medians of three rounds."""
    print(f"| rows | no speculation, us | no drafts | {drafts} wrong | {drafts} right | "
          "wrong beside none | right beside none | right beside no speculation |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for rows in (1, 4, 8):
        runs = [beside_drafts(rows, steps, drafts) for _ in range(3)]
        times = [statistics.median(run[arm] for run in runs) for arm in range(4)]
        more = [statistics.median(run[arm] - run[other] for run in runs) for arm, other in ((2, 1), (3, 1), (3, 0))]
        cells = [f"{value:.0f}" for value in times] + [f"{value:+.0f}" for value in more]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    checkers.connect()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--chains", action="store_true", help="one step a visit beside automatic chains, and no more")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256], help="of --chains")
    parser.add_argument("--drafts", type=int, help="steps with this number of drafts a row beside steps without")
    parser.add_argument("--out", type=Path, help="the figures of --chains as JSON")
    args = parser.parse_args()
    if args.out and not args.chains:
        parser.error("--out writes the figures of --chains: add --chains, or leave --out away")
    if args.chains:
        print_chains(args.rows, args.steps, args.out)
        return
    if args.drafts:
        print_drafts(args.steps, args.drafts)
        return
    print("| rows | waiting | median us | mean us | p99 us | median without the wait call | captured |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for rows, waiting in ((1, 0), (8, 0), (32, 0), (128, 0), (256, 0), (256, 100), (256, 1_000), (256, 10_000)):
        found = measure(rows, waiting, args.steps, args.depth, not args.no_graphs)
        times = " | ".join(f"{value:.0f}" for value in found[:4])
        print(f"| {rows} | {waiting:,} | {times} | {found.captured:.0%} |", flush=True)


if __name__ == "__main__":
    main()
