"""THE loop. Depth 1 is the reference; depth 2, 4 and 8 are the same code."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from gapless.base.errors import DeviceError, RequestError
from gapless.base.records import Flag, Int32s, Request, StepPlan, StepTokens
from gapless.device import Device, Fence
from gapless.loop.depth import Depth
from gapless.loop.logprobs import settle, with_failures
from gapless.loop.records import ChunkRecord, StepRing
from gapless.loop.timeline import Timeline
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.memory.rows import NOBODY, RowTable
from gapless.plan.planner import Planner
from gapless.plan.sequence import Sequence
from gapless.step.launcher import Flight, Launcher
from gapless.step.packet import step_word

ACCOUNTED_STEPS = 64
"""Steps that the timeline takes in at once: one by one, the same work takes the loop twice the time."""
# Plain integers: reading a member of an enumeration costs as much as an array operation.
_LIVE, _ERROR, _INERT = int(Flag.LIVE), int(Flag.ERROR), int(Flag.INERT)


class Counters:
    """What the loop counts. Everything only grows."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.admitted_tokens = 0
        self.admitted_cached = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.declined_depth = 0
        self.declined_ring = 0
        self.declined_capture = 0
        self.graph_steps = 0
        self.graph_misses = 0
        self.chained_steps = 0
        self.dropped_identity = 0


class Turn(NamedTuple):
    """What one turn of the loop has to tell."""

    started: list[tuple[int, int]]
    """(key, cached tokens) of requests that left the queue for the first time or again."""
    tokens: list[StepTokens]


class _InFlight(NamedTuple):
    flight: Flight
    in_flight: int
    work_at: int
    held_by: int
    held_until: int
    planning_at: int
    planned_at: int
    chunks: tuple[ChunkRecord, ...]
    chained: bool
    """Enqueued by the same visit as the step before it."""


class Loop:
    """plan -> launch -> observe -> commit -> retire. Not thread-safe; it waits in `_observe` and nowhere else."""

    def __init__(
        self, device: Device, launcher: Launcher, planner: Planner, pool: PagePool, rows: RowTable, ledger: Ledger,
        depth: Depth, hasher: PrefixHasher | None,
    ) -> None:  # fmt: skip
        self.counters = Counters()
        self.records = StepRing()
        self.timeline = Timeline()
        self._unaccounted: list[tuple[Any, ...]] = []
        self.planner = planner
        self._device = device
        self._launcher = launcher
        self.pool = pool
        self.rows = rows
        self._ledger = ledger
        self._depth = depth
        self._hasher = hasher
        self._flights: deque[_InFlight] = deque()
        self._requests: dict[int, Request] = {}
        self._arrivals = 0
        self._fresh: set[int] = set()
        # What the next step's record says of the time before it.
        self._work_at = self._held_by = self._held_until = 0
        self._left_at = 0
        """When the last turn ended."""

    # The edge of the loop.

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestError when it could never run."""
        if not 0 < len(request.tokens) < request.max_len:
            raise RequestError(
                f"the prompt has {len(request.tokens)} tokens: at least one is needed, and fewer than the "
                f"{request.max_len} of prompt and output together", "prompt")  # fmt: skip
        pages = -(-(request.max_len - 1) // self.pool.page_size)
        if pages > self.pool.size or request.max_len > self.rows.tokens.shape[1]:
            room = min(self.pool.size * self.pool.page_size + 1, self.rows.tokens.shape[1])
            raise RequestError(
                f"prompt and output need {request.max_len} tokens of KV memory, the engine has {room}: "
                "shorten the prompt or max_tokens", "max_tokens")  # fmt: skip
        seq = Sequence(request.key, request.tokens, [], request.max_len, request.priority, self._arrivals)
        if request.params.prompt_logprobs is not None:
            seq.to_score = len(request.tokens) - 1
        idle = not self.planner.wanting
        self.planner.add(seq)
        if idle:
            self._work_at = self._device.clock()
            self.timeline.begin(self._work_at)
        if self._hasher:
            seq.digests = self._hasher.pages(request.tokens, request.salt)
        self._arrivals += 1
        self._fresh.add(request.key)
        self._requests[request.key] = request

    def abort(self, key: int) -> None:
        """End a request without further tokens; steps in flight run on and are ignored."""
        if self._requests.pop(key, None) is not None:
            self._fresh.discard(key)
            self.planner.abort(key)

    def has_work(self) -> bool:
        return bool(self._flights) or self.planner.has_work()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # One turn.

    def turn(self) -> Turn:
        """Launch what may be, then observe what has completed; wait only when nothing else can be done."""
        turn = Turn([], [])
        if self._launcher.graphs.due and not self._flights:
            self._launcher.graphs.capture_due()
        launched = self._launch(turn)
        limit, flying = self._depth.now(len(self.planner.waiting) > 0), len(self._flights)
        must_wait = flying >= limit or not launched
        if flying >= limit:
            self._held_by = self._flights[flying - limit].flight.plan.step
        awaited = self._visit_end(flying - limit) if must_wait and flying else None
        try:
            while self._flights and (awaited or self._flights[0].flight.home.done()):
                self._observe(turn, awaited)
                awaited = None
        except DeviceError:
            # What is settled goes out first: a failed device stays failed, and the next turn says so.
            if not turn.tokens:
                raise
        self._left_at = self._device.clock()
        return turn

    def _visit_end(self, needed: int) -> Fence:
        """What to wait for: the oldest step, and those of its chain up to the one whose end lets the next be launched.

        Waking up for each would cost what the chain saves, and brings no step forward.
        """
        last = 0
        while last < needed and self._flights[last + 1].chained:
            last += 1
        return self._flights[last].flight.home

    def _launch(self, turn: Turn) -> bool:
        planning_at = self._device.clock()
        flying = len(self._flights)
        if flying >= self._depth.now(len(self.planner.waiting) > 0):
            self.counters.declined_depth += 1
            return False
        if self._launcher.graphs.due:
            self.counters.declined_capture += 1
            return False
        room = self._launcher.ready(self._depth.chain)
        if not room:
            self.counters.declined_ring += 1
            return False
        plans = self.planner.chain(room)
        if not plans:
            return False
        plan, planned_at = plans[0], self._device.clock()
        requests = [self._requests[admission.key] for admission in plan.admissions]
        flight = self._launcher.launch(plan, requests)
        chunks = self._chunks(plan) if plan.chunks else ()
        self._flights.append(
            _InFlight(flight, flying + 1, self._work_at, self._held_by, self._held_until,
                      planning_at, planned_at, chunks, False)
        )  # fmt: skip
        self._work_at = self._held_by = self._held_until = 0
        self._depth.visited(flight.packed_at - (self._left_at if flying else planning_at))
        for further in plans[1:]:
            # The first step of a visit bears its planning and packing; the others begin where the one before ends.
            enqueued_at = flight.launched_at
            flight = self._launcher.again(further)
            self._flights.append(_InFlight(flight, len(self._flights) + 1, 0, 0, 0, enqueued_at, enqueued_at, (), True))
        self.counters.chained_steps += len(plans) - 1
        self._note_admissions(turn, plan, requests)
        return True

    def _note_admissions(self, turn: Turn, plan: StepPlan, requests: list[Request]) -> None:
        for admission, request in zip(plan.admissions, requests, strict=True):
            turn.started.append((admission.key, admission.start))
            if admission.key in self._fresh:  # those that were preempted have counted before
                self._fresh.remove(admission.key)
                self.counters.admitted_tokens += len(request.tokens)
                self.counters.admitted_cached += admission.start
            self.counters.prefix_queries += admission.length
            self.counters.prefix_hits += admission.start

    def _chunks(self, plan: StepPlan) -> tuple[ChunkRecord, ...]:
        keys = self.rows.key
        return tuple([ChunkRecord(int(keys[chunk.row]), chunk.start, chunk.size) for chunk in plan.chunks])

    def _observe(self, turn: Turn, awaited: Fence | None) -> None:
        """The oldest step has completed, or will have behind `awaited`: read it, commit it, retire what it held."""
        observing_at = self._device.clock()
        entry = self._flights[0]
        if awaited:
            try:
                awaited.wait()
                if (passed := awaited.time()) > observing_at:
                    self._depth.woke(self._device.clock() - passed)
            except DeviceError:
                entry.flight.home.wait()  # raises too, unless this step of the chain had ended before
        observed_at = self._device.clock()
        self._flights.popleft()
        tokens = self._commit(entry.flight)
        if len(tokens.keys) or tokens.logprobs is not None:
            turn.tokens.append(tokens)
        self._launcher.give_back(entry.flight)
        self._ledger.advance(entry.flight.plan.step)
        self._record(entry, observing_at, observed_at, awaited is not None)

    # Commit.

    def _commit(self, flight: Flight) -> StepTokens:
        """Settle what the step sampled: host token table, prefix index, ended requests."""
        out = self._launcher.read(flight)
        plan, table = flight.plan, self.rows
        assert out.step == step_word(plan.step), f"outbox of step {out.step} read as step {plan.step}"
        rows, tokens, flags = out.rows, out.tokens, out.flags
        # `take` and `count_nonzero` do what indexing, `any` and `all` do, in a third of the time for few rows.
        same = table.generation.take(rows) == out.generations
        keys = table.key.take(rows)
        live = same & (keys != NOBODY) & (flags != _INERT)
        if np.count_nonzero(live) < len(live):
            self.counters.dropped_identity += len(same) - int(np.count_nonzero(same))
            keys, rows, tokens, flags = keys[live], rows[live], tokens[live], flags[live]
        logprobs = None
        if flight.logprobs is not None:
            logprobs, failed = settle(self._launcher.read_logprobs(flight), plan, table, self.planner.by_row)
            if len(failed):
                rows, tokens, flags = with_failures(rows, tokens, flags, failed)
                keys = table.key.take(rows)
        # Copies: the views end with the outbox slot, and the keys with their requests.
        settled = StepTokens(plan.step, keys, tokens.copy(), flags.copy(), logprobs)
        self.counters.steps += 1
        self.counters.graph_steps += flight.captured
        self.counters.graph_misses += flight.missed
        self.counters.prompt_tokens += plan.chunk_tokens
        some_end = np.count_nonzero(flags) > 0
        good = flags != _ERROR if some_end else slice(None)
        self.counters.generation_tokens += len(rows[good])
        self._append(rows[good], tokens[good])
        if self._hasher:
            self._settle_pages(flight, rows)
        if some_end:
            ended = flags != _LIVE
            for row, flag in zip(rows[ended].tolist(), flags[ended].tolist(), strict=True):
                self._end(row, flag)
        return settled

    def _end(self, row: int, flag: int) -> None:
        seq = self.planner.by_row[row]
        assert seq is not None, f"row {row} ended twice"
        if flag == _ERROR:
            self.pool.hide(seq.pages)  # logits that are not finite may come from KV that is not
        self.planner.finish(seq)
        del self._requests[seq.key]

    def _append(self, rows: Int32s, tokens: Int32s) -> None:
        table, length = self.rows, self.rows.length.take(rows)
        table.tokens[rows, length] = tokens
        table.length[rows] = length + 1

    def _settle_pages(self, flight: Flight, sampled: Int32s) -> None:
        """Full pages whose every token is known to the host become shareable."""
        for chunk in flight.plan.chunks:
            self._settle(chunk.row, chunk.start + chunk.size)
        # Every known token but the last has its KV.
        computed = self.rows.length.take(sampled) - 1
        full = computed % self.pool.page_size == 0
        if np.count_nonzero(full):
            for row, length in zip(sampled[full].tolist(), computed[full].tolist(), strict=True):
                self._settle(row, length)

    def _settle(self, row: int, computed: int) -> None:
        seq = self.planner.by_row[row]
        if seq is None:
            return  # aborted while the step was in flight
        assert self._hasher is not None
        size, digests = self.pool.page_size, seq.digests
        while (seq.settled_pages + 1) * size <= computed:
            page = seq.settled_pages
            if page == len(digests):
                parent = digests[-1] if digests else self._hasher.root(self._requests[seq.key].salt)
                digests.append(self._hasher.page(parent, self.rows.tokens[row, page * size : (page + 1) * size]))
            self.pool.publish(seq.pages[page], digests[page])
            seq.settled_pages += 1

    def _record(self, entry: _InFlight, observing_at: int, observed_at: int, waited: bool) -> None:
        flight, plan = entry.flight, entry.flight.plan
        start, end = _time(flight.started), _time(flight.ended)
        home = end if flight.home is flight.ended else _time(flight.home)
        if plan.step == self._held_by:
            self._held_until = home
        # A chained step has no packet: all its time is that of enqueueing.
        packed_at = entry.planning_at if entry.chained else flight.packed_at
        now = self._device.clock()
        record = (
            plan.step, len(plan.decode), plan.chunk_tokens, *entry[1:7], packed_at, flight.launched_at,
            start, end, home, observing_at, observed_at, now, waited, flight.missed, flight.decode_keys, entry.chunks,
        )  # fmt: skip
        self.records.put(record)
        self._unaccounted.append(record)
        if len(self._unaccounted) == ACCOUNTED_STEPS:
            self._account()
        self._depth.learn(flight.launched_at - packed_at + now - observed_at, end - start)

    def _account(self) -> None:
        """Bring the timeline up to the last record."""
        self.timeline.add(self._unaccounted)
        self._unaccounted.clear()

    # What may be asked from outside, by the thread that turns the loop.

    @property
    def depth(self) -> int:
        """Steps in flight allowed now."""
        return self._depth.now(len(self.planner.waiting) > 0)

    def capture(self) -> None:
        """Capture the steps that are likely to come. Nothing is in flight. All numbers begin again behind it."""
        self._launcher.graphs.warm()
        self.forget()

    def forget(self) -> None:
        """All numbers begin again, from now."""
        self.records.clear()
        self.counters = Counters()
        self.timeline = Timeline()
        self._unaccounted.clear()
        self.timeline.begin(self._device.clock())

    def account(self) -> Timeline:
        """The timeline up to now, where nothing is in flight; else up to the end of the last step observed."""
        self._account()
        if not self._flights and not self.planner.wanting:
            self.timeline.rest(self._device.clock())
        return self.timeline


def _time(fence: Fence) -> int:
    """When a fence of an observed step was passed. A device need not have looked at it before."""
    done = fence.done()
    assert done, "a step was observed before it had ended"
    return fence.time()
