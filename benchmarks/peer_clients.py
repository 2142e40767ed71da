"""A load played by several client processes at once, for servers that are faster than one client."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Self

from gapless.lab.bench import raised_priority
from gapless.lab.datasets import Prompt
from gapless.lab.http import with_client
from gapless.lab.load import run_load
from gapless.lab.records import ClientUse, LoadRun, Sample
from gapless.lab.target import Target

TOGETHER_SECONDS = 0.5
"""Every process has its share of a load within this time, and all begin at the end of it."""
START_SECONDS = 120.0
"""The longest start of the processes, all of which import gapless at once."""


class LoadClients:
    """Plays loads in this process, or in several that are up once it is made. A context manager, which ends them."""

    def __init__(self, processes: int, priority: str) -> None:
        self._processes = processes
        self._priority = priority
        self._pool = _started(processes) if processes > 1 else None

    def play(self, target: Target, prompts: Sequence[Prompt], times: Sequence[float], limit: int | None) -> LoadRun:
        """Prompts leave at `times`, in seconds from the start; at most `limit` are under way, None for any number.

        Raises RuntimeError when a process gets its share too late to begin together with the others.
        """
        count = min(self._processes, len(prompts), limit or len(prompts))
        if self._pool is None or count == 1:
            return _play(target, prompts, times, limit, None, self._priority)
        begin = time.monotonic() + TOGETHER_SECONDS
        shares = [limit and limit // count + (k < limit % count) for k in range(count)]
        parts = [
            self._pool.submit(_play, target, prompts[k::count], times[k::count], share, begin, self._priority)
            for k, share in enumerate(shares)
        ]
        return merged([part.result() for part in parts])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _started(processes: int) -> ProcessPoolExecutor:
    """Start the processes. A pool starts one for each task that finds none free, and here each waits for all others."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _meet, (context.Barrier(processes),))
    for task in [pool.submit(time.monotonic) for _ in range(processes)]:
        task.result()
    return pool


def _meet(others: Barrier) -> None:
    """Begin a process, which has imported this module by now."""
    others.wait(START_SECONDS)


def merged(runs: Sequence[LoadRun]) -> LoadRun:
    """Runs of several processes as one. The client's use is that of the busiest process."""
    began = min(run.began for run in runs)
    samples = sorted((sample.later(run.began - began) for run in runs for sample in run.samples), key=_place)
    duration = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    busiest = max(runs, key=lambda run: run.client.cpu).client
    late = tuple(seconds for run in runs for seconds in run.client.late)
    return LoadRun(tuple(samples), duration, ClientUse(busiest.cpu, busiest.wall, late), began)


def _play(
    target: Target, prompts: Sequence[Prompt], times: Sequence[float], limit: int | None, at: float | None,
    priority: str,
) -> LoadRun:  # fmt: skip
    """Play a load now, or `at` a moment to come of the monotonic clock."""
    if at is not None:
        early = at - time.monotonic()
        if early < 0:
            raise RuntimeError(
                f"a client process got its load {-early:.2f} s after the others began: let other work on this machine "
                "end, or use fewer --clients"
            )
        time.sleep(early)
    with raised_priority(priority):
        load = partial(run_load, prompts=prompts, times=times, concurrency=limit)
        return asyncio.run(with_client(target, load))


def _place(sample: Sample) -> int:
    return sample.place
