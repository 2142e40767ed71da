"""THE loop. Depth 1 is the reference; depth 2, 4 and 8 are the same code."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import DeviceError
from gapless.base.part import Hooks
from gapless.base.records import Request, StepPlan, StepTokens, Turn
from gapless.device import Device
from gapless.loop.parts import LoopParts
from gapless.loop.records import StepCounts, StepRing, chunk_records
from gapless.loop.requests import Requests
from gapless.loop.settle import Settler
from gapless.loop.steplog import StepLog
from gapless.loop.timeline import Timeline
from gapless.memory.ledger import Clock
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.pace.depth import Depth
from gapless.plan.planner import Planner
from gapless.step.launcher import Flight, Launcher

NEWS_SECONDS = 1.0
"""Longest wait of one turn for the bell alone: a lost ring costs no more, and the watchdog sees no stall."""


class Loop:
    """plan -> launch -> observe -> commit -> retire. It waits in `observe` alone, for the oldest steps or the bell, and
    in `_capture`, with the device at rest. Not thread-safe."""

    def __init__(
        self, device: Device, launcher: Launcher, planner: Planner, rows: RowTable, depth: Depth, log: StepLog,
        parts: LoopParts,
    ) -> None:  # fmt: skip
        self.device, self.launcher, self.planner, self.rows = device, launcher, planner, rows
        self.log, self.parts, self._depth = log, parts, depth
        self._hooks = Hooks.of(parts.every)
        self.requests = Requests(planner, rows, self._hooks, log, speculates=launcher.gate is not None)
        self._settler = Settler(launcher, planner, rows, self._hooks, log)
        self.flights: deque[Flight] = deque()
        """Steps in flight, the oldest first."""
        self._failure: DeviceError | None = None  # of a launch
        self._waits_for_parts = False
        """Whether the loop waits with no step in flight, and nothing can run before a part has news."""
        self.frozen = False
        """Whether a pause holds all requests"""
        observe.built(self)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestError if it could never run."""
        self.requests.submit(request)

    def abort(self, key: int) -> None:
        """End a request without further tokens; steps in flight run on, their tokens are dropped."""
        self.requests.abort(key)

    def close(self) -> None:
        for part in self.parts.every:
            part.close()

    def has_work(self) -> bool:
        """Return whether a turn has anything to launch, observe, capture, store or load, or a failure to raise."""
        return self._has_steps() or any([part.busy for part in self._hooks.busy])

    def _has_steps(self) -> bool:
        return bool(self.flights) or self.planner.has_work() or self.launcher.graphs.due or self._failure is not None

    def rest(self) -> bool:
        """Called without work: have the next turn capture the program missed most. Returns whether there is one."""
        assert not self._has_steps()  # news of a part may come at any time
        return self.launcher.graphs.rest()

    def wants_steps(self) -> bool:
        """Return whether steps should complete: some work needs more than news of a part. From any thread."""
        return self._has_steps() and not (self._waits_for_parts or self.frozen)

    def turn(self) -> Turn:
        """plan -> launch -> observe -> commit -> retire. Waits in `observe`, if nothing else can be done.

        The bell ends a wait early: the turn then returns no tokens, and the caller checks its inbox. Raises DeviceError
        for a failed device, after all settled tokens have been returned.
        """
        turn = Turn([], [], [])
        if self._failure is not None and not self.flights:
            raise self._failure
        self._capture()
        try:
            for part in self._hooks.before_plan:
                part.before_plan()
            if observe.steps is None:
                launched = self.launch(self.plan(), turn)
            else:
                with observe.steps.launches(self.launcher):
                    launched = self.launch(self.plan(), turn)
            if self.flights:
                for part in self._hooks.poll:
                    part.poll()  # after the launch, which it does not delay
        except DeviceError as error:
            # Steps that ended before are observed first. If none is left, the error is raised here or never.
            self._failure = error
            if not self.flights:
                raise
            launched = False
        try:
            self._take_in(self.observe(launched), turn.tokens)
        except DeviceError:
            # Settled tokens are returned first: a failed device stays failed, and the next turn raises.
            if not turn.tokens:
                raise
        turn.failed.extend(self.requests.end_failed())
        self.log.left()
        return turn

    def drain(self) -> list[StepTokens]:
        """Launch nothing, and wait for all steps in flight. Returns their tokens."""
        settled = list[StepTokens]()
        while self.flights:
            self._take_in(self.observe(launched=False), settled)
        return settled

    def _take_in(self, ended: Iterator[Flight], settled: list[StepTokens]) -> None:
        for flight in ended:
            tokens = self.commit(flight)
            if len(tokens.keys) or tokens.logprobs is not None:
                settled.append(tokens)
            self.retire(flight)

    def _capture(self) -> None:
        """Capture a graph that was missed often enough, once the device is at rest; this waits for it."""
        if not self.flights and self.launcher.graphs.due:
            self.log.capture(self.launcher.graphs.capture_due)

    # Plan and launch.

    def plan(self) -> list[StepPlan]:
        """Return the steps that this visit enqueues: none if launching is declined or nothing can run."""
        self.log.planning()
        if len(self.flights) >= self.depth:
            self.counters.declined_depth += 1
        elif self.launcher.graphs.due:
            self.counters.declined_capture += 1
        elif not (room := self.launcher.ready(self._depth.chain)):
            self.counters.decline(self.launcher.lacks)
        elif plans := self.planner.chain(room):
            self.log.planned()
            return plans
        return []

    def launch(self, plans: list[StepPlan], turn: Turn) -> bool:
        """Pack the first plan and enqueue all; False without a plan."""
        if not plans:
            return False
        plan = plans[0]
        requests = [self.requests[admission.key] for admission in plan.admissions]
        if requests:
            for part in self._hooks.admit:
                part.admit(plan)
        flight = self.launcher.launch(plan, requests)
        self._launched(flight)
        self._depth.visited(self.log.launched(flight, chunk_records(plan, self.rows.key) if plan.chunks else ()))
        for further in plans[1:]:
            before, flight = flight, self.launcher.relaunch(further)
            self._launched(flight)
            self.log.chained(flight, before)
        if requests:
            turn.started.extend(self.requests.admitted(plan))
        return True

    def _launched(self, flight: Flight) -> None:
        self.flights.append(flight)
        for part in self._hooks.launched:
            part.launched(flight)

    # Observe.

    def observe(self, launched: bool) -> Iterator[Flight]:
        """Yield the ended steps in order. If the depth is reached or nothing was launched, wait for the oldest or the
        bell; without steps in flight, for the bell."""
        if not self.flights:
            self._wait_for_news()
            return
        over = len(self.flights) - self.depth
        if over >= 0:
            self.log.held_by(self.flights[over].plan.step)
        if over >= 0 or not launched:
            if not self._wait(self._visit_end(over)):
                return
            yield self.flights.popleft()
        while self.flights and self.flights[0].on_host.done():
            self.log.observing()
            self.log.observed(waited=False)
            yield self.flights.popleft()

    def _wait(self, last: Flight) -> bool:
        """Wait until `last`, and so the oldest step, has ended. Returns False if the bell rang before."""
        self.log.observing()
        try:
            if not last.on_host.wait(self.bell):
                # The inbox is read between two turns; this ring must not end the next wait too.
                self.bell.clear()
                self.log.interrupted()
                for part in self._hooks.rung:
                    part.rung()
                return False
            if (late := self.log.woken(last.on_host)) is not None:
                self._depth.woke(late)
        except DeviceError:
            self.flights[0].on_host.wait()  # raises too, unless this step of the chain ended before
        self.log.observed(waited=True)
        return True

    def _wait_for_news(self) -> None:
        """Wait for a part or the bell if none of the work can run, or if only parts have some."""
        if self.launcher.graphs.due:
            return
        works = self.planner.has_work()
        came = pages = any([part.poll() for part in self._hooks.poll])  # the plan may just have asked for something
        awaited = any([part.awaited() for part in self._hooks.awaited])
        self._waits_for_parts = awaited or next(self.planner.ledger.pending(), None) is not None
        self.log.observing()
        for part in () if came else self._hooks.wait:
            if came := part.wait(self.bell, NEWS_SECONDS * works):
                pages = part.brings_pages
                break
        if came or (works and self.bell.wait(NEWS_SECONDS)):
            self.bell.clear()
        self._waits_for_parts = False
        if works:
            self.log.waited_for_news(copies=pages)

    def _visit_end(self, needed: int) -> Flight:
        """Return the step to wait for: the oldest, or a later one of its chain whose end lets the next be launched.
        Waking up for each would cost as much as the chain saves."""
        last = 0
        while last < needed and self.records.flying(last + 1, "chained"):
            last += 1
        return self.flights[last]

    # Commit and retire.

    def commit(self, flight: Flight) -> StepTokens:
        """Settle the step's tokens: host token table, bounds and prefix index, ended requests."""
        settled, ended = self._settler.settle(flight)
        self.log.counted(flight)
        for number, failed in ended:
            self.requests.end(number, failed)
        return settled

    def retire(self, flight: Flight) -> None:
        """Free the resources whose last use was this observed and committed step."""
        self.launcher.release(flight)
        self.planner.ledger.advance(Clock.COMPUTE, flight.plan.step)
        measured = self.log.committed(flight)
        self._depth.learn(measured.host, measured.device)
        for part in self._hooks.retired:
            part.retired(flight, measured)

    @property
    def bell(self) -> Bell:
        """Rung to end a wait, and so the turn, for example by a new message."""
        return self.device.bell

    @property
    def pools(self) -> Sequence[PagePool]:
        return self.planner.pages.pools

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    @property
    def depth(self) -> int:
        """Allowed number of steps in flight."""
        return self._depth.now(self.planner.queued)

    @property
    def counters(self) -> StepCounts:
        return self.log.counters

    @property
    def records(self) -> StepRing:
        return self.log.records

    def capture(self, seconds: float = inf, further: float = inf) -> None:
        """Capture the likely steps within `seconds`, and others within `further`, at rest. Then reset all counters."""
        refused = self.launcher.graphs.warm(seconds, further)
        self.log.forget()
        self.rows.count_anew()
        self.counters.captures_refused = refused

    def account(self) -> Timeline:
        return self.log.account(at_rest=not self.flights and (self.frozen or not self.planner.wanting))
