"""A planner over a perfect device: pure Python, steps complete in order, `depth` of them in flight.

Everything that a plan promises is checked against a second bookkeeping, made here from the plans alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from gapless.base.errors import QueueFullError
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan.planner import Limits, Planner
from gapless.plan.sequence import Sequence, State


@dataclass
class Job:
    """One request: it stops by itself when it has `stops_at` tokens, prompt included."""

    key: int
    prompt: list[int]
    max_len: int
    stops_at: int
    priority: int = 0
    seq: Sequence | None = None
    tokens: int = 0
    """Known to the device."""
    settled: int = 0
    """Known to the host."""
    last_step: int = 0
    done: bool = False


@dataclass
class Row:
    """What the plans so far say of a row."""

    job: Job
    generation: int
    pages: dict[int, int] = field(default_factory=dict)
    prefilled: int = 0
    next: int | None = None
    """Position that the next decode step runs at most; None before the prompt is through."""
    live: bool = True
    """On the device."""


@dataclass
class Flight:
    step: int
    lines: list[tuple[int, Job, bool]]
    """(row, job, ended) of rows that got a token."""
    settles: list[tuple[Job, int]]
    """(job, known tokens with KV) after this step."""
    pages: set[int]
    """Pages that the step may touch."""
    rows: set[int]


def digests(tokens, size):
    return [repr(tokens[:end]).encode() for end in range(size, len(tokens) + 1, size)]


class Drive:
    """Limits, a planner, a perfect device, and the checks."""

    def __init__(self, rows=3, max_len=32, pages=9, size=4, tokens=8, queue=100, depth=2, priority=False, prefix=True,
                 chain=1):  # fmt: skip
        self.ledger = Ledger()
        self.pool = PagePool(pages, size, self.ledger)
        self.rows = RowTable(rows, max_len, self.ledger)
        self.limits = Limits(tokens, -(-max_len // size) + 2 * rows, queue, priority)
        self.planner = Planner(self.limits, self.pool, self.rows, self.ledger)
        self.size, self.depth, self.prefix = size, depth, prefix
        self.table: dict[int, Row] = {}
        self.flights: deque[Flight] = deque()
        self.jobs: dict[int, Job] = {}
        self.order = 0
        self.decode = (), []
        self.admitted: list[int] = []
        self.plans = 0
        self.chain, self.chained = chain, 0
        self.idle = 0
        self.cached = Counter()
        self.aborted_in: set[State] = set()

    def add(self, job: Job) -> bool:
        tokens = np.array(job.prompt, np.int32)
        known = digests(job.prompt, self.size) if self.prefix else []
        seq = Sequence(job.key, tokens, known, job.max_len, job.priority, self.order)
        try:
            self.planner.add(seq)
        except QueueFullError:
            assert len(self.planner.waiting) >= self.limits.queue
            return False
        self.order += 1
        job.seq, job.tokens, job.settled = seq, len(job.prompt), len(job.prompt)
        self.jobs[job.key] = job
        return True

    def abort(self, key: int) -> None:
        job = self.jobs[key]
        if not job.done:
            self.aborted_in.add(job.seq.state)
            job.done = True
        self.planner.abort(key)

    # One turn.

    def turn(self):
        """Plan and launch when depth allows; complete the oldest step when it does not, or nothing was planned."""
        plan = None
        if len(self.flights) < self.depth:
            before = {job.key: job.seq.state for job in self.jobs.values() if not job.done}
            coming_back = self.pool.fenced or State.ENDING in before.values()
            plans = self.planner.chain(self.chain)
            plan = plans[0] if plans else None
            self.check_chain(plans)
            self.check_preempted(before, coming_back)
            if plan is None:
                self.idle = self.idle + 1 if not self.flights and self.planner.has_work() else 0
                assert self.idle <= self.rows.size + 1, "work, nothing in flight, and no plan"
            else:
                self.idle = 0
                for each in plans:
                    self.launch(each)
        if self.flights and (plan is None or len(self.flights) >= self.depth):
            self.complete()
        self.check_accounting()
        return plan

    def check_chain(self, plans) -> None:
        assert len(plans) <= self.chain
        self.chained += max(0, len(plans) - 1)
        for further in plans[1:]:
            assert further.decode is plans[0].decode and not (further.chunks or further.admissions or further.pages)
            assert not plans[0].chunks and not len(self.planner.waiting) and not self.planner._prefill
            assert len(plans[0].pages) <= len(plans[0].decode) and plans[0].bound >= further.bound

    def launch(self, plan) -> None:
        self.plans += 1
        assert plan.step == self.plans, "steps are numbered one by one"
        self.apply(plan)
        self.check_plan(plan)
        flight = Flight(plan.step, [], [], set(), set())
        for row in plan.decode:
            entry = self.table[row]
            self.touch(flight, row)
            if entry.live:
                flight.settles.append((entry.job, entry.job.tokens))
                self.sample(flight, row)
            entry.next += 1
        for chunk in plan.chunks:
            entry = self.table[chunk.row]
            self.touch(flight, chunk.row)
            entry.prefilled += chunk.size
            flight.settles.append((entry.job, entry.prefilled))
            if chunk.last:
                entry.next = entry.prefilled
                self.sample(flight, chunk.row)
        self.flights.append(flight)

    def apply(self, plan) -> None:
        for admission in plan.admissions:
            job = self.jobs[admission.key]
            old = self.table.get(admission.row)
            assert old is None or old.generation < admission.generation, "a row was reused without a new generation"
            assert not any(admission.row in flight.rows for flight in self.flights), "a row in flight was given away"
            assert admission.length == job.tokens == job.settled, "a request came back with tokens in flight"
            assert 0 <= admission.start < admission.length and admission.start % self.size == 0
            assert job.seq.settled_pages * self.size == admission.start, "what is shared is settled, the rest is not"
            self.table[admission.row] = Row(job, admission.generation, prefilled=admission.start)
            self.admitted.append(admission.key)
            self.cached[admission.key] = max(self.cached[admission.key], admission.start)
        for write in plan.pages:
            self.table[write.row].pages[write.entry] = write.page

    def touch(self, flight, row) -> None:
        flight.rows.add(row)
        flight.pages.update(self.table[row].pages.values())
        self.table[row].job.last_step = flight.step

    def sample(self, flight, row) -> None:
        entry = self.table[row]
        job = entry.job
        job.tokens += 1
        ended = job.tokens >= min(job.stops_at, job.max_len)
        entry.live = not ended
        flight.lines.append((row, job, ended))

    def complete(self) -> None:
        """What the loop does when it observes a step."""
        flight = self.flights.popleft()
        for row, job, _ in flight.lines:
            if not job.done:
                self.rows.tokens[row, job.settled] = self.token(job, job.settled)
                self.rows.length[row] += 1
                job.settled += 1
        for job, computed in flight.settles:
            self.publish(job, computed)
        for _, job, ended in flight.lines:
            if ended and not job.done:
                job.done = True
                self.planner.finish(job.seq)
        self.ledger.advance(flight.step)

    @staticmethod
    def token(job, index) -> int:
        return job.prompt[index] if index < len(job.prompt) else (job.key * 31 + index) % 7

    def publish(self, job, computed) -> None:
        seq = job.seq
        if job.done or not self.prefix:
            return
        tokens = [self.token(job, i) for i in range(computed)]
        for page, digest in enumerate(digests(tokens, self.size)):
            if page >= seq.settled_pages:
                seq.digests[page:] = [digest]
                self.pool.publish(seq.pages[page], digest)
                seq.settled_pages += 1

    # What a plan promises.

    def check_plan(self, plan) -> None:
        planner = self.planner
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks)]
        assert len(plan.decode) + sum(chunk.size for chunk in plan.chunks) <= self.limits.tokens
        assert rows and len(set(rows)) == len(rows) and min(rows) > 0
        assert len(rows) <= self.rows.size
        entries = [(write.row, write.entry) for write in plan.pages]
        assert len(set(entries)) == len(entries) <= self.limits.page_writes
        assert {row for row, _ in entries} <= set(rows)
        lasts = [chunk.last for chunk in plan.chunks]
        assert lasts == sorted(lasts, reverse=True), "chunks that sample go first"
        decode = [(row, self.table[row].generation) for row in plan.decode]
        assert plan.decode is not self.decode[0] or decode == self.decode[1], "the old tuple for other requests"
        self.decode = plan.decode, decode
        for row in plan.decode:
            entry, seq = self.table[row], planner.by_row[row]
            assert seq is entry.job.seq and not entry.job.done
            assert entry.next <= entry.job.max_len - 2, "nobody needs the token after the last"
            assert entry.job.tokens - 1 <= entry.next, "the bound lies below the device"
            assert plan.bound >= entry.next + 1
            self.check_pages(entry, seq, entry.next)
        for chunk in plan.chunks:
            entry, seq = self.table[chunk.row], planner.by_row[chunk.row]
            assert seq is entry.job.seq and not entry.job.done
            assert chunk.start == entry.prefilled and chunk.size > 0
            assert chunk.last == (chunk.start + chunk.size == seq.length)
            self.check_pages(entry, seq, chunk.start + chunk.size - 1)

    def check_pages(self, entry, seq, position) -> None:
        for page in range(position // self.size + 1):
            assert entry.pages.get(page) == seq.pages[page] != 0, (
                f"entry {page} of the page table is not the row's page"
            )

    def check_preempted(self, before, coming_back) -> None:
        """`before` the plan these were the states, and whether pages were about to come back by themselves."""
        held = [key for key in before if self.jobs[key].seq.state is State.HELD]
        assert len(held) <= 1, f"requests {held} wait to be preempted, where one may be enough"
        for key, state in before.items():
            job = self.jobs[key]
            chosen = job.seq.state in (State.HELD, State.WAITING) and state not in (State.HELD, State.WAITING)
            assert not (chosen and coming_back), f"request {key} was preempted for pages that were coming back"
            if job.seq.state is State.WAITING and state is not State.WAITING:
                assert job.last_step <= self.ledger.completed, f"request {key} was preempted with a step in flight"
                assert job.seq.tokens.tolist() == [self.token(job, i) for i in range(job.settled)]

    def check_accounting(self) -> None:
        self.pool.check([seq.pages for seq in self.planner.by_row if seq is not None])
        counts = self.pool.counts()
        assert min(counts) >= 0 and sum(counts) == self.pool.size
        reusable = {*self.pool._free, *self.pool._cached}
        for flight in self.flights:
            assert not flight.pages & reusable, f"step {flight.step} is in flight and a page of it is free"
        assert self.planner.running == sum(seq is not None for seq in self.planner.by_row)
        assert len(self.planner.waiting) == sum(
            job.seq.state is State.WAITING for job in self.jobs.values() if not job.done
        )

    def check_at_rest(self) -> None:
        planner, counts = self.planner, self.pool.counts()
        assert not planner.has_work() and not self.flights
        assert (counts.owned, counts.fenced, planner.running) == (0, 0, 0)
        assert self.rows.available() == self.rows.size
        left = [planner._decode, planner._prefill, planner._entering, planner._held, planner._last_tick]
        assert not any(left) and not any(planner._border) and planner._ending == 0
        assert not list(self.ledger.pending())

    def drain(self, most=3000) -> None:
        for _ in range(most):
            if not self.planner.has_work() and not self.flights:
                break
            self.turn()
        self.check_at_rest()


def random_job(rng: random.Random, key: int, max_len: int, shared: list[int]) -> Job:
    prompt = shared[: rng.randrange(len(shared))] if rng.random() < 0.5 else []
    prompt = prompt + [rng.randrange(7) for _ in range(rng.randrange(1, max_len // 2))]
    prompt = prompt[: max_len - 1]
    longest = min(max_len, len(prompt) + rng.choice((1, 2, 3, 9, 30)))
    stops_at = rng.choice((longest, longest, len(prompt) + 1, rng.randrange(len(prompt) + 1, longest + 1)))
    return Job(key, prompt, longest, stops_at, rng.randrange(3))


def random_run(seed: int, chain: int = 1) -> Drive:
    """Arrivals and aborts at random on a pool that is too small; returns at rest."""
    rng = random.Random(seed)
    rows, size, max_len = rng.randrange(1, 7), rng.choice((1, 2, 4, 8)), rng.choice((8, 24, 40))
    least = -(-(max_len - 1) // size)
    drive = Drive(
        rows, max_len, 1 + least + rng.choice((0, 0, 2, least)), size, rows + rng.choice((0, 1, 5, 40)), 6,
        rng.choice((1, 2, 3, 8)), rng.random() < 0.5, rng.random() < 0.7, chain,
    )  # fmt: skip
    shared = [rng.randrange(7) for _ in range(max_len)]
    key = 0
    for _ in range(rng.randrange(20, 90)):
        for _ in range(rng.choice((0, 0, 0, 1, 4))):
            drive.add(random_job(rng, key, max_len, shared))
            key += 1
        live = [job.key for job in drive.jobs.values() if not job.done]
        if live and rng.random() < 0.08:
            drive.abort(rng.choice(live))
        drive.turn()
    drive.drain()
    return drive
