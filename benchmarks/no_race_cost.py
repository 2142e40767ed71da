"""What no_race costs: one operator of each kind, and a step of the checksum engine, off and on.

`python benchmarks/no_race_cost.py`. Processor time of the thread, the best of many short rounds: other work on the
machine is left out as far as that goes. "Empty" is a dispatch mode that does nothing, torch's own price for looking.
Where there is CUDA, the same operators on its tensors follow; what counts there too is the host's time.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine import checkers
from gapless.guard.race import RaceChecker, no_race
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

ROUNDS, CALLS = 300, 200
RUNS = 9
"""Of the engine."""
PARTS = 64
"""Views and indexes that take turns where a row says "another"."""


class Empty(TorchDispatchMode):
    """Passes every operator on."""

    count = 0


def _pass_on(self: Empty, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    Empty.count += 1
    return func(*args, **(kwargs or {}))


# As the checker does it: torch would wrap a method of the class body, which costs more.
Empty.__torch_dispatch__ = _pass_on


def best(call: Callable[[], Any], after: Callable[[], Any]) -> float:
    """Microseconds of one call; `after` each round is not counted."""
    spent = []
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        spent.append(time.thread_time_ns() - start)
        after()
    return min(spent) / CALLS / 1e3


def turns(parts: Iterable[Any]) -> Callable[[], Any]:
    """The next of them at each call."""
    return itertools.cycle(list(parts)).__next__


def operators(kind: str, after: Callable[[], Any] = lambda: None) -> None:
    """Each operator under each mode, on tensors of this device."""
    new = functools.partial(torch.zeros, device=kind)
    free, watched, other = new(64), new(64), new(64)
    pages, arena, rows = new(256, 64), new(PARTS, 64), new(8, 64)
    index, second = (torch.arange(first, first + 8, device=kind) for first in (0, 8))
    view = turns(arena)
    chosen = turns(torch.randperm(256, device=kind)[:8] for _ in range(PARTS))
    calls: dict[str, Callable[[], Any]] = {
        "no watched tensor: torch.add": lambda: torch.add(free, other),
        "a view: x[3:9]": lambda: watched[3:9],
        "a watched tensor: x.add_": lambda: watched.add_(other),
        "another view of it: v.add_": lambda: view().add_(other),
        "rows by index: index_select": lambda: pages.index_select(0, index),
        "another index: index_select": lambda: pages.index_select(0, chosen()),
        "rows by index: index_copy_": lambda: pages.index_copy_(0, index, rows),
        "rows by two indexes: x[i, j]": lambda: pages[index, second],
    }
    table: dict[str, list[float]] = {name: [] for name in calls}

    def measure() -> None:
        for name, call in calls.items():
            table[name].append(best(call, after))

    measure()
    with Empty():
        measure()
    with no_race("record") as checker:
        checker.register("watched", watched)
        checker.register("arena", arena)
        checker.register("pages", pages, "rows")
        measure()
    measure()
    with no_race("record", track="all"):
        measure()
    print(f"{kind + ', us a call':31s} off  off again   over that: empty     on  on, all tensors")
    for name, (off, empty, on, again, everything) in table.items():
        print(f"{name:30s} {off:4.2f}  {again:9.2f}  {empty - off:16.2f} {on - off:6.2f}  {everything - off:15.2f}")


def watch(checker: RaceChecker, loop: Loop) -> None:
    """Everything that the engine's streams and its host share."""
    executor = loop.launcher.executor
    checker.register("tables", executor.program.tables, "rows")
    checker.register("kv", executor.program.cache.data, "rows")
    checker.register("words", executor.sent)
    checker.register("lines", executor.buffers.lines)
    checker.register("packet", executor.packets)
    checker.register("outbox", executor.outboxes)


def one_run(rows: int, around: AbstractContextManager[Any]) -> tuple[int, int]:
    """Thread time in ns and steps of `rows` requests of 12 and 40 tokens."""
    device = SimDevice(seed=1, mood="eager")
    with around as checker:
        loop = build_loop(device, ChecksumModel(97, 64), Sizes(rows, 64, 64, 4, 64, queue=64), depth=4)
        if isinstance(around, no_race):
            watch(checker, loop)
        for key in range(rows):
            tokens = np.arange(12, dtype=np.int32) + key
            loop.submit(Request(key, tokens, SamplingParams(temperature=0.0), 0, (), 0, 52))
        start = time.thread_time_ns()
        while loop.has_work():
            loop.turn()
        spent = time.thread_time_ns() - start
        device.close()
    return spent, loop.counters.steps


def engine(rows: int) -> None:
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "off": nullcontext, "empty": Empty, "on": lambda: no_race("record"),
    }  # fmt: skip
    spent = {name: min(one_run(rows, make())[0] for _ in range(RUNS)) for name, make in kinds.items()}
    Empty.count = 0
    _, steps = one_run(rows, Empty())
    ops = Empty.count
    on, empty = ((spent[name] - spent["off"]) / ops / 1e3 for name in ("on", "empty"))
    off_ms, on_ms = (spent[name] / steps / 1e6 for name in ("off", "on"))
    print(
        f"engine, {rows} rows: {ops / steps:.0f} operators a step; {off_ms:.2f} ms a step off, {on_ms:.2f} ms on; "
        f"{on:.1f} us an operator, of which {empty:.1f} us are the empty mode"
    )


if __name__ == "__main__":
    checkers.connect()
    torch.set_num_threads(1)
    with torch.inference_mode():
        operators("cpu")
        if torch.cuda.is_available():
            operators("cuda", torch.cuda.synchronize)
    for rows in (1, 4):
        engine(rows)
