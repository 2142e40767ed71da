"""Puts engines under no_race: each table, page, packet and outbox by its name, on every device.

`pytest --guard-races every` does it for all that it runs. With `--guard-races chosen`, which `make test` says, tests of
whole engines, which share those of their file, run once, under it, as do the loop's tests; its oracles of many seeds
and a share of the simulator's seeds run again under it, with fewer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import pytest
from kernel_rows import state_rows
from tapes_under_no_race import tapes_report
from tiers_under_no_race import FreeList, tiers_stated, watch_transfers

from gapless.base.params import Lane
from gapless.guard.race import RaceChecker, no_race
from gapless.kernels.tables import Adjustments
from gapless.loop.loop import Loop
from gapless.step.executor import Executor
from gapless.step.transfers import Transfers

PLANTED = ("test_oracle_bites.py", "test_a_planted_fault", "tests/guard/")
"""Tests, by parts of their names, that plant races on purpose or run a checker of their own."""
RACED = (
    "_oracle.py::", "/test_loop_groups.py::", "/test_host_tier.py::", "/test_lower_tiers.py::",
    "/test_peer_engines.py::", "::test_no_seed_of_the_simulator_fails",
)  # fmt: skip
"""Tests of the loop that run under no_race, by parts of their names: those with random mixtures of all that a step may
do, with several page groups, and with tiers."""
UNRACED = (*PLANTED, "_noticed", "_an_error_in_the_launch_of_a_transfer_", "_is_unmapped_when_it_has_gone_")
"""Tests among them that do not, by parts of their names: their loops are broken on purpose, or they look for memory
that is kept, as no_race keeps what it watches."""
ENGINES = "tests/engine/"
"""The tests of whole engines, which run once, under no_race and no_sync together."""
BUILD_THEIR_OWN = "tests/engine/recorded/"
"""Those of them that each build engines; the others share engines within their file."""
EXACT = "::test_the_exact_model_says_what_it_said"
"""A test of recorded answers that runs without no_race: its steps are those of the demo model, and it takes long."""
ENOUGH = {"seed": 1, "batch": 1, "share": 1, "mood": 1}
"""How many values are raced of a parameter that only draws other numbers, or moves streams in another order."""


def is_raced_again(item: pytest.Function) -> bool:
    """Whether a test runs again under no_race, with fewer seeds than without it: it asks whether it is raced."""
    return is_raced_too(item.nodeid) and "raced" in inspect.signature(item.function).parameters


def is_raced_too(nodeid: str) -> bool:
    """Whether a test function is among those of the loop that run under no_race."""
    return (
        any(part in nodeid for part in RACED) and not any(part in nodeid for part in UNRACED) and ENGINES not in nodeid
    )


def is_raced_once(nodeid: str) -> bool:
    """Whether a test is among those that run once, and under no_race."""
    return nodeid.startswith(ENGINES) and EXACT not in nodeid


def shares_engines(nodeid: str) -> bool:
    """Whether the tests of a file share engines, so that all of the file runs under no_race."""
    return nodeid.startswith(ENGINES) and not nodeid.startswith(BUILD_THEIR_OWN)


def covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """All tests, but of the raced ones of each function only those that let every value of every parameter occur.

    A race is an order that is missing, which is seen in one run of a program whatever the threads did; and two
    parameters change a program each by itself. What is raced and does all that it does otherwise runs once.
    """
    raced: dict[Any, dict[pytest.Function, dict[str, Any]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (values := _values(item)).get("raced"):
            raced.setdefault((item.path, item.originalname), {})[item] = values
    kept = {item for cases in raced.values() for item in _chosen(cases)}
    once = {_case(item) for item in kept if not is_raced_again(item)}
    left = {item for cases in raced.values() for item in cases} - kept
    return [item for item in items if item in kept or not (item in left or _case(item) in once)]


def _values(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test that runs with and without no_race."""
    call = getattr(item, "callspec", None)
    return {name: value if name == "raced" else id(value) for name, value in call.params.items()} if call else {}


def _case(item: pytest.Item) -> Any:
    """What a test and the same one under no_race have in common."""
    values = {name: value for name, value in _values(item).items() if name != "raced"}
    return item.path, getattr(item, "originalname", ""), frozenset(values.items())


def _chosen(cases: dict[pytest.Function, dict[str, Any]]) -> set[pytest.Function]:
    """The diagonal of the table of all values, and whatever has a value that is not in it."""
    axes = {name: list({values[name]: None for values in cases.values()}) for name in next(iter(cases.values()))}
    axes = {name: found[: ENOUGH.get(name)] for name, found in axes.items()}
    table = [(item, v) for item, v in cases.items() if all(v[name] in found for name, found in axes.items())]
    longest = max(axes, key=lambda name: len(axes[name]))

    def off_diagonal(case: tuple[pytest.Function, dict[str, Any]]) -> bool:
        place = axes[longest].index(case[1][longest])
        return any(found.index(case[1][name]) != place % len(found) for name, found in axes.items())

    seen: set[Any] = set()
    chosen = set()
    for item, values in sorted(table, key=off_diagonal):
        if not values.items() <= seen:
            chosen.add(item)
            seen |= values.items()
    return chosen


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
    if loop.transfers is not None:
        watch_transfers(checker, loop.transfers, prefix)


def watch_executor(checker: RaceChecker, executor: Executor, prefix: str) -> None:
    """One device's memory, and its rings."""
    program, buffers = executor.program, executor.buffers
    state_rows()
    checker.register(f"{prefix}tables", program.tables, "rows")
    slots = program.adjustments
    checker.register(f"{prefix}slots", slots._replace(adjusted=slots.adjusted.flatten(0, 1)), "rows")
    for group, memory in enumerate((program.cache.data, *program.cache.others)):
        checker.register(f"{prefix}kv{group or ''}", memory, "rows")
    checker.register(f"{prefix}words", executor.sent)
    checker.register(f"{prefix}logits", buffers.logits)
    checker.register(f"{prefix}tokens", buffers.tokens)
    if not executor.device.maps_host:
        checker.register(f"{prefix}lines", buffers.lines)
    checker.register(f"{prefix}packet", executor.packets)
    checker.register(f"{prefix}outbox", executor.outboxes)


def watch_free(checker: RaceChecker, loop: Loop, prefix: str) -> None:
    """Pages and rows that come back."""

    def row_freed(row: int) -> None:
        for field in loop.launcher.executor.program.tables._fields:
            checker.freed(f"{prefix}tables.{field}", [row])

    def slot_freed(slot: int) -> None:
        places, count, _ = loop.launcher.executor.program.adjustments.adjusted.shape
        for field in Adjustments._fields:
            rows = [place * count + slot for place in range(places if field == "adjusted" else 1)]
            checker.freed(f"{prefix}slots.{field}", rows)

    slots = loop.rows.slots[Lane.ADJUST.value]
    slots.unused = FreeList(slots.unused, slot_freed)
    for group, pool in enumerate(loop.planner.pools):
        freed = partial(_page_freed, checker, f"{prefix}kv{group or ''}")
        pool.free = FreeList(pool.free, freed)
        pool.cached = _Cached(freed)
    loop.rows.free = FreeList(loop.rows.free, row_freed)


def _page_freed(checker: RaceChecker, memory: str, page: int) -> None:
    checker.freed(memory, [page])


@contextmanager
def loops_under_no_race(mode: Literal["raise", "record"] = "raise") -> Iterator[RaceChecker]:
    """Every loop made inside is watched, and every executor that follows one; a race fails the test."""
    executors: list[Executor] = []
    plain_loop, plain_executor, plain_transfers = Loop.__init__, Executor.__init__, Transfers.__init__

    def watched_executor(executor: Executor, *args: Any, **kwargs: Any) -> None:
        plain_executor(executor, *args, **kwargs)
        executors.append(executor)
        watch_executor(checker, executor, f"engine {len(executors)} ")

    def watched_loop(loop: Loop, *args: Any, **kwargs: Any) -> None:
        plain_loop(loop, *args, **kwargs)
        # Stand-ins for a launcher have nothing to watch.
        if hasattr(loop.launcher, "executor"):
            watch_free(checker, loop, f"engine {1 + executors.index(loop.launcher.executor)} ")

    def watched_transfers(transfers: Transfers, *args: Any, **kwargs: Any) -> None:
        plain_transfers(transfers, *args, **kwargs)
        watch_transfers(checker, transfers, f"engine {len(executors)} ")

    with no_race(mode) as checker, tapes_report(), tiers_stated(checker), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "__init__", watched_executor)
        patch.setattr(Transfers, "__init__", watched_transfers)
        patch.setattr(Loop, "__init__", watched_loop)
        yield checker
