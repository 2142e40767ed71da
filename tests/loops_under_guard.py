"""Puts every engine under no_race: each table, page, packet and outbox by its name.

`pytest --guard-races tests/loop tests/engine ...` does it for whole suites, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kernel_rows import state_rows

from gapless.guard.race import RaceChecker, no_race
from gapless.loop.loop import Loop

PLANTED = ("test_oracle_bites.py", "test_a_planted_fault", "tests/guard/")
"""Tests, by parts of their names, that plant races on purpose or run a checker of their own."""


class _Free(list[int]):
    """A free list that says what comes back to it."""

    def __init__(self, items: list[int], freed: Any) -> None:
        super().__init__(items)
        self._freed = freed

    def append(self, item: int) -> None:
        self._freed(item)
        super().append(item)


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
    executor = loop._launcher.executor
    program, buffers = executor._program, executor.buffers
    state_rows()
    checker.register(f"{prefix}tables", program.tables, "rows")
    checker.register(f"{prefix}kv", program.cache.data, "rows")
    checker.register(f"{prefix}words", executor._sent)
    checker.register(f"{prefix}logits", buffers.logits)
    checker.register(f"{prefix}tokens", buffers.tokens)
    if not loop._device.maps_host:
        checker.register(f"{prefix}lines", buffers.lines)
    checker.register(f"{prefix}packet", executor._packets)
    checker.register(f"{prefix}outbox", executor._outboxes)

    def page_freed(page: int) -> None:
        checker.freed(f"{prefix}kv", [page])

    def row_freed(row: int) -> None:
        for field in program.tables._fields:
            checker.freed(f"{prefix}tables.{field}", [row])

    loop.pool._free = _Free(loop.pool._free, page_freed)
    loop.pool._cached = _Cached(page_freed)
    loop.rows._free = _Free(loop.rows._free, row_freed)


@contextmanager
def loops_under_no_race() -> Iterator[RaceChecker]:
    """Every loop made inside is watched; a race fails the test."""
    made: list[Loop] = []
    plain = Loop.__init__

    def watched(loop: Loop, *args: Any, **kwargs: Any) -> None:
        plain(loop, *args, **kwargs)
        made.append(loop)
        # Stand-ins for a launcher have nothing to watch.
        if hasattr(loop._launcher, "executor"):
            watch(checker, loop, f"engine {len(made)} ")

    with no_race() as checker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "__init__", watched)
        yield checker
