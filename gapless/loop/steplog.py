"""The step log: times of each phase of the loop, and causes of delay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gapless.device import Fence
from gapless.loop.records import NO_CAPTURE, NO_COPIES, ChunkRecord, StepCounts, StepRing
from gapless.loop.timeline import Timeline
from gapless.pace.chunk_limit import OverrunCause
from gapless.step.launcher import Flight

StepCopies = tuple[int, int, int, int]

NOT_HELD, NONE_HELD = (0, 0), (0, False)
APART_NS = 10_000_000
"""Captures further apart are not one stretch."""
ACCOUNTED_STEPS = 64
"""Steps that the timeline takes in at once; single steps would take the loop many times as long."""


class Measured(NamedTuple):
    """Cost of one step, ns."""

    host: int
    """Enqueueing, committing and retiring it; planning and packing belong to the visit."""
    device: int
    held: float
    """Share of its decode rows that were held"""
    scores: bool
    """Whether it scored prompt tokens, which takes longer."""


class RankWaits:
    """Gives each step its part of the time that the ranks have waited for each other, the leader first."""

    def __init__(self, waited: Callable[[], Sequence[int]]) -> None:
        """`waited` returns all of it so far, ns."""
        self._waited = waited
        self._given = [*waited()]

    def of(self, length: int) -> list[int]:
        """Return the waits of the oldest step, which took `length`. Waits of steps after it may be among them, but
        none is given twice, and no step gets more than its time."""
        found = [min(now - given, length) for now, given in zip(self._waited(), self._given, strict=True)]
        self._given = [given + more for given, more in zip(self._given, found, strict=True)]
        return found

    def forget(self) -> None:
        """Forget all steps so far."""
        self._given = [*self._waited()]


class Beside(NamedTuple):
    """Sources of times beside the steps' own."""

    copies: Callable[[], StepCopies] = lambda: NO_COPIES
    """Returns the latest copies of pages, from `loads_from` to `stores_until`."""
    waits: RankWaits | None = None
    """None for one rank"""


NOTHING_BESIDE = Beside()


class StepLog:
    """The records of the latest steps, the timeline and the counters of one loop. The loop's thread writes it."""

    def __init__(self, clock: Callable[[], int], beside: Beside = NOTHING_BESIDE) -> None:
        self.records = StepRing()
        self.timeline = Timeline()
        self.counters = StepCounts()
        self._clock, self._beside = clock, beside
        # Times before the next launch, for its record.
        self._work_at = 0
        self._held = NOT_HELD
        """The step that the depth limit waits for, and the time of its tokens' arrival or of awaited pages'"""
        self._captures = NO_CAPTURE
        """Start and end of captures"""
        self._planning_at = self._planned_at = self._left_at = 0
        self._observing_at = 0
        self._observed = 0, False
        """When the oldest step was seen to have ended, and whether the host waited for it"""
        self._held_rows = NONE_HELD
        """Rows held by the observed step, and whether it ran in vain"""

    # Launching.

    def work_came(self) -> None:
        """Note new work for an idle loop."""
        self._work_at = self._clock()
        self.timeline.begin(self._work_at)

    def capture(self, capture: Callable[[], int]) -> None:
        """Note the time of captures; `capture` makes them, and returns the number refused."""
        begin = self._clock()
        self.counters.captures_refused += capture()
        end = self._clock()
        first, last = self._captures
        self._captures = first if first and begin - last < APART_NS else begin, end
        self.timeline.host.capture += end - begin

    def planning(self) -> None:
        self._planning_at = self._clock()

    def planned(self) -> None:
        self._planned_at = self._clock()

    def held_by(self, step: int) -> None:
        """Note that the depth limit delays the next launch until this step ends."""
        self._held = step, 0

    def launched(self, flight: Flight, chunks: tuple[ChunkRecord, ...]) -> int:
        """Record the first step of a visit. Returns the visit's host time up to its packet, ns.

        With steps in flight it counts from the end of the last turn, and includes the engine's work between two turns;
        with none, the time before may have been rest.
        """
        records, plan = self.records, flight.plan
        flying, planning_at, packed_at = records.begun - records.ended, self._planning_at, flight.packed_at
        records.begin(
            flight.decoded.keys, chunks,
            plan.step, len(plan.decode), plan.chunk_tokens, flying + 1,
            self._work_at, *self._held,
            planning_at, self._planned_at, packed_at, flight.launched_at, *self._beside.copies(),
            *self._captures, flight.decision.missed, False,
        )  # fmt: skip
        self._work_at, self._held, self._captures = 0, NOT_HELD, NO_CAPTURE
        return packed_at - (self._left_at if flying else planning_at)

    def chained(self, flight: Flight, before: Flight) -> None:
        """Record a further step of the visit: it has no packet, and all its time is enqueueing."""
        records, plan, at = self.records, flight.plan, before.launched_at
        records.begin(
            flight.decoded.keys, (),
            plan.step, len(plan.decode), 0, records.begun - records.ended + 1,
            0, 0, 0,
            at, at, at, flight.launched_at, *NO_COPIES, *NO_CAPTURE, flight.decision.missed, True,
        )  # fmt: skip
        self.counters.chained_steps += 1

    # Observing.

    def observing(self) -> None:
        """Note that the host turns to the oldest step in flight."""
        self._observing_at = self._clock()

    def woken(self, fence: Fence) -> int | None:
        """Return how late the host resumed after waiting for this fence, ns; None if it need not wait."""
        passed = fence.time()
        return self._clock() - passed if passed > self._observing_at else None

    def interrupted(self) -> None:
        """Count a wait without an ended step."""
        self.timeline.host.wait += self._clock() - self._observing_at

    def waited_for_news(self, copies: bool) -> None:
        """Count a wait without steps in flight, for `copies` of pages or other news that lets something run."""
        self.interrupted()
        if copies:
            self._held = self._held[0], self._clock()
        else:
            self.work_came()

    def observed(self, waited: bool) -> None:
        """Note that the oldest step has ended; `waited`: the host waited for it."""
        self._observed = self._clock(), waited

    def counted(self, flight: Flight) -> None:
        counters = self.counters
        counters.steps += 1
        counters.graph_steps += flight.decision.captured
        counters.graph_misses += flight.decision.missed
        counters.prompt_tokens += flight.plan.chunk_tokens

    def held(self, rows: int, in_vain: bool) -> None:
        """Note rows held by the observed step; `in_vain`: all that sampled, in a step without prompts."""
        self.counters.held_rows += rows
        self._held_rows = rows, in_vain

    def over_max_itl(self, cause: OverrunCause) -> None:
        """Count a step with decoding rows over the user's bound."""
        name = f"over_itl_{cause}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)

    def committed(self, flight: Flight) -> Measured:
        """Record the end of the observed step, now committed."""
        start, end = _time(flight.started), _time(flight.ended)
        on_host = end if flight.on_host is flight.ended else _time(flight.on_host)
        if flight.plan.step == self._held[0]:
            self._held = flight.plan.step, on_host
        records, (observed_at, waited), now = self.records, self._observed, self._clock()
        (held, in_vain), self._held_rows = self._held_rows, NONE_HELD
        waits = self._beside.waits
        mine, *others = waits.of(end - start) if waits is not None else (0,)
        records.end(tuple(others), start, end, on_host, self._observing_at, observed_at, now, waited, in_vain, mine)
        if records.ended - records.accounted == ACCOUNTED_STEPS:
            self._account()
        host, scored = flight.launched_at - flight.packed_at + now - observed_at, flight.decision.logprobs
        share = min(1.0, held / max(1, len(flight.plan.decode)))
        return Measured(host, end - start, share, scored is not None and scored.prompt > 0)

    def left(self) -> None:
        self._left_at = self._clock()

    # Numbers.

    def account(self, at_rest: bool) -> Timeline:
        """Return the timeline, up to now if the loop is `at_rest`, else to the end of the last observed step."""
        self._account()
        if at_rest:
            self.timeline.rest(self._clock())
        return self.timeline

    def forget(self) -> None:
        """Reset all counters."""
        self.records.clear()
        if self._beside.waits is not None:
            self._beside.waits.forget()
        self.counters = StepCounts()
        self.timeline = Timeline()
        self.records.accounted = self.records.ended
        self.timeline.begin(self._clock())

    def _account(self) -> None:
        """Bring the timeline up to the last record."""
        self.timeline.add(self.records.rows(self.records.accounted))
        self.records.accounted = self.records.ended


def _time(fence: Fence) -> int:
    """Return when an observed step passed this fence. The device may not have checked it before."""
    done = fence.done()
    assert done, "a step was observed before it had ended"
    return fence.time()
