"""Where the device's time went: planted idle times on a virtual clock are found with their cause, and all adds up."""

from __future__ import annotations

import time
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from harness import VOCAB, Job, capture_all, capturing_cpu, checksum_loop, request, run, script, sizes
from sharpest import sharpest
from torch_internals import take_back

from gapless.device import CpuDevice
from gapless.engine.stats import collect
from gapless.grammar.compiler import GrammarCounts
from gapless.kernels import native
from gapless.loop.records import StepRecord, StepTable
from gapless.loop.spec import Sizes
from gapless.loop.steplog import RankWaits
from gapless.loop.timeline import Gap, StepSizes, Timeline, all_gaps, gaps_before, gaps_within
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of
from gapless.testing.sim import TICK_NS, SimDevice
from gapless.testing.world import World

SHAPE = Sizes(rows=3, max_len=64, pages=60, page_size=4, step_tokens=64, queue=8)
IDLE = ("host_late", "no_work", "copy_wait", "capture", "graph_miss", "depth", "launch", "ranks")
LONG = 10**12
"""A planted gap, far longer than everything that the simulator does by itself."""


def finish(loop, *requests):
    run(loop, [Job(item, 0, None) for item in requests], check=False)


def idle(timeline):
    return {name: timeline.idle[name] for name in IDLE}


def numbers(timeline):
    """All its totals."""
    device, sizes = timeline.device, timeline.sizes
    return [
        device.wall_ns,
        device.busy_ns,
        *device.idle_ns.values(),
        *astuple(timeline.host),
        *sizes.by_tokens,
        sizes.tokens,
    ]


def rows(*records):
    return StepTable.of(records).rows


def step(number, start, end, launched, **times):
    """A record; what is not given happened at once."""
    times = {"planning_at": launched, "planned_at": launched, "packed_at": launched, "launched_at": launched} | times
    times = {"device_start": start, "device_end": end, "home_at": end} | times
    times = {"observing_at": end, "observed_at": times["home_at"], "committed_at": times["home_at"]} | times
    copies = ("loads_from", "loads_until", "stores_from", "stores_until", "capture_from", "capture_until")
    zeros = dict.fromkeys(("work_at", "held_by", "held_until", "ranks_ns", *copies), 0)
    rest = zeros | {"missed": False, "chained": False, "in_vain": False} | times
    return StepRecord(
        step=number,
        decode_rows=1,
        chunk_tokens=0,
        in_flight=1,
        waited=True,
        decode=np.array([7]),
        chunks=(),
        **rest,
    )


# The rule, on records made by hand. The step before ended at 100; this one starts at 200.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"launched": 60}, [(100, 200, "launch")]),
        ({"launched": 180}, [(100, 180, "host_late"), (180, 200, "launch")]),
        ({"launched": 250}, [(100, 200, "host_late")]),  # still enqueueing while it ran
        ({"launched": 180, "work_at": 150}, [(100, 150, "no_work"), (150, 180, "host_late"), (180, 200, "launch")]),
        ({"launched": 180, "work_at": 90}, [(100, 180, "host_late"), (180, 200, "launch")]),
        # Held by the step whose end began the gap: one more in flight would have filled it.
        ({"launched": 180, "held_by": 4, "held_until": 100}, [(100, 180, "depth"), (180, 200, "launch")]),
        (
            {"launched": 180, "held_by": 4, "held_until": 130},
            [(100, 130, "copy_wait"), (130, 180, "depth"), (180, 200, "launch")],
        ),
        # Held by an earlier one: the host had a whole step's time to come.
        ({"launched": 180, "held_by": 3, "held_until": 60}, [(100, 180, "host_late"), (180, 200, "launch")]),
        (
            {"launched": 180, "held_by": 3, "held_until": 130},
            [(100, 130, "copy_wait"), (130, 180, "host_late"), (180, 200, "launch")],
        ),
        # The limit had let go before there was anything to run.
        (
            {"launched": 180, "held_by": 4, "held_until": 100, "work_at": 140},
            [(100, 140, "no_work"), (140, 180, "host_late"), (180, 200, "launch")],
        ),
        ({"launched": 500, "work_at": 400, "held_until": 300}, [(100, 200, "no_work")]),
        # A capture is the cause up to its end, from the end of the step before, which the loop waited for.
        (
            {"launched": 180, "capture_from": 110, "capture_until": 150},
            [(100, 150, "capture"), (150, 180, "host_late"), (180, 200, "launch")],
        ),
        (
            {
                "launched": 180,
                "capture_from": 110,
                "capture_until": 150,
                "held_by": 3,
                "held_until": 130,
                "missed": True,
            },
            [(100, 130, "copy_wait"), (130, 150, "capture"), (150, 180, "graph_miss"), (180, 200, "launch")],
        ),
        (
            {"launched": 180, "capture_from": 110, "capture_until": 150, "work_at": 160},
            [(100, 160, "no_work"), (160, 180, "host_late"), (180, 200, "launch")],
        ),
        # Enqueued kernel by kernel for want of a graph; what the depth limit cost is the limit's all the same.
        (
            {"launched": 180, "work_at": 150, "missed": True},
            [(100, 150, "no_work"), (150, 180, "graph_miss"), (180, 200, "launch")],
        ),
        (
            {"launched": 180, "held_by": 4, "held_until": 100, "missed": True},
            [(100, 180, "depth"), (180, 200, "launch")],
        ),
    ],
)
def test_idle_time_gets_the_first_cause_that_holds(given, expected):
    record = step(5, 200, 300, **given)
    found = gaps_before(rows(record), np.array([100]))
    assert [(gap.start, gap.end, gap.cause) for gap in found] == expected
    assert {gap.step for gap in found} == {5}
    timeline = Timeline()
    timeline.begin(100)
    timeline.add(rows(record))
    by_cause = dict.fromkeys(IDLE, 0)
    for gap in found:
        by_cause[gap.cause] += gap.end - gap.start
    assert idle(timeline) == by_cause and timeline.busy == 100 and timeline.covered == 300


def test_gaps_of_steps_that_are_missing_are_not_guessed():
    records = [step(1, 0, 10, 0), step(2, 15, 20, 12), step(4, 60, 70, 50)]
    assert all_gaps(StepTable.of(records)) == [Gap(10, 12, "host_late", 2), Gap(12, 15, "launch", 2)]


def test_a_clock_that_is_a_little_off_never_makes_time_twice():
    timeline = Timeline()
    timeline.begin(0)
    records = (step(1, 5, 100, 1), step(2, 98, 200, 50), step(3, 150, 190, 60), step(4, 210, 220, 70))
    for record in records:
        timeline.add(rows(record))
    together = Timeline()
    together.begin(0)
    together.add(rows(*records))
    assert numbers(together) == numbers(timeline)
    assert timeline.busy + sum(idle(timeline).values()) == timeline.covered == 220
    assert timeline.busy == 95 + 100 + 10


def test_waits_for_other_ranks_are_idle_time_within_their_step():
    records = [
        step(1, 5, 100, 1, ranks_ns=30),
        step(2, 98, 200, 50, ranks_ns=101),  # all but 1, of which the clocks make 2 less
        step(3, 200, 290, 60, ranks_ns=40, in_vain=True),
        step(4, 290, 300, 70),
    ]
    timeline = Timeline()
    timeline.begin(0)
    timeline.add(rows(*records))
    assert (timeline.idle["ranks"], timeline.idle["grammar"], timeline.busy) == (30 + 100, 90, 65 + 0 + 0 + 10)
    assert timeline.busy + timeline.idle["grammar"] + sum(idle(timeline).values()) == timeline.covered == 300
    within = [Gap(70, 100, "ranks", 1), Gap(100, 200, "ranks", 2), Gap(200, 290, "grammar", 3)]
    assert gaps_within(StepTable.of(records)) == within


def test_a_wait_of_ranks_is_given_to_one_step_at_most():
    waited = [7, 0]
    waits = RankWaits(lambda: waited)
    waited[:] = 57, 10
    assert waits.of(40) == [40, 10]  # a step after it has begun to wait
    waited[:] = 67, 10
    assert waits.of(40) == [20, 0]
    waited[:] = 99, 99
    waits.forget()
    assert waits.of(40) == [0, 0]


class Waiting(World):
    """The leader of two more: its device waits a quarter of the time, and one of the others always."""

    def waited(self):
        return [self.device.host_now // 4, 0, self.device.host_now]

    def lags(self):
        return [0, 3, 5]


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_a_loop_counts_what_its_ranks_wait_for_each_other(depth):
    world = Waiting(3, 1)
    device = world.device
    loop = checksum_loop(device, sizes(3), depth, ranks=world)
    device.host_now += LONG
    loop.log.forget()
    begin = device.host_now
    run(loop, script(3, 48), check=False)
    timeline, steps = loop.account(), loop.records.after(0)
    ran = sum(record.device_ns for record in steps)
    waited = sum(record.ranks_ns for record in steps)
    assert timeline.idle["ranks"] == waited == ran - timeline.busy
    assert 0 < waited <= (device.host_now - begin) // 4
    assert timeline.busy + sum(idle(timeline).values()) == timeline.covered - begin
    assert all(record.ranks_ns <= record.device_ns and len(record.waits) == 2 for record in steps)
    assert {record.waits[0] for record in steps} == {0} and sum(record.waits[1] for record in steps) > waited
    counts = collect(loop, 0, GrammarCounts(), 0).ranks
    assert (counts.lag, counts.waited_ns) == ((0, 3, 5), tuple(loop.launcher.ranks.waited()))


def test_steps_are_counted_by_kind_and_size():
    timeline = Timeline()
    for decode, chunk in ((1, 0), (4, 0), (5, 0), (0, 64), (3, 62)):
        timeline.add(rows(step(1, 0, 0, 0)._replace(decode_rows=decode, chunk_tokens=chunk)))
    assert replace(timeline.sizes, by_tokens=()) == StepSizes(3, 1, 1, tokens=1 + 4 + 5 + 64 + 65)
    assert timeline.sizes.by_tokens[:8] == (1, 0, 1, 1, 0, 0, 1, 1)


# Planted in a whole loop, on the virtual clock.


def test_a_planted_pause_without_work_is_no_work():
    device = SimDevice(0, mood="eager")
    loop = checksum_loop(device, SHAPE, 2)
    loop.log.forget()
    finish(loop, request(0, [1, 2, 3], 20))
    before = idle(loop.account())
    for _ in range(3):
        device.host_now += LONG
        finish(loop, request(1, [1, 2, 3], 20))
    after = idle(loop.account())
    grown = {cause: after[cause] - before[cause] for cause in IDLE}
    assert 3 * LONG <= grown["no_work"] < 3 * LONG * 1.01
    assert sum(grown.values()) - grown["no_work"] < LONG * 0.01


def slow_host(loop, device, every):
    """Planning takes LONG in every n-th step."""
    plan = loop.planner.plan

    def late():
        made = plan()
        if made is not None and made.step % every == 0:
            device.host_now += LONG
        return made

    loop.planner.plan = late


@pytest.mark.parametrize(
    ("depth", "captured", "cause"),
    [(1, True, "depth"), (2, True, "host_late"), (4, True, "host_late"), (1, False, "depth"), (4, False, "graph_miss")],
)
def test_a_host_that_is_late_is_blamed_on_what_would_have_helped(depth, captured, cause):
    """More depth, or a graph, or only a faster host."""
    device = SimDevice(0, mood="eager", maps_host=True)
    loop = checksum_loop(device, SHAPE, depth, patience=100)
    if captured:
        capture_all(loop)
    finish(loop, request(0, [1, 2, 3], 20))
    loop.log.forget()
    slow_host(loop, device, 10)
    finish(loop, request(1, [1, 2, 3], 40))
    found = idle(loop.account())
    # The first step is never held: with the whole engine at rest, it is the host alone that is late.
    planted = sum(record.step % 10 == 0 for record in loop.records)
    assert planted == 4
    assert planted * LONG * 0.99 < found[cause] < planted * LONG * 1.01
    assert sum(found.values()) - found[cause] < LONG * 0.01
    decode = [record for record in loop.records if record.decode_rows]
    assert [record.missed for record in decode] == [not captured] * 39
    assert (loop.counters.graph_steps, loop.counters.graph_misses) == ((39, 0) if captured else (0, 39))


def captures_take(loop, pause):
    """Have each capture call `pause` first."""
    device = loop.device
    capture = device.capture

    def late(key, program, buffers):
        pause()
        return capture(key, program, buffers)

    device.capture = late


@pytest.mark.parametrize("depth", [4, 1])
def test_a_slow_capture_is_the_cause_of_the_idle_time_that_it_makes(depth):
    """At rest nobody waits for it."""
    device = SimDevice(0, mood="eager")
    loop = checksum_loop(device, SHAPE, depth, patience=2)
    captures_take(loop, lambda: setattr(device, "host_now", device.host_now + LONG))
    loop.log.forget()
    finish(loop, request(0, [1, 2, 3], 40))
    found, count = idle(loop.account()), len(loop.launcher.graphs)
    assert count and count * LONG <= found["capture"] < count * LONG * 1.01
    assert sum(found.values()) - found["capture"] - found["no_work"] < LONG * 0.01
    assert count * LONG <= loop.log.timeline.host.capture < count * LONG * 1.01
    spans = [(step.capture_from, step.capture_until) for step in loop.records if step.capture_until]
    assert sum(until - begin for begin, until in spans) == loop.log.timeline.host.capture
    assert all_gaps(loop.records.after(0)) and "capture" in {gap.cause for gap in all_gaps(loop.records.after(0))}
    finish(loop, request(1, [1, 2, 3], 4), request(2, [1, 2, 3], 4))
    before = idle(loop.account())["capture"]
    while loop.rest():
        loop.turn()
    finish(loop, request(3, [1, 2, 3], 4))
    assert len(loop.launcher.graphs) > count and idle(loop.account())["capture"] == before


def test_a_slow_capture_on_a_processor_is_a_capture():
    device = capturing_cpu()
    loop = checksum_loop(device, SHAPE, 2, patience=2)
    captures_take(loop, lambda: time.sleep(0.1))
    loop.log.forget()
    finish(loop, request(0, [1, 2, 3], 40))
    found, count = idle(loop.account()), len(loop.launcher.graphs)
    assert count and found["capture"] >= count * 10**8 and loop.log.timeline.host.capture >= count * 10**8
    device.close()


# At depth 2 the host polls for the late tokens, which takes a quarter of the time on the simulator: then it is late.
@pytest.mark.parametrize(("depth", "share"), [(1, 1.0), (2, 0.75)])
def test_a_copy_that_comes_home_late_is_a_copy_wait(depth, share):
    device = SimDevice(3, mood="eager")
    loop = checksum_loop(device, SHAPE, depth)
    capture_all(loop)
    finish(loop, request(0, [1, 2, 3], 20))
    loop.log.forget()
    launch = device.token_out.launch
    slow = iter(range(10**6))

    def late(program, *args, **uses):
        if next(slow) % 10 == 5:
            device.token_out.now += LONG
        launch(program, *args, **uses)

    device.token_out.launch = late
    finish(loop, request(1, [1, 2, 3], 40))
    found = idle(loop.account())
    assert 4 * share * LONG * 0.99 < found["copy_wait"] < 4 * share * LONG * 1.01
    assert abs(sum(found.values()) - 4 * LONG) < LONG * 0.01
    assert found["copy_wait"] + found["host_late"] > 4 * LONG * 0.99
    assert loop.log.timeline.host.copy > 4 * LONG


def test_a_device_that_begins_late_is_a_launch():
    device = SimDevice(0, mood="manual", maps_host=True)
    loop = checksum_loop(device, SHAPE, 4)
    finish(loop, request(0, [1, 2, 3], 20))
    loop.log.forget()
    loop.submit(request(1, [1, 2, 3], 20))
    loop.turn()
    device.host_now += LONG
    while loop.has_work():
        loop.turn()
    found = idle(loop.account())
    assert LONG <= found["launch"] < LONG * 1.01
    assert sum(found.values()) - found["launch"] < LONG * 0.01


# Everything adds up.


@pytest.mark.parametrize("depth", sharpest([2, 1, 8]))
def test_busy_and_idle_are_all_the_time_there_was(depth):
    for seed in range(3):
        device = SimDevice(seed, maps_host=seed % 2 == 0)
        loop = checksum_loop(device, sizes(seed), depth, kernels=native.load() if seed else None)
        device.host_now += 12_345
        loop.log.forget()
        begin = device.host_now
        shown = numbers(loop.account())
        for round in range(3):
            run(loop, script(seed * 7 + round, 48), check=False)
            device.host_now += 10**7 * round
            now = numbers(loop.account())
            assert all(new >= old for new, old in zip(now, shown, strict=True)), "counters only grow"
            shown = now
        timeline = loop.log.timeline
        assert timeline.busy + sum(idle(timeline).values()) == timeline.covered - begin == timeline.device.wall_ns
        assert 0 <= device.host_now - timeline.covered <= TICK_NS
        records = loop.records.after(0)
        assert timeline.busy == sum(record.device_ns for record in records)
        # The same gaps, found from the records alone, but for the time before, after and between the rounds.
        by_cause = dict.fromkeys(IDLE, 0)
        for gap in all_gaps(records):
            by_cause[gap.cause] += gap.end - gap.start
        for cause in ("host_late", "copy_wait", "capture", "depth", "launch"):
            outside = gaps_before(records.rows[:1], np.array([begin]))
            before = sum(gap.end - gap.start for gap in outside if gap.cause == cause)
            assert timeline.idle[cause] == by_cause[cause] + before, cause


class Sleepy(ChecksumModel):
    """A forward that takes 2 ms, measured by itself: an operator, so that replays of graphs take them too."""

    def __init__(self):
        super().__init__(VOCAB, SHAPE.max_len)
        self.ns = 0
        self.library = torch.library.Library("gapless_tests", "FRAGMENT")
        self.library.define("nap(Tensor(a!) ids) -> ()")
        self.library.impl("nap", self.nap, "CPU")

    def nap(self, ids):
        begin = time.monotonic_ns()
        time.sleep(0.002)
        self.ns += time.monotonic_ns() - begin

    def forward(self, inputs, plan, cache):
        torch.ops.gapless_tests.nap(inputs.ids)
        return super().forward(inputs, plan, cache)


@pytest.fixture
def sleepy():
    model = Sleepy()
    yield model
    take_back(model.library)


@pytest.mark.parametrize(("depth", "captured"), sharpest([(8, True), (1, False), (2, True), (8, False)]))
def test_on_real_threads_the_sums_are_the_wall_time(depth, captured, sleepy):
    device, model = CpuDevice(threads=1), sleepy
    loop = loop_of(device, model, SHAPE, depth, buckets=None if captured else ())
    capture_all(loop)
    finish(loop, request(0, [1, 2, 3], 4))
    model.ns, pauses = 0, 3
    before = time.monotonic_ns()
    loop.log.forget()
    begin = time.monotonic_ns()
    for key in range(pauses):
        finish(loop, request(key + 1, [1, 2, 3], 20))
        time.sleep(0.05)
    last = time.monotonic_ns()
    timeline = loop.account()
    wall = time.monotonic_ns() - before
    total = timeline.busy + sum(idle(timeline).values())
    assert total == timeline.covered - timeline.start <= wall
    assert before <= timeline.start <= begin and timeline.covered >= last
    assert loop.counters.graph_steps == (3 * 19 if captured and device.caps.captures else 0)
    assert timeline.busy >= model.ns > 60 * 2_000_000 and timeline.idle["no_work"] >= pauses * 50_000_000
    assert timeline.busy + timeline.idle["no_work"] <= wall
    host = astuple(timeline.host)[:-2]
    assert min(host) > 0 and sum(host) <= wall
    device.close()
