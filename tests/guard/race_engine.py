"""Puts a whole engine under `no_race`: every table, page, packet and outbox by its name."""

from __future__ import annotations

from gapless.guard.race_checker import RaceChecker
from gapless.loop.loop import Loop


class _Free(list):
    """A free list that says what comes back to it."""

    def __init__(self, items, freed) -> None:
        super().__init__(items)
        self._freed = freed

    def append(self, item) -> None:
        self._freed(item)
        super().append(item)


class _Cached(dict):
    def __init__(self, freed) -> None:
        super().__init__()
        self._freed = freed

    def __setitem__(self, page, value) -> None:
        self._freed(page)
        super().__setitem__(page, value)


def watch(checker: RaceChecker, loop: Loop) -> None:
    """Register all that the streams and the host of this engine share. A freed page or row counts as written."""
    launcher = loop._launcher
    program = launcher._program
    checker.register("tables", program.tables, "rows")
    checker.register("kv", program.cache.data, "rows")
    checker.register("words", launcher._words)
    checker.register("lines", launcher._lines)
    checker.register("packet", launcher._packets)
    checker.register("outbox", launcher._outboxes)

    def page_freed(page: int) -> None:
        checker.freed("kv", [page])

    def row_freed(row: int) -> None:
        for field in program.tables._fields:
            checker.freed(f"tables.{field}", [row])

    loop.pool._free = _Free(loop.pool._free, page_freed)
    loop.pool._cached = _Cached(page_freed)
    loop.rows._free = _Free(loop.rows._free, row_freed)
