"""A scenario player: callers that come, read and leave, in one run of an engine on a device that is simulated.

`play` runs a `Scenario` to its end. `Player` takes any loop, such as one over your own model, planner or device, and
goes turn by turn. Both check each turn that no page or row is given away that a step in flight can reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request, StepPlan, StepTokens
from gapless.engine import checkers
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.memory.pages import PageCounts
from gapless.model.seam import Model
from gapless.step.launcher import Flight, Launcher
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

checkers.connect()  # what a device captures has to be checked

ABORTED = -1
"""The flag of a caller that has left."""


@dataclass(eq=False)
class Caller:
    """A request, the turns in which it comes and its caller leaves, and its result."""

    request: Request
    arrives: int = 0
    """Turn of its submission."""
    aborts_after: int | None = None
    """The number of the token whose turn aborts it; 0: it is aborted in the turn of its arrival. None: never."""
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens, up to and with a stop token."""
    flag: int | None = None
    """The `Flag` of its last token (STOP, LENGTH or ERROR) or ABORTED; None before its end."""


def ask(
    key: int, prompt: Sequence[int], max_tokens: int, arrives: int = 0, aborts_after: int | None = None,
    stop_ids: tuple[int, ...] = (), priority: int = 0, salt: str = "", **sampling: Any,
) -> Caller:  # fmt: skip
    """Return a caller with these wishes. `key` is unique; `sampling` are fields of `SamplingParams`.

    Sampling is greedy unless asked otherwise. Clients of one `salt` share the KV pages of a common prefix.
    """
    params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=max_tokens)
    tokens, end = np.array(prompt, np.int32), len(prompt) + max_tokens
    least = len(prompt) + params.min_tokens
    request = Request(key, tokens, params, params.seed or 0, stop_ids, least, end, priority, salt)
    return Caller(request, arrives, aborts_after)


class Gauges(NamedTuple):
    """An engine's holdings at one moment."""

    waiting: int
    """Requests in the queue."""
    running: int
    """Requests on rows."""
    steps: int
    """Steps in flight."""
    free_rows: int
    pages: tuple[PageCounts, ...]
    """Pages by state, of each page group."""
    slots: dict[str, list[int]]
    """Slots in use of the packet ring and of the outbox ring."""


def gauges(loop: Loop) -> Gauges:
    """Return what the engine holds now. Call it between turns."""
    planner, launcher = loop.planner, loop.launcher
    slots = launcher.executor.slots_in_use() if isinstance(launcher, Launcher) else {}
    pages = tuple(pool.counts() for pool in loop.pools)
    return Gauges(len(planner.waiting), planner.room.running, loop.in_flight, loop.rows.available(), pages, slots)


def check_pages(loop: Loop) -> None:
    """Assert that every page is free, cached, owned or fenced, and that requests on rows hold the owned ones."""
    for group, pool in enumerate(loop.pools):
        pool.check([row.by_group[group] for row in loop.planner.by_row if row is not None])
        counts = pool.counts()
        assert min(astuple(counts)) >= 0 and counts.total == pool.size, f"pages do not add up: {counts}"


def check_at_rest(loop: Loop) -> None:
    """Assert that nothing is held: no request, step in flight, page, row, lease or slot of a ring."""
    found, rows, known = gauges(loop), loop.rows, len(loop.planner.by_key) + len(loop.requests)
    assert (found.waiting, found.running, found.steps, known) == (0, 0, 0, 0), f"at rest, requests are there: {found}"
    assert not any(counts.owned or counts.fenced for counts in found.pages), f"at rest, pages are held: {found.pages}"
    assert found.free_rows == rows.size, "at rest, rows are held"
    assert all(len(slots.free) == slots.size for slots in rows.slots.values()), "at rest, slots are held"
    assert not list(loop.planner.ledger.pending()), f"at rest, leases are open: {list(loop.planner.ledger.pending())}"
    for ring, slots in found.slots.items():
        assert not slots, f"at rest, {ring} slots are in use: {slots}"


class LeaseAudit:
    """An audit: it derives from the plans alone which pages, rows and slots each step in flight can reach, and asserts
    that none is given away.

    It audits the first page group, whose pages stay with a request to its end unless that group has a window.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tables: dict[int, dict[int, int]] = {}
        self._reach: dict[int, tuple[set[int], dict[int, int], set[tuple[str, int]]]] = {}
        self._launch, self._relaunch = loop.launcher.launch, loop.launcher.relaunch
        loop.launcher.launch, loop.launcher.relaunch = self.launch, self.relaunch  # type: ignore[method-assign]

    def launch(self, plan: StepPlan, requests: list[Request]) -> Flight:
        self._note(plan)
        return self._launch(plan, requests)

    def relaunch(self, plan: StepPlan) -> Flight:
        self._note(plan)
        return self._relaunch(plan)

    def _note(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._tables[admission.row] = {}
        for write in plan.pages:
            if write.group == 0:
                self._tables[write.row][write.entry] = write.page
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks)]
        pages = {page for row in rows for page in self._tables[row].values()}
        slots = {(name, slot) for row in rows for name, slot in self._loop.rows.leased[row].items()}
        self._reach[plan.step] = pages, {row: int(self._loop.rows.generation[row]) for row in rows}, slots

    def check(self) -> None:
        """Assert that pages, rows and slots of steps in flight are not free, and no row another request's."""
        pool, rows = self._loop.pools[0], self._loop.rows
        reusable = {*pool.free, *pool.cached}
        flying = {flight.plan.step for flight in self._loop.flights}
        self._reach = {step: reach for step, reach in self._reach.items() if step in flying}
        for step, (pages, generations, slots) in self._reach.items():
            assert not pages & reusable, f"step {step} is in flight, and pages of it are free: {pages & reusable}"
            free = [name for name, slot in slots if slot in rows.slots[name].free]
            assert not free, f"step {step} is in flight, and slots of it are free: {free}"
            for row, generation in generations.items():
                assert row not in rows.free, f"step {step} is in flight, and row {row} of it is free"
                assert rows.generation[row] == generation, f"step {step} is in flight, and row {row} has a new owner"


def deliver(settled: StepTokens, callers: Mapping[int, Caller]) -> None:
    """Hand the tokens of one step to the callers, by key."""
    for key, token, flag in settled.entries():
        one = callers[key]
        assert one.flag is None, f"request {key} got a token after its end"
        if flag != Flag.ERROR:
            one.tokens.append(token)
        if flag != Flag.LIVE:
            one.flag = flag


class Player:
    """Drives a loop for callers. Build one before the loop has launched anything."""

    def __init__(self, loop: Loop, callers: Sequence[Caller]) -> None:
        self.loop = loop
        self.callers = {one.request.key: one for one in callers}
        self.turns = 0
        self._coming = sorted(callers, key=lambda one: one.arrives)
        self._audit = LeaseAudit(loop)

    def done(self) -> bool:
        """Return whether all callers were submitted and nothing is left to do."""
        return not self._coming and not self.loop.has_work()

    def turn(self) -> None:
        """Submit who arrives now, run one turn of the loop, deliver its tokens, abort who leaves, and check."""
        while self._coming and self._coming[0].arrives <= self.turns:
            self.loop.submit(self._coming.pop(0).request)
        for settled in self.loop.turn().tokens:
            deliver(settled, self.callers)
        for one in self.callers.values():
            leaves = one.aborts_after is not None and len(one.tokens) >= one.aborts_after
            if leaves and one.flag is None and one not in self._coming:
                self.loop.abort(one.request.key)
                one.flag = ABORTED
        self.turns += 1
        self.check()

    def check(self) -> None:
        """Assert that pages add up and that nothing is given away which a step in flight can reach."""
        check_pages(self.loop)
        self._audit.check()

    def gauges(self) -> Gauges:
        """Return what the engine holds now: pages by state, free rows, steps in flight, slots of the rings."""
        return gauges(self.loop)

    def run(self, most_turns: int = 5_000) -> None:
        """Go on until every caller has its end. Raises AssertionError when that takes more than `most_turns`."""
        while not self.done():
            assert self.turns < most_turns, (
                f"{len(self.loop.planner.by_key)} requests did not end in {most_turns} turns"
            )
            self.turn()


class Scenario(NamedTuple):
    """All that decides a run. Equal scenarios give equal runs, operation by operation."""

    callers: Sequence[Caller]
    """Use fresh ones for each run, since they take the results."""
    seed: int = 0
    """The seed of the adversary."""
    mood: str | None = None
    """The mood of the adversary (`gapless.testing.adversary`); None: it changes."""
    depth: int | None = 2
    """Most steps in flight; None for depth auto."""
    sizes: Sizes = Sizes(rows=4, max_len=48, pages=20, page_size=4, step_tokens=16, queue=64)
    """Bounds of the engine. Few pages make requests wait, share and preempt."""


def play(scenario: Scenario, model: Model | None = None, **options: Any) -> Player:
    """Run a scenario to its end on a `SimDevice`, and check that nothing is held then.

    `model` None is a ChecksumModel with its default vocabulary. `options` are further fields of `LoopSpec`, such as
    `by_priority=True` or `prefix_caching=False`. Returns the player, whose `loop` has counters and step records.

    Raises:
        AssertionError: something was lost, given away or held, or requests did not end.
        DeviceError: a program of the step raised; the cause says why.
    """
    device = SimDevice(scenario.seed, scenario.mood)
    model = model or ChecksumModel(max_model_len=scenario.sizes.max_len)
    try:
        player = Player(loop_of(device, model, scenario.sizes, scenario.depth, **options), scenario.callers)
        player.run()
        check_at_rest(player.loop)
    finally:
        device.close()
    return player
