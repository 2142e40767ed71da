"""A planner over a perfect device: pure Python, steps complete in order, `depth` of them in flight.

Everything that a plan promises is checked against a second bookkeeping, made here from the plans alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import astuple, dataclass, field

import numpy as np

from gapless.base.errors import QueueFullError
from gapless.base.records import StepPlan
from gapless.memory.groups import PageGroup
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.memory.rows import RowTable
from gapless.plan.limits import Limits, most_page_writes
from gapless.plan.planner import Planner
from gapless.plan.row import Row, RowSpec, State

ONE = (PageGroup(),)


@dataclass
class Job:
    """One request: it stops by itself when it has `stops_at` tokens, prompt included."""

    key: int
    prompt: list[int]
    max_len: int
    stops_at: int
    priority: int = 0
    row: Row | None = None
    tokens: int = 0
    """Known to the device."""
    settled: int = 0
    """Known to the host."""
    last_step: int = 0
    done: bool = False
    prefixes: list[int] = field(default_factory=list)
    """A hash of each token and all before it, as far as asked for."""


@dataclass
class DeviceRow:
    """What the plans so far say of a row."""

    job: Job
    generation: int
    pages: dict[int, int] = field(default_factory=dict)
    prefilled: int = 0
    live: bool = True
    """On the device."""


@dataclass
class Flight:
    plan: StepPlan
    lines: list[tuple[int, Job, int, bool]]
    """(row, job, tokens, ended) of rows that were live."""
    pages: set[int]
    """Pages that the step may touch."""
    rows: set[int]


class Drive:
    """Limits, a planner, a perfect device, and the checks.

    A step adds `adds` (least, most) tokens to a row, at random, clipped to where it stops. `groups` are page groups.
    """

    def __init__(self, rows=3, max_len=32, pages=9, size=4, tokens=8, queue=100, depth=2, priority=False, prefix=True,
                 chain=1, adds=(1, 1), groups=ONE, seed=0, ahead=1):  # fmt: skip
        self.ledger = Ledger()
        self.pools = [PagePool(pages, size, self.ledger, group.rule) for group in groups]
        self.pool = self.pools[0]
        self.rows = RowTable(rows, max_len, self.ledger)
        writes = len(groups) * most_page_writes(rows, -(-max_len // size), size, tokens, ahead * adds[1])
        row_writes = len(groups) * -(-(ahead * adds[1] + size - 1) // size)
        self.limits = Limits(tokens, writes, queue, priority, *adds, row_writes, ahead=ahead)
        index = PrefixIndex(PrefixHasher("m", size), self.pools) if prefix else None
        self.planner = Planner(self.limits, self.pools, self.rows, self.ledger, index)
        self.size, self.depth, self.adds, self.rng = size, depth, adds, random.Random(seed)
        self.kv: dict[tuple[int, int, int], int] = {}
        """What each place (group, page, offset) holds: a hash of all tokens up to its own."""
        self.held = 0
        self.table: dict[int, DeviceRow] = {}
        self.flights: deque[Flight] = deque()
        self.jobs: dict[int, Job] = {}
        self.order = 0
        self.decode = (), []
        self.admitted: list[int] = []
        self.plans = 0
        self.chain, self.chained = chain, 0
        self.cached = Counter()
        self.aborted_in: set[State] = set()

    def add(self, job: Job) -> bool:
        tokens = np.array(job.prompt, np.int32)
        try:
            self.planner.add(RowSpec(job.key, len(tokens), job.max_len, job.priority, self.order), tokens)
        except QueueFullError:
            assert len(self.planner.waiting) >= self.limits.queue + self.rows.available()
            return False
        self.order += 1
        job.row, job.tokens, job.settled = self.planner.by_key[job.key], len(job.prompt), len(job.prompt)
        self.jobs[job.key] = job
        return True

    def abort(self, key: int) -> None:
        job = self.jobs[key]
        if not job.done:
            self.aborted_in.add(job.row.state)
            job.done = True
        self.planner.abort(key)

    # One turn.

    def turn(self):
        """Plan and launch when depth allows; complete the oldest step when it does not, or nothing was planned."""
        plan = None
        if len(self.flights) < self.depth:
            before = {job.key: job.row.state for job in self.jobs.values() if not job.done}
            coming_back = any(pool.fenced for pool in self.pools) or State.ENDING in before.values()
            plans = self.planner.chain(self.chain)
            plan = plans[0] if plans else None
            self.check_chain(plans)
            self.check_preempted(before, coming_back)
            assert plan or self.flights or not self.planner.has_work(), "work, nothing in flight, and no plan"
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
            assert not plans[0].chunks and not len(self.planner.waiting) and not self.planner.prefill
            most = self.limits.row_writes * len(plans[0].decode)
            assert len(plans[0].pages) <= most and plans[0].bound >= further.bound

    def launch(self, plan) -> None:
        self.plans += 1
        assert plan.step == self.plans, "steps are numbered one by one"
        self.apply(plan)
        self.check_plan(plan)
        flight = Flight(plan, [], set(), set())
        for row in plan.decode:
            self.touch(flight, row)
            if self.table[row].live:
                self.sample(flight, row)
        for chunk in plan.chunks:
            entry = self.table[chunk.row]
            self.touch(flight, chunk.row)
            self.write_kv(entry, chunk.start, chunk.start + chunk.size)
            entry.prefilled += chunk.size
            if chunk.last:
                self.sample(flight, chunk.row)
        # Behind all writes: a step may read what another row writes in it.
        for row in (*plan.decode, *(chunk.row for chunk in plan.chunks)):
            self.read_kv(self.table[row])
        self.flights.append(flight)

    def apply(self, plan) -> None:
        for admission in plan.admissions:
            job = self.jobs[admission.key]
            old = self.table.get(admission.row)
            assert old is None or old.generation < admission.generation, "a row was reused without a new generation"
            assert not any(admission.row in flight.rows for flight in self.flights), "a row in flight was given away"
            assert admission.length == job.tokens == job.settled, "a request came back with tokens in flight"
            assert 0 <= admission.start < admission.length and admission.start % self.size == 0
            self.table[admission.row] = DeviceRow(job, admission.generation, prefilled=admission.start)
            self.admitted.append(admission.key)
            self.cached[admission.key] = max(self.cached[admission.key], admission.start)
        for write in plan.pages:
            self.table[write.row].pages[write.group, write.entry] = write.page

    def touch(self, flight, row) -> None:
        flight.rows.add(row)
        flight.pages.update((group, page) for group, held in enumerate(self.held_by(row)) for page in held if page)
        self.table[row].job.last_step = flight.plan.step

    def held_by(self, row) -> list[list[int]]:
        return self.planner.by_row[row].by_group

    def places(self, entry, position):
        """(group, page, offset) of a position in every group."""
        number, offset = divmod(position, self.size)
        return [(group, entry.pages.get((group, number)), offset) for group in range(len(self.pools))]

    def write_kv(self, entry, start, end) -> None:
        prefixes = self.prefixes(entry.job, end)
        for position in range(start, end):
            for group, page, offset in self.places(entry, position):
                assert page in self.held_by_job(entry.job, group), f"position {position} is written to no page"
                self.kv[group, page, offset] = prefixes[position]

    def held_by_job(self, job, group) -> list[int]:
        return job.row.by_group[group]

    def read_kv(self, entry) -> None:
        """Every entry that the row's last token reads holds the row's own tokens."""
        if not entry.live:
            return
        known = entry.prefilled
        prefixes = self.prefixes(entry.job, known)
        for position in range(known):
            for (group, page, offset), pool in zip(self.places(entry, position), self.pools, strict=True):
                if position // self.size in pool.rule.passed(known, self.size):
                    continue
                assert self.kv.get((group, page, offset)) == prefixes[position], (
                    f"request {entry.job.key} reads foreign KV at {position} of group {group}"
                )

    def sample(self, flight, row) -> None:
        entry = self.table[row]
        job = entry.job
        end = min(job.stops_at, job.max_len)
        added = min(self.rng.randint(*self.adds), end - job.tokens)
        self.held += added == 0
        # The last known token runs, and all that follow but the last.
        self.write_kv(entry, job.tokens - 1, job.tokens + max(added, 1) - 1)
        entry.prefilled = job.tokens + max(added, 1) - 1
        job.tokens += added
        entry.live = job.tokens < end
        flight.lines.append((row, job, added, not entry.live))

    def complete(self) -> None:
        """What the loop does when it observes a step."""
        flight = self.flights.popleft()
        lines = [(row, job, added) for row, job, added, _ in flight.lines if not job.done]
        for row, job, added in lines:
            for _ in range(added):
                self.rows.tokens[row, job.settled] = self.token(job, job.settled)
                self.rows.length[row] += 1
                job.settled += 1
        rows = np.array([row for row, _, _ in lines], np.int32)
        self.planner.commit(flight.plan, rows)
        for _, job, _, ended in flight.lines:
            if ended and not job.done:
                job.done = True
                self.planner.finish(job.row)
        self.ledger.advance(Clock.COMPUTE, flight.plan.step)

    def prefixes(self, job, count) -> list[int]:
        """For each of the first `count` tokens or more, a hash of it and of all before it."""
        found = job.prefixes
        while len(found) < count:
            found.append(hash((found[-1] if found else None, self.token(job, len(found)))))
        return found

    @staticmethod
    def token(job, index) -> int:
        return job.prompt[index] if index < len(job.prompt) else (job.key * 31 + index) % 7

    # What a plan promises.

    def check_plan(self, plan) -> None:
        planner = self.planner
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks)]
        assert len(plan.decode) + sum(chunk.size for chunk in plan.chunks) <= self.limits.tokens
        assert rows and len(set(rows)) == len(rows) and min(rows) > 0
        assert len(rows) <= self.rows.size
        entries = [(write.row, write.group, write.entry) for write in plan.pages]
        assert len(set(entries)) == len(entries) <= self.limits.page_writes
        assert {row for row, _, _ in entries} <= set(rows)
        lasts = [chunk.last for chunk in plan.chunks]
        assert lasts == sorted(lasts, reverse=True), "chunks that sample go first"
        decode = [(row, self.table[row].generation) for row in plan.decode]
        assert plan.decode is not self.decode[0] or decode == self.decode[1], "the old tuple for other requests"
        self.decode = plan.decode, decode
        for row in plan.decode:
            entry, held = self.table[row], planner.by_row[row]
            assert held is entry.job.row and not entry.job.done
            low, high = self.bounds_of(entry.job, row)
            assert low < entry.job.max_len, "the token after the last is not needed"
            assert low <= entry.job.tokens <= high, "the device is outside of the bounds"
            after = min(high + self.adds[1], entry.job.max_len)
            assert plan.bound >= after - 1
            self.check_pages(entry, held, after - 2)
        for chunk in plan.chunks:
            entry, held = self.table[chunk.row], planner.by_row[chunk.row]
            assert held is entry.job.row and not entry.job.done
            assert chunk.start == entry.prefilled and chunk.size > 0
            assert chunk.last == (chunk.start + chunk.size == held.length)
            self.check_pages(entry, held, chunk.start + chunk.size - 1)

    def bounds_of(self, job, row) -> tuple[int, int]:
        """Of the row's tokens before this step, from what is settled and in flight."""
        flying = sum(job is line[1] for flight in self.flights for line in flight.lines)
        # A row that is inert has no line in the steps since; the host does not know that it has ended.
        inert = sum(
            row in flight.plan.decode and all(line[0] != row for line in flight.lines) for flight in self.flights
        )
        low = job.settled + self.adds[0] * flying if self.table[row].live else 0
        return low, min(job.settled + self.adds[1] * (flying + inert), job.max_len)

    def check_pages(self, entry, row, position) -> None:
        for group, held in enumerate(row.by_group):
            for number in range(position // self.size + 1):
                if held[number]:
                    assert entry.pages.get((group, number)) == held[number], (
                        f"entry {number} of the page table is not the row's page"
                    )
                else:
                    assert self.pools[group].rule.window, "a page is missing"

    def check_preempted(self, before, coming_back) -> None:
        """`before` the plan these were the states, and whether pages were about to come back by themselves."""
        held = [key for key in before if self.jobs[key].row.state is State.LEAVING]
        assert len(held) <= 1, f"requests {held} wait to be preempted, where one may be enough"
        for key, state in before.items():
            job = self.jobs[key]
            chosen = job.row.state in (State.LEAVING, State.WAITING) and state not in (State.LEAVING, State.WAITING)
            assert not (chosen and coming_back), f"request {key} was preempted for pages that were coming back"
            if job.row.state is State.WAITING and state is not State.WAITING:
                assert job.last_step <= self.ledger.completed, f"request {key} was preempted with a step in flight"
                assert job.row.tokens.tolist() == [self.token(job, i) for i in range(job.settled)]

    def check_accounting(self) -> None:
        for group, pool in enumerate(self.pools):
            pool.check([row.by_group[group] for row in self.planner.by_row if row is not None])
            counts = pool.counts()
            assert min(astuple(counts)) >= 0 and counts.total == pool.size
            reusable = {(group, page) for page in (*pool.free, *pool.cached)}
            for flight in self.flights:
                assert not flight.pages & reusable, f"step {flight.plan.step} is in flight and a page of it is free"
        assert self.planner.room.running == sum(row is not None for row in self.planner.by_row)
        assert self.planner.bounds.promised == self.planner.bounds.limit.sum()
        waiting = [job.row for job in self.jobs.values() if job.row.state is State.WAITING and not job.done]
        room = self.planner.room
        # Both bounds are functions of these three numbers.
        for row in {(row.asked.prompt, row.length, row.asked.max_len): row for row in waiting}.values():
            assert room.reserve(row) <= room.most_reserve(row), "the quick bound is one"
        assert len(self.planner.waiting) == len(waiting)

    def check_at_rest(self) -> None:
        planner = self.planner
        assert not planner.has_work() and not self.flights and planner.room.running == 0
        assert all((pool.counts().owned, pool.counts().fenced) == (0, 0) for pool in self.pools)
        assert self.rows.available() == self.rows.size
        decode = planner.decode
        left = [decode.rows, planner.prefill, decode.entering, planner.leaving, decode.ending]
        assert not any(left) and not planner.prefill.coming
        columns = planner.bounds
        assert not any(column.any() for column in (columns.limit, columns.in_flight, columns.room, columns.member))
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


def random_run(seed: int, chain: int = 1, adds=(1, 1), groups=ONE, ahead: int = 1) -> Drive:
    """Arrivals and aborts at random on a pool that is too small, at times so with pages ahead; returns at rest."""
    rng = random.Random(seed)
    rows, size, max_len = rng.randrange(1, 7), rng.choice((1, 2, 4, 8)), rng.choice((8, 24, 40))
    least = -(-(max_len - 1) // size)
    plenty = rng.choice((0, 8 * rows * least)) if ahead > 1 else 0
    drive = Drive(
        rows, max_len, 1 + plenty + least + rng.choice((0, 0, 2, least)), size, rows + rng.choice((0, 1, 5, 40)), 6,
        rng.choice((1, 2, 3, 8)), rng.random() < 0.5, rng.random() < 0.7, chain, adds, groups, seed, ahead,
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
