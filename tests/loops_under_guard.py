"""Puts engines under no_race: each table, page, packet and outbox by its name, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from kernel_rows import state_rows
from tapes_under_no_race import reports
from tiers_under_no_race import FreeList, tiers_stated, watch_transfers

from gapless.base import observe
from gapless.base.params import SLOT_LANE
from gapless.guard.race import RaceChecker, no_race
from gapless.kernels.tables import Adjustments
from gapless.loop.loop import Loop
from gapless.offload.transfers import Transfers
from gapless.step.executor import Executor
from gapless.testing.world import World


class _Cached(dict[int, None]):
    """Cached pages, which a new owner may take: to enter here is to be free."""

    def __init__(self, freed: Any) -> None:
        super().__init__()
        self._freed = freed

    def __setitem__(self, page: int, value: None) -> None:
        self._freed(page)
        super().__setitem__(page, value)


def watch(checker: RaceChecker, loop: Loop, prefix: str = "") -> None:
    """Register all that the streams and the host of this engine share. A freed page or row counts as written."""
    watch_executor(checker, loop.launcher.executor, prefix)
    watch_free(checker, loop, prefix)
    if loop.parts.transfers is not None:
        watch_transfers(checker, loop.parts.transfers, prefix)


def watch_executor(checker: RaceChecker, executor: Executor, prefix: str) -> None:
    """One device's memory, and its rings."""
    program, buffers = executor.program, executor.buffers
    state_rows()
    checker.register(f"{prefix}tables", program.tables, "rows")
    slots = program.adjustments
    checker.register(f"{prefix}slots", slots._replace(adjusted=slots.adjusted.flatten(0, 1)), "rows")
    for group, memory in enumerate((program.cache.data, *program.cache.others)):
        checker.register(f"{prefix}kv{group or ''}", memory, "rows")
    checker.register(f"{prefix}words", buffers.sent)
    if program.samples_here:
        checker.register(f"{prefix}logits", buffers.logits)
    checker.register(f"{prefix}tokens", buffers.tokens)
    if not executor.device.caps.maps_host:
        checker.register(f"{prefix}lines", buffers.lines)
    checker.register(f"{prefix}packet", executor.packets)
    checker.register(f"{prefix}outbox", executor.outboxes)


def watch_free(checker: RaceChecker, loop: Loop, prefix: str) -> list[str]:
    """Watch pages and rows that come back; return the engines whose pages these are, to which ranks may be added."""
    ranks = [prefix]

    def row_freed(row: int) -> None:
        for field in loop.launcher.executor.program.tables._fields:
            checker.freed(f"{prefix}tables.{field}", [row])

    def slot_freed(slot: int) -> None:
        places, count, _ = loop.launcher.executor.program.adjustments.adjusted.shape
        for field in Adjustments._fields:
            rows = [place * count + slot for place in range(places if field == "adjusted" else 1)]
            checker.freed(f"{prefix}slots.{field}", rows)

    slots = loop.rows.slots[SLOT_LANE]
    slots.unused = FreeList(slots.unused, slot_freed)
    for group, pool in enumerate(loop.pools):
        freed = partial(_page_freed, checker, ranks, f"kv{group or ''}")
        pool.free = FreeList(pool.free, freed)
        pool.cached = _Cached(freed)
    loop.rows.free = FreeList(loop.rows.free, row_freed)
    return ranks


def _page_freed(checker: RaceChecker, ranks: list[str], memory: str, page: int) -> None:
    for prefix in ranks:
        checker.freed(f"{prefix}{memory}", [page])


@contextmanager
def loops_under_no_race(mode: Literal["raise", "record"] = "raise") -> Iterator[RaceChecker]:
    """Every loop made inside is watched, and every executor that follows one; a race fails the test."""
    executors: list[Executor] = []
    ranks: list[list[str]] = []

    def heard(part: Any) -> None:
        match part:
            case Executor():
                executors.append(part)
                watch_executor(checker, part, f"engine {len(executors)} ")
            case Transfers():
                watch_transfers(checker, part, f"engine {len(executors)} ")
            case Loop() if hasattr(part.launcher, "executor"):  # stand-ins for a launcher have nothing to watch
                ranks.append(watch_free(checker, part, f"engine {1 + executors.index(part.launcher.executor)} "))
            case World():  # the leader's host alone gives back the pages of all its ranks
                ranks[-1] += [f"engine {1 + executors.index(executor)} " for executor in part.executors]
            case _:
                reports(part)

    with no_race(mode) as checker, observe.listening(heard), tiers_stated(checker):
        yield checker
