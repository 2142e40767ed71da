"""THE loop. Depth 1 is the reference; depth 2, 4 and 8 are the same code."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import DeviceError, RequestError
from gapless.base.records import Admission, Flag, Request, StepPlan, StepTokens, Turn
from gapless.device import Device
from gapless.loop.masks import Masks
from gapless.loop.records import ChunkRecord, StepCounts, StepRing
from gapless.loop.settle import Lines, of_decode_rows, settle, with_failures
from gapless.loop.steplog import StepLog
from gapless.loop.timeline import Timeline
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.offload.transfers import Transfers
from gapless.pace.chunk_limit import ChunkLimit
from gapless.pace.depth import Depth
from gapless.pace.draft_gate import Verify
from gapless.plan.planner import Planner
from gapless.plan.room import check_fits
from gapless.plan.row import RowSpec
from gapless.step.adapters import AdapterLoader
from gapless.step.launcher import Flight, Launcher
from gapless.step.packet import step_word
from gapless.step.wishes import wish_words

log = logging.getLogger("gapless.loop")
NEWS_SECONDS = 1.0
"""Longest wait of one turn for the bell alone: a lost ring costs no more, and the watchdog sees no stall."""

# Plain integers: reading a member of an enumeration costs as much as an array operation.
_LIVE, _ERROR, _INERT, _HELD = int(Flag.LIVE), int(Flag.ERROR), int(Flag.INERT), int(Flag.HELD)


class Loop:
    """plan -> launch -> observe -> commit -> retire. Not thread-safe.

    It waits in two places only: in `observe`, for the oldest steps or the bell, and in `_capture`, with the device at
    rest.
    """

    def __init__(
        self, device: Device, launcher: Launcher, planner: Planner, pools: Sequence[PagePool], rows: RowTable,
        ledger: Ledger, depth: Depth, chunk_limit: ChunkLimit | None = None, masks: Masks | None = None,
        adapters: AdapterLoader | None = None, transfers: Transfers | None = None,
    ) -> None:  # fmt: skip
        """`chunk_limit` bounds the prompt tokens of steps with decoding rows; None: only the step's budget does.

        Without `masks`, requests with matchers are refused.
        """
        self.log = StepLog(device.clock)
        self.bell: Bell = device.bell
        """Rung to end a wait, and so the turn, for example by a new message."""
        self.planner = planner
        self.device = device
        self.launcher = launcher
        self.pools, self.pool = pools, pools[0]
        self.rows = rows
        self.ledger = ledger
        self._depth = depth
        self.masks = masks
        self._chunk_limit = chunk_limit
        self.adapters = adapters
        self.transfers = transfers
        """Copies of KV pages in host memory, if any."""
        self._warns = False
        """Whether the next step over a user's bound gets a warning: set when the start ends, cleared by the warning."""
        self.flights: deque[Flight] = deque()
        """Steps in flight, the oldest first."""
        self.requests: dict[int, Request] = {}
        """Requests that have not ended, by key."""
        self._arrivals = 0
        self.fresh: set[int] = set()
        """Keys of requests that no step has admitted yet."""
        self._forgotten = 0
        """Tokens settled before the counters were reset"""
        self._failure: DeviceError | None = None
        """Error of a launch on a failed device."""
        self._waits_for_transfers = False
        """Whether the loop waits with no step in flight, and nothing can run before a transfer ends."""
        self.frozen = False
        """Whether a pause holds all requests"""
        observe.built(self)

    # Requests in.

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestError if it could never run."""
        check_fits(request, self.pool, self.rows)
        params, leases = request.params, request.params.leases
        for name in leases:
            if not self.rows.slots[name].size:
                raise RequestError(f"this engine was built with no slots of {name!r}, which the request needs")
        held = self._takes_masks(request)
        if request.adapter:
            request = self._by_digest(request)
            leases += (request.adapter,)
        asked = RowSpec(
            request.key, len(request.tokens), request.max_len, request.priority, self._arrivals, request.salt,
            request.adapter, leases,
            fill=len(wish_words(request)) if params.leases else 0,
            to_score=0 if params.prompt_logprobs is None else len(request.tokens) - 1,
            sends_past=bool(params.leases) or (self.launcher.gate is not None and request.most_drafts > 0),
            held=held,
            transfer=request.transfer,
        )  # fmt: skip
        idle = not self.planner.wanting
        self.planner.add(asked, request.tokens)
        self._arrivals += 1
        if held and self.masks is not None:
            self._begin_masks(self.masks, request)
        if idle:
            self.log.work_came()
        self.fresh.add(request.key)
        self.requests[request.key] = request
        if request.adapter and self.adapters is not None:
            self.adapters.slots.requests[request.adapter] += 1

    def _by_digest(self, request: Request) -> Request:
        """Return the request with its adapter's digest in place of the name, which may be given to another adapter."""
        if self.adapters is None or request.adapter not in self.adapters.names:
            raise RequestError(f"this engine has no adapter {request.adapter!r}", "model", "model_not_found")
        return request._replace(adapter=self.adapters.names[request.adapter])

    def _left(self, request: Request) -> None:
        if request.adapter and self.adapters is not None:
            self.adapters.slots.requests[request.adapter] -= 1

    def _takes_masks(self, request: Request) -> bool:
        """Return whether a matcher decides the request's tokens. Raises RequestError if none can."""
        name = request.params.masked_by
        if not name:
            assert request.matcher is None, "a matcher that was not asked for"
            return False
        if self.masks is None:
            raise RequestError(f"{name}: this engine's device shares no memory with the host; leave it out", name)
        self.masks.check(request)
        return True

    def _begin_masks(self, masks: Masks, request: Request) -> None:
        """Take over a queued request's matcher. Raises RequestError, and drops the request from the queue."""
        try:
            masks.begin(request)
        except Exception as error:
            masks.end(request.key)
            self.planner.abort(request.key)
            name = request.params.masked_by
            text = f"{name}: its matcher could not be taken over: {type(error).__name__}: {error}"
            raise RequestError(text, name) from error

    def abort(self, key: int) -> None:
        """End a request without further tokens; steps in flight run on, their tokens are dropped."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.fresh.discard(key)
            self.planner.abort(key)
            if self.masks is not None:
                self.masks.end(key)
            self._left(request)

    def has_work(self) -> bool:
        """Return whether a turn has anything to launch, observe, capture, store or load, or a failure to raise."""
        return self._has_steps() or (self.transfers is not None and self.transfers.busy)

    def _has_steps(self) -> bool:
        return bool(self.flights) or self.planner.has_work() or self.launcher.graphs.due or self._failure is not None

    def rest(self) -> bool:
        """Called without work: have the next turn capture the program missed most. Returns whether there is one."""
        assert not self._has_steps()  # news of a tier may come at any time
        return self.launcher.graphs.rest()

    def wants_steps(self) -> bool:
        """Return whether steps should complete: some work needs more than transfers. From any thread."""
        return self._has_steps() and not (self._waits_for_transfers or self.frozen)

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    # One turn.

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
            if self.adapters is not None:
                self.adapters.poll()
            if self.transfers is not None and not self.planner.room.running:
                self.transfers.take()  # arrived pages may be all that can run
            if observe.steps is None:
                launched = self.launch(self.plan(), turn)
            else:
                with observe.steps.launches(self.launcher):
                    launched = self.launch(self.plan(), turn)
            if self.transfers is not None and self.flights:
                self.transfers.poll()  # after the launch: no copy delays it
        except DeviceError as error:
            # Steps that ended before are observed first. If none is left, the error is raised here or never.
            self._failure = error
            if not self.flights:
                raise
            launched = False
        try:
            for flight in self.observe(launched):
                tokens = self.commit(flight)
                if len(tokens.keys) or tokens.logprobs is not None:
                    turn.tokens.append(tokens)
                self.retire(flight)
        except DeviceError:
            # Settled tokens are returned first: a failed device stays failed, and the next turn raises.
            if not turn.tokens:
                raise
        if self.masks is not None and self.masks.failed:
            for key, reason in self.masks.take_failed():
                if key in self.requests:
                    self.abort(key)
                    turn.failed.append((key, reason))
        self.log.left()
        return turn

    def _capture(self) -> None:
        """Capture a graph that was missed often enough, once the device is at rest; this waits for it."""
        if not self.flights and self.launcher.graphs.due:
            self.counters.captures_refused += self.launcher.graphs.capture_due()

    # Plan and launch.

    def plan(self) -> list[StepPlan]:
        """Return the steps that this visit enqueues: none if launching is declined or nothing can run."""
        self.log.planning()
        if len(self.flights) >= self.depth:
            self.counters.declined_depth += 1
        elif self.launcher.graphs.due:
            self.counters.declined_capture += 1
        elif not (room := self.launcher.ready(self._depth.chain)):
            if self.launcher.executor.crowded:
                self.counters.declined_queue += 1
            else:
                self.counters.declined_ring += 1
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
        if plan.admissions and self.masks is not None:
            self._admit_masked(self.masks, plan.admissions)
        flight = self.launcher.launch(plan, requests)
        self._follow(flight)
        self._depth.visited(self.log.launched(flight, self._chunks(plan) if plan.chunks else (), self.transfers))
        for further in plans[1:]:
            before, flight = flight, self.launcher.relaunch(further)
            self._follow(flight)
            self.log.chained(flight, before)
        self._note_admissions(turn, plan, requests)
        return True

    def _follow(self, flight: Flight) -> None:
        self.flights.append(flight)
        if flight.decision.key.mask and self.masks is not None:
            self.masks.follow(flight.ended)

    def _admit_masked(self, masks: Masks, admissions: tuple[Admission, ...]) -> None:
        for row, generation, key, *_ in admissions:
            if key in masks:
                masks.admit(key, row, generation, self.rows.settled(row))

    def _note_admissions(self, turn: Turn, plan: StepPlan, requests: list[Request]) -> None:
        for admission, request in zip(plan.admissions, requests, strict=True):
            turn.started.append((admission.key, admission.start))
            if admission.key in self.fresh:  # a preempted one was counted before
                self.fresh.remove(admission.key)
                self.counters.admitted_tokens += len(request.tokens)
                self.counters.admitted_cached += admission.start
                self.counters.admitted_loaded += admission.loaded
            self.counters.prefix_queries += admission.length
            self.counters.prefix_hits += admission.start

    def _chunks(self, plan: StepPlan) -> tuple[ChunkRecord, ...]:
        return tuple([ChunkRecord(int(self.rows.key[chunk.row]), chunk.start, chunk.size) for chunk in plan.chunks])

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
                if self.transfers is not None:
                    self.transfers.take()  # arrived pages may be planned beside the steps in flight
                return False
            if (late := self.log.woken(last.on_host)) is not None:
                self._depth.woke(late)
        except DeviceError:
            self.flights[0].on_host.wait()  # raises too, unless this step of the chain ended before
        self.log.observed(waited=True)
        return True

    def _wait_for_news(self) -> None:
        """Wait for a transfer or the bell if none of the work can run, or if only a store is left."""
        if not self.planner.has_work() or self.launcher.graphs.due:
            if self.transfers is not None and not self.launcher.graphs.due and self.transfers.wait(self.bell):
                self.bell.clear()
            return
        if self.adapters is not None:
            self.adapters.poll()  # the plan may just have asked for an adapter
        came = self.transfers is not None and self.transfers.poll()  # begins loads beside an adapter's too
        # No step is in flight: pending resources wait for transfers. If nothing is pending, the watchdog steps in.
        awaited = self.transfers is not None and self.transfers.host.below.patience() is not None
        self._waits_for_transfers = awaited or next(self.ledger.pending(), None) is not None
        self.log.observing()
        loads = not came and self.adapters is not None and self.adapters.wait(self.bell)
        if not (came or loads) and self.transfers is not None:
            came = self.transfers.wait_for_loads(self.bell, NEWS_SECONDS)
        if came or loads or self.bell.wait(NEWS_SECONDS):
            self.bell.clear()
        self.log.waited_for_news(copies=came)
        self._waits_for_transfers = False

    def _visit_end(self, needed: int) -> Flight:
        """Return the step to wait for: the oldest, or a later one of its chain whose end lets the next be launched.

        Waking up for each would cost as much as the chain saves, and bring no step forward.
        """
        last = 0
        while last < needed and self.records.flying(last + 1, "chained"):
            last += 1
        return self.flights[last]

    # Retire.

    def retire(self, flight: Flight) -> None:
        """Free the resources whose last use was this observed and committed step."""
        self.launcher.release(flight)
        self.ledger.advance(Clock.COMPUTE, flight.plan.step)
        measured = self.log.committed(flight)
        self._depth.learn(measured.host, measured.device)
        scores = flight.decision.logprobs is not None and flight.decision.logprobs.prompt
        if self.transfers is not None and not scores:
            self.transfers.host.gate.computed(flight.plan.chunk_tokens, measured.device)
        if self.launcher.gate is not None and not scores:
            ns = max(measured.device, self._depth.host_ns(measured.host))
            batch = flight.batch
            self.launcher.gate.learn(flight.decision.kind, batch.places, batch.prompt, ns, measured.held)
        if self._chunk_limit is not None:
            self._weigh(self._chunk_limit, flight.plan, measured.device, learns=not scores)

    def _weigh(self, chunk_limit: ChunkLimit, plan: StepPlan, ns: int, learns: bool) -> None:
        """Take in a step of `ns`. Prompts with scored tokens take longer than others, and are not learnt from."""
        rows, chunk_tokens = len(plan.decode), plan.chunk_tokens
        cause = chunk_limit.over(rows, chunk_tokens, ns)
        if cause is not None:
            self.log.over_max_itl(cause)
            if self._warns:
                self._warns = False
                log.warning(
                    "a step of %d decoding rows and %d prompt tokens took %.0f ms, and max_itl is %g (cause: %s); "
                    "further ones are only counted, by gapless:steps_over_max_itl_total",
                    rows, chunk_tokens, ns / 1e6, chunk_limit.most_ns / 1e6, cause,
                )  # fmt: skip
        if learns:
            chunk_limit.learn(rows, chunk_tokens, ns)

    # Commit.

    def commit(self, flight: Flight) -> StepTokens:
        """Settle the step's tokens: host token table, bounds and prefix index, ended requests."""
        plan, table, gate, places = flight.plan, self.rows, self.launcher.gate, flight.batch.places
        (sampled, tokens, flags), some_flag = self._lines(flight)
        if gate is not None:
            decoded = of_decode_rows(plan, sampled, tokens) if plan.chunks else (sampled, tokens)
            gate.observe(*decoded, Verify(places, flight.decision.key.sample.drafts))
        one = tokens.shape[1] == 1 or (gate is not None and places == 1)
        lines = Lines(sampled, tokens[:, 0] if one else tokens, flags)
        if some_flag and len(held := sampled[flags == _HELD]):
            self.log.held(len(held), in_vain=len(held) == len(flags) and not plan.chunks)
            if self.masks is not None:
                self.masks.held(held)
            lines = Lines(*(column[flags != _HELD] for column in lines))
        logprobs = None
        if flight.decision.logprobs is not None:
            logprobs, failed = settle(self.launcher.read_logprobs(flight), plan, table, self.planner.score)
            if len(failed):
                some_flag = True
                lines = with_failures(lines, failed)
        rows, tokens, flags = lines
        # The table drops a key when its request ends; a record of decode rows has a copy.
        keys = flight.decoded.keys if rows is flight.decoded.rows else table.key.take(rows)
        settled = StepTokens(plan.step, keys, tokens, flags, logprobs)
        self.log.counted(flight)
        table.append(*((rows[flags != _ERROR], tokens[flags != _ERROR]) if some_flag else (rows, tokens)))
        self.planner.commit(plan, sampled)
        if some_flag:
            ended = flags != _LIVE
            for row, flag in zip(rows[ended].tolist(), flags[ended].tolist(), strict=True):
                self._end(row, flag)
        return settled

    def _lines(self, flight: Flight) -> tuple[Lines, bool]:
        """Return a step's lines, tokens [N, W], of requests still on their rows, and whether some flag is not LIVE."""
        out = self.launcher.read(flight)
        plan, table = flight.plan, self.rows
        assert out.step == step_word(plan.step), f"outbox of step {out.step} read as step {plan.step}"
        # Kept tokens must be copied: the views end with the outbox slot. A copy is also faster to work with.
        tokens, flags = out.tokens.copy(), out.flags
        # `take` and `count_nonzero` take a third of the time of indexing and `any` for few rows.
        some_flag = bool(np.count_nonzero(flags))
        if not some_flag and self.planner.repeats(plan) and out.generations.tobytes() == flight.decoded.generations:
            # While the decode set is unchanged, no row has left; the lines are in its order.
            return Lines(flight.decoded.rows, tokens, flags.copy()), False
        rows = out.rows.astype(np.int64)
        same = table.generation.take(rows) == out.generations
        self.counters.dropped_identity += len(rows) - int(np.count_nonzero(same))
        live = same & (table.key.take(rows) != NO_REQUEST) & (flags != _INERT)
        return Lines(rows[live], tokens[live], flags[live]), some_flag

    def _end(self, number: int, flag: int) -> None:
        row = self.planner.by_row[number]
        assert row is not None, f"row {number} ended twice"
        (self.planner.fail if flag == _ERROR else self.planner.finish)(row)
        self._left(self.requests.pop(row.key))
        if self.masks is not None:
            self.masks.end(row.key)

    # Queries, for the thread that turns the loop.

    @property
    def depth(self) -> int:
        """Allowed number of steps in flight."""
        return self._depth.now(self.planner.queued)

    @property
    def counters(self) -> StepCounts:
        return self.log.counters

    @property
    def generation_tokens(self) -> int:
        """Tokens settled since the counters were reset."""
        return self.rows.appended - self._forgotten

    @property
    def records(self) -> StepRing:
        return self.log.records

    def capture(self, seconds: float = inf) -> None:
        """Capture the likely steps, as many as fit into `seconds`, with nothing in flight. Then reset all counters."""
        refused = self.launcher.graphs.warm(seconds)
        self.log.forget()
        self._forgotten = self.rows.appended
        self.counters.captures_refused = refused
        self._warns = True

    def account(self) -> Timeline:
        return self.log.account(at_rest=not self.flights and (self.frozen or not self.planner.wanting))
