"""A whole engine over the checksum model, driven by a script that a seed draws. Used by several rooms' tests."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from page_contents import Contents
from torch import Tensor

from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request, StepPlan
from gapless.device import Device
from gapless.device.ring import Ring, RingSlot
from gapless.engine import checkers
from gapless.kernels.views import Filters
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.model.seam import KVCache, StepInputs
from gapless.step.keys import CutKey, ScoreKey
from gapless.step.launcher import Flight
from gapless.step.logprobs import WIDTHS
from gapless.testing.checksum import ChecksumModel, continue_prompt

# `make sim` and `make mutation` run without tests/conftest.py.
checkers.connect()

VOCAB = 97


@dataclass
class Job:
    """One request of a script, and what came of it."""

    request: Request
    arrives: int
    """At this turn."""
    aborts_after: int | None
    """Once this many of its tokens have come out."""
    tokens: list[int] = field(default_factory=list)
    flag: int | None = None

    def expected(self) -> list[int]:
        """All tokens of an undisturbed run, by direct computation."""
        request = self.request
        prompt = request.tokens.tolist()
        tokens = continue_prompt(prompt, request.max_len - len(prompt), VOCAB)
        for index, token in enumerate(tokens):
            if token in request.stop_ids:
                return tokens[: index + 1]
        return tokens


def script(seed: int, max_len: int) -> list[Job]:
    """Arrivals, shared prefixes, stop ids, lengths and aborts, all from the seed."""
    rng = random.Random(seed)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 2))] for _ in range(2)]
    jobs, turn = [], 0
    for key in range(rng.randrange(3, 9)):
        turn += rng.choice((0, 0, 1, 3, 9))
        prompt = list(rng.choice(shared)) if rng.random() < 0.6 else []
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 3))]
        length = min(max_len, len(prompt) + rng.choice((1, 2, 5, 12, 30, 30)))
        stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3))))
        request = Request(
            key=key,
            tokens=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0.0, max_tokens=None),
            seed=rng.randrange(2**63),
            stop_ids=stops,
            min_len=0,
            max_len=length,
            priority=rng.choice((0, 0, 1)),
        )
        aborts = rng.randrange(6) if rng.random() < 0.2 else None
        jobs.append(Job(request, turn, aborts))
    return jobs


def sizes(seed: int) -> Sizes:
    """A tiny engine: few rows, and a pool that barely holds one longest sequence."""
    rng = random.Random(seed + 1)
    rows, page_size, max_len = rng.randrange(2, 6), rng.choice((2, 4, 8)), 48
    least = -(-max_len // page_size)
    pages = 1 + least + rng.randrange(3)
    tokens = rows + rng.randrange(12)
    return Sizes(rows, max_len, pages, page_size, tokens, queue=64, slots=rng.randrange(1, rows + 1))


_LOOKS = torch.library.Library("gapless_looks", "DEF")
_LOOKS.define("given(int model, Tensor[] inputs, int columns, int[] plan) -> ()")
_LOOKING: WeakValueDictionary[int, LookingModel] = WeakValueDictionary()


def _given(model: int, inputs: list[Tensor], columns: int, plan: list[int]) -> None:
    _LOOKING[model].note(inputs, columns, plan)


_LOOKS.impl("given", _given, "CPU")


class LookingModel(ChecksumModel):
    """Looks at what it was given, behind each step and on its stream: a step itself reads nothing on the host.

    It is given its inputs by an operator, so that it has those of a replayed step too.
    """

    given: tuple[StepInputs, tuple[int, ...], KVCache]
    _lasting: tuple[StepInputs, KVCache]
    """Inputs whose page tables are those of every step, and the cache."""

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> Tensor:
        _LOOKING[id(self)] = self
        self._lasting = inputs, cache
        ours = [inputs.ids, inputs.positions, inputs.slots, inputs.kv_lens, inputs.rows]
        ours += [other.slots for other in inputs.others]
        torch.ops.gapless_looks.given(id(self), ours, inputs.columns, plan)
        return super().forward(inputs, plan, cache)

    def note(self, inputs: list[Tensor], columns: int, plan: list[int]) -> None:
        """The step runs, and these are its inputs."""
        lasting, cache = self._lasting
        given, slots = inputs[:5], inputs[5:]
        others = [other._replace(slots=own) for other, own in zip(lasting.others, slots, strict=True)]
        self.given = StepInputs(*given, lasting.page_table, columns, None, tuple(others)), tuple(plan), cache

    def look_now(self) -> None:
        self.look(*self.given)

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        """What `forward` was given, when the step has run. May read; an assertion that fails here fails the device."""
        raise NotImplementedError


class WaryModel(LookingModel):
    """Asserts what no token would show: inert rows write to the null page, others never, and no slot twice."""

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        slots, positions, lengths = inputs.slots.tolist(), inputs.positions.tolist(), inputs.kv_lens.tolist()
        rows, ends = inputs.rows.tolist(), itertools.accumulate(plan)
        assert all(length == 1 for row, length in zip(rows, lengths, strict=True) if row == 0), "a null row that reads"
        # Whoever stands behind the first position reads two entries or more, unless inert. Null rows stand there.
        each = zip(rows, lengths, ends, strict=True)
        inert = sum(row == 0 or (length == 1 and positions[end - 1] > 0) for row, length, end in each)
        real = [slot for slot in slots if slot >= cache.page_size]
        assert slots.count(0) == len(slots) - len(real) == inert, "the null page is for inert rows, and for all of them"
        assert len(set(real)) == len(real), "two tokens in one slot"


def look_behind_steps(loop: Loop, model: ChecksumModel) -> Loop:
    """Have a LookingModel look."""
    if not isinstance(model, LookingModel):
        return loop
    executor = loop.launcher.executor
    enqueue = executor._enqueue

    @functools.wraps(enqueue)
    def enqueue_and_look(*args: Any) -> None:
        enqueue(*args)
        loop.device.compute.launch(model.look_now)

    executor._enqueue = enqueue_and_look
    return loop


class LeaseAudit:
    """Knows from the plans alone which pages and rows each step in flight can reach, and that none is given away."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tables: dict[int, dict[int, int]] = {}
        self._reach: dict[int, tuple[set[int], dict[int, int], set[tuple[str, int]]]] = {}
        self._launch, self._relaunch = loop.launcher.launch, loop.launcher.relaunch
        loop.launcher.launch, loop.launcher.relaunch = self.launch, self.relaunch

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
            self._tables[write.row][write.entry] = write.page
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks)]
        pages = {page for row in rows for page in self._tables[row].values()}
        slots = {(name, slot) for row in rows for name, slot in self._loop.rows.leased[row].items()}
        generations = {row: int(self._loop.rows.generation[row]) for row in rows}
        self._reach[plan.step] = pages, generations, slots

    def check(self) -> None:
        pool, rows = self._loop.pool, self._loop.rows
        reusable = {*pool._free, *pool._cached}
        flying = {flight.plan.step for flight in self._loop._flights}
        self._reach = {step: reach for step, reach in self._reach.items() if step in flying}
        for step, (pages, generations, slots) in self._reach.items():
            assert not pages & reusable, f"step {step} is in flight, and pages of it are free: {pages & reusable}"
            free = [name for name, slot in slots if slot in rows.slots[name]._free]
            assert not free, f"step {step} is in flight, and slots of it are free: {free}"
            for row, generation in generations.items():
                assert row not in rows._free, f"step {step} is in flight, and row {row} of it is free"
                assert rows.generation[row] == generation, f"step {step} is in flight, and row {row} has a new owner"


def checksum_loop(
    device: Device, shape: Sizes, depth: int | None, kind: type[ChecksumModel] = ChecksumModel, **options: Any
) -> Loop:
    return model_loop(kind(VOCAB, shape.max_len), device, shape, depth, **options)


def model_loop(model: ChecksumModel, device: Device, shape: Sizes, depth: int | None, **options: Any) -> Loop:
    """An engine over a model that a test looks through. Short runs capture nothing on the way, unless `options` do."""
    options = {"patience": 16, **options}
    return look_behind_steps(build_loop(device, model, shape, depth, model_name="checksum", **options), model)


def captures_at_once(shape: Sizes) -> dict[str, Any]:
    """Options of a loop that captures what it misses once, in one bucket that is often filled up with null rows.

    With the patience of `model_loop` most scripts end before that, and so few rows all have buckets of their own.
    """
    return {"patience": 1, "buckets": (shape.rows,)}


def small_outbox_ring(loop: Loop, slots: int) -> None:
    """Give the loop another outbox ring, of so many slots at most, before it has launched anything."""
    executor = loop.launcher.executor
    lines = executor.buffers.lines
    slots = min(slots, len(lines))
    executor._outboxes = ring = loop.device.ring(slots, lines[0].numel() * 4)
    executor._home = ring.memory.view(torch.int32)
    # The device moves on from slot to slot by itself: it must know as many as the ring has.
    lines = executor._home if loop.device.maps_host else lines[:slots]
    executor.buffers = executor.buffers._replace(lines=lines, scores=lines)


def one_line_for_all(loop: Loop) -> None:
    """All steps share one outbox on the device, whose slots it counts modulo those that it knows."""
    executor = loop.launcher.executor
    lines = executor.buffers.lines[:1]
    executor.buffers = executor.buffers._replace(lines=lines, scores=lines)
    write = loop.launcher.leader.write

    def write_first(plan: Any, decision: Any, requests: Any, words: Any, outbox: int) -> None:
        write(plan, decision, requests, words, 0)

    def copy_home(outbox: Any, start: int, end: int) -> None:
        loop.device.download(outbox.tensor.view(torch.int32)[start:end], lines[0, start:end])

    loop.launcher.leader.write = write_first  # type: ignore[method-assign]
    executor._copy_home = copy_home  # type: ignore[method-assign]


def capture_all(loop: Loop) -> None:
    """Every graph that common decode steps can ask for, also of a model whose graphs depend on a bound of lengths."""
    graphs = loop.launcher.graphs
    graphs.warm()
    bounds = range(1, loop.rows.tokens.shape[1] + 1)
    wanted = {graphs.decode_key(*what) for what in itertools.product(graphs.buckets, bounds)}
    lanes = {loop.launcher.leader.lanes.size(count) for count in range(1, loop.rows.size + 1)}
    asked = [Filters(*some) for some in itertools.product((False, True), repeat=2)]
    wanted |= {CutKey(size, filters) for size in lanes for filters in asked}
    wanted |= {ScoreKey(size, width) for size in lanes for width in WIDTHS}
    graphs.capture(tuple(key for key in wanted if key is not None and not graphs.has(key)))
    loop.forget()


def run(loop: Loop, jobs: list[Job], check: bool = True, most_turns: int = 5_000) -> int:
    """Drive the loop until every job has ended; returns the number of turns. `check` looks at all leases each turn."""
    audit = LeaseAudit(loop)
    contents = contents_of(loop, jobs) if check else None
    by_key = {job.request.key: job for job in jobs}
    coming = sorted(jobs, key=lambda job: job.arrives)
    for turn in range(most_turns):
        while coming and coming[0].arrives <= turn:
            loop.submit(coming.pop(0).request)
        if not loop.has_work() and not coming:
            return turn
        for settled in loop.turn().tokens:
            deliver(settled, by_key)
        for job in jobs:
            wants_abort = job.aborts_after is not None and len(job.tokens) >= job.aborts_after
            if wants_abort and job.flag is None and job not in coming:
                loop.abort(job.request.key)
                job.flag = -1
        if check:
            check_accounting(loop)
            audit.check()
            if contents is not None:
                contents.check_settled(loop)
    raise AssertionError(f"{len(loop.planner.by_key)} requests did not end in {most_turns} turns")


def contents_of(loop: Loop, jobs: list[Job]) -> Contents | None:
    """What the jobs' pages hold, where prefixes are shared."""
    index, program = loop.planner.index, loop.launcher.executor._program
    # Reading the memory of a GPU waits for it, which these runs forbid.
    if index is None or not isinstance(program.model, ChecksumModel) or program.cache.data.is_cuda:
        return None
    contents = Contents(index.hasher)
    contents.know(([*job.request.tokens.tolist(), *job.expected()], job.request.salt) for job in jobs)
    return contents


def deliver(settled, by_key) -> None:
    lines = zip(settled.keys.tolist(), settled.tokens.tolist(), settled.flags.tolist(), strict=True)
    for key, token, flag in lines:
        job = by_key[key]
        assert job.flag is None, f"request {key} got a token after its end"
        if flag != Flag.ERROR:
            job.tokens.append(token)
        if flag != Flag.LIVE:
            job.flag = flag


def check_accounting(loop: Loop) -> None:
    """Every page is free, cached, owned or fenced, and the owners are those that hold it."""
    holders = [seq.pages for seq in loop.planner.by_row if seq is not None]
    loop.pool.check(holders)
    counts = loop.pool.counts()
    assert min(counts) >= 0 and sum(counts) == loop.pool.size, counts


def check_at_rest(loop: Loop) -> None:
    """Nothing runs, nothing is held, and no line ever came too late."""
    check_nothing_held(loop)
    assert loop.counters.dropped_identity == 0, f"{loop.counters.dropped_identity} late lines"


def check_nothing_held(loop: Loop) -> None:
    """At rest every gauge is zero: requests, steps in flight, pages, rows, leases, slots of the rings."""
    counts, rows, planner, launcher = loop.pool.counts(), loop.rows, loop.planner, loop.launcher
    assert (loop.in_flight, planner.running, len(planner.waiting)) == (0, 0, 0), "at rest, requests are there"
    assert not planner.by_key and not loop._requests, "at rest, requests are known"
    assert (counts.owned, counts.fenced) == (0, 0), f"at rest, pages are held: {counts}"
    assert rows.available() == rows.size, "at rest, rows are held"
    assert all(slots.available() == slots.size for slots in rows.slots.values()), "at rest, slots are held"
    assert not list(loop.ledger.pending()), f"at rest, leases are open: {list(loop.ledger.pending())}"
    if hasattr(launcher, "executor"):
        executor = launcher.executor
        check_ring("packet", executor._packets, [executor._packet] if executor._packet else [])
        check_ring("outbox", executor._outboxes, executor._free)


def check_ring(name: str, ring: Ring, kept: Iterable[RingSlot]) -> None:
    """Every slot is back and its fence has passed; `kept` are those that the launcher has for the next steps."""
    ours = {slot.index for slot in kept}
    held = [index for index, is_held in enumerate(ring._held) if is_held and index not in ours]
    assert not held, f"at rest, {name} slots are held: {held}"
    late = [index for index, fence in enumerate(ring._fences) if fence is not None and not fence.done()]
    assert not late, f"at rest, {name} slots wait for their fences: {late}"
