"""The loop's edges and promises: overlap, the one place that waits, failures of a row, refusals, prefix hits."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from harness import (
    VOCAB,
    Job,
    capture_all,
    check_at_rest,
    checksum_loop,
    kernels_for,
    request,
    run,
    script,
    sizes,
    small_outbox_ring,
)
from sharpest import sharpest
from torch_internals import take_back

from gapless.base.errors import DeviceError, QueueFullError, RequestError
from gapless.base.records import Cause, Flag
from gapless.device import CpuDevice, cpu_native
from gapless.device.cpu import CpuFence
from gapless.loop.loop import NEWS_SECONDS
from gapless.loop.spec import Sizes
from gapless.memory.ledger import Clock
from gapless.memory.pages import Pin
from gapless.pace.depth import Depth
from gapless.testing.checksum import ChecksumModel, continue_prompt
from gapless.testing.loops import loop_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimBell, SimDevice, SimFence

POISON = 13
SHAPE = Sizes(rows=3, max_len=48, pages=40, page_size=4, step_tokens=16, queue=8)


def finish(loop, *requests):
    """Run requests to their end; their tokens, in order."""
    jobs = [Job(item, 0, None) for item in requests]
    run(loop, jobs)
    return [job.tokens for job in jobs]


class Gated(ChecksumModel):
    """Each forward waits until the host lets one through: an operator, so that replays of graphs do too."""

    def __init__(self):
        super().__init__(VOCAB, SHAPE.max_len)
        self.gate = threading.Semaphore(0)
        self.open = False
        self.library = torch.library.Library("gapless_tests", "FRAGMENT")
        self.library.define("gate(Tensor(a!) ids) -> ()")
        self.library.impl("gate", self.wait, "CPU")

    def wait(self, ids):
        assert self.open or self.gate.acquire(timeout=60), "the host never came"

    def forward(self, inputs, plan, cache):
        torch.ops.gapless_tests.gate(inputs.ids)
        return super().forward(inputs, plan, cache)


@pytest.fixture
def gated():
    model = Gated()
    yield model
    take_back(model.library)


# Overlap.


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("depth", sharpest([3, 1, 2, 8], 2))
def test_the_next_steps_are_packed_while_a_step_runs(depth, captured, gated, monkeypatch):
    """A step can end only once the host waits for it, so the order of the times does not depend on the machine."""
    device, model = CpuDevice(threads=1), gated
    if captured and not device.caps.captures:
        pytest.skip(f"no native streams: {cpu_native.reason()}")
    loop = loop_of(device, model, SHAPE, depth, buckets=None if captured else ())
    model.open = True
    capture_all(loop)
    model.open = False
    kind = type(device.compute.record())
    wait = kind.wait

    def let_one_through(fence, *bell):
        model.gate.release()
        return wait(fence, *bell)

    monkeypatch.setattr(kind, "wait", let_one_through)
    finish(loop, request(0, [1, 2, 3], 40))
    records = list(loop.records)
    assert [record.step for record in records] == list(range(1, 41))
    for n, record in enumerate(records):
        assert record.waited
        assert record.planning_at <= record.packed_at <= record.launched_at <= record.observing_at
        assert record.device_start <= record.device_end <= record.observed_at <= record.committed_at
        ahead = [later.packed_at < record.device_end for later in records[n + 1 : n + depth]]
        assert ahead == [True] * min(depth - 1, len(records) - n - 1), f"step {n + 1}"
        assert record.in_flight <= depth
        if n + depth < len(records):
            assert records[n + depth].planning_at > record.device_end, "more in flight than the depth allows"
    assert loop.counters.graph_steps == (39 if captured else 0)
    device.close()


def test_only_observe_waits_and_the_launch_path_never(monkeypatch):
    waits, polls = [], []

    def spy(kind, name, into):
        method = getattr(kind, name)

        def watched(fence, *bell):
            frame, names = sys._getframe(1), []
            while frame and frame.f_code.co_name != "turn":
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            into.append(tuple(names) if frame else ("outside a turn",))
            return method(fence, *bell)

        monkeypatch.setattr(kind, name, watched)

    for kind in {SimFence, CpuFence, type(CpuDevice(threads=1).compute.record())}:
        spy(kind, "wait", waits)
        spy(kind, "done", polls)
    for device in (SimDevice(1), SimDevice(2, maps_host=True), CpuDevice(threads=1)):
        jobs = script(3, 48)
        loop = checksum_loop(device, sizes(3), 4)
        run(loop, jobs)
        waited = sum(record.waited for record in loop.records)
        # A capture waits too, with nothing in flight.
        assert [names for names in waits if names[-1] != "_capture"] == [
            ("_wait", "observe", "_take_in")
        ] * waited and waited
        assert ("acquire", "ready", "ready", "plan") in {names[:4] for names in polls}
        waits.clear()
        device.close()


def test_a_decline_is_counted_with_its_cause():
    device = SimDevice(0)
    loop = checksum_loop(device, SHAPE, 2)
    small_outbox_ring(loop, 1)
    finish(loop, request(0, [1, 2, 3], 20))
    assert loop.counters.declined_ring > 0 and loop.counters.declined_depth == 0


def test_a_visit_s_steps_are_observed_together_and_their_times_add_up():
    loop = checksum_loop(SimDevice(3), SHAPE, 2, chain=4)
    loop.submit(request(0, [1, 2, 3], 33))
    while loop.has_work():
        loop.turn()
    check_at_rest(loop)
    records = list(loop.records)
    chained = [(before, record) for before, record in pairwise(records) if record.planning_at == before.launched_at]
    assert len(chained) == loop.counters.chained_steps >= 20
    for before, record in chained:
        assert record.planning_at == record.planned_at == record.packed_at <= record.launched_at
        assert not (record.work_at or record.held_by or record.held_until)
        assert record.in_flight == before.in_flight + 1 <= 2 + 4 - 1
    spans = sorted(
        span for r in records for span in ((r.planning_at, r.launched_at), (r.observing_at, r.committed_at))
    )  # fmt: skip
    assert all(first[1] <= second[0] for first, second in pairwise(spans)), "no moment of the host is counted twice"
    assert sum(record.waited for record in records) < len(records) * 2 // 3, "a wait is for more than a step"


def test_of_a_chain_that_fails_the_steps_before_count():
    device = SimDevice(0, mood="lazy")
    loop = checksum_loop(device, SHAPE, 1, chain=4)
    loop.submit(request(0, [1, 2, 3], 33))
    while not loop.counters.steps:
        loop.turn()
    program, seen = loop.launcher.executor.program, []
    forward = program.forward

    def fails_at_the_third(*args):
        seen.append(args)
        if len(seen) == 3:
            raise ArithmeticError("the third")
        forward(*args)

    program.forward = fails_at_the_third
    tokens = []
    with pytest.raises(DeviceError, match="the third"):
        for _ in range(200):
            tokens += [token for settled in loop.turn().tokens for token in settled.tokens.tolist()]
    assert tokens == continue_prompt([1, 2, 3], 33, VOCAB)[1:3]
    assert loop.counters.steps == 1 + 2, "the two before it are settled"


@pytest.mark.parametrize("maps_host", [True, False])
def test_steps_that_ended_before_a_failure_are_handed_out_before_it(maps_host):
    """Also where the failure shows first when the next step is launched."""
    device = SimDevice(0, "manual", maps_host=maps_host)
    loop = checksum_loop(device, SHAPE, 4, buckets=())
    loop.submit(request(0, [1, 2, 3], 30))
    assert [loop.turn().tokens for _ in range(3)] == [[]] * 3
    device.advance(10**6)  # all three have ended, and the host has not looked yet
    device.host_now += 10**12
    device.fail(TimeoutError("stalled"))
    settled = [token for item in loop.turn().tokens for token in item.tokens.tolist()]
    assert settled == continue_prompt([1, 2, 3], 30, VOCAB)[:3]
    with pytest.raises(DeviceError, match="stalled"):
        loop.turn()


def test_a_failure_is_raised_when_nothing_had_ended():
    device = SimDevice(0, "manual")
    loop = checksum_loop(device, SHAPE, 4, buckets=())
    loop.submit(request(0, [1, 2, 3], 30))
    loop.turn()
    device.fail(TimeoutError("stalled"))
    with pytest.raises(DeviceError, match="stalled"):
        loop.turn()


# The bell.


def test_a_bell_ends_the_turn_and_a_newcomer_is_launched_while_steps_fly(gated):
    """Nothing of the first request can be launched before its step ends; the second one does not wait for that."""
    device, model = CpuDevice(threads=1), gated
    loop = loop_of(device, model, SHAPE, 4, buckets=())
    loop.submit(request(0, [1, 2, 3], 1))
    loop.turn()
    assert loop.in_flight == 1
    ringing = threading.Timer(0.05, loop.bell.ring)
    ringing.start()
    turn = loop.turn()  # would wait for ever: nobody lets the step through
    assert turn.tokens == [] and loop.in_flight == 1 and not loop.bell.rung
    loop.submit(request(1, [4, 5], 1))
    loop.bell.ring()  # its message may ring again, after it was taken in
    assert loop.turn().started == [(1, 0)] and loop.in_flight == 2
    assert loop.turn().tokens == [] and not loop.bell.rung
    model.open = True
    model.gate.release()
    settled = []
    while loop.has_work():
        settled += loop.turn().tokens
    assert [item.keys.tolist() for item in settled] == [[0], [1]]
    waits = loop.log.timeline.host.wait
    assert waits, "time that the host waited until the bell is waiting too"
    device.close()


def test_one_ring_ends_one_wait_when_nothing_can_be_launched(monkeypatch):
    device = SimDevice(0, "lazy")
    loop = checksum_loop(device, SHAPE, 1, buckets=())
    loop.submit(request(0, [1, 2, 3], 30))
    wait, ends = SimFence.wait, []
    monkeypatch.setattr(SimFence, "wait", lambda fence, *bell: ends.append(wait(fence, *bell)) or ends[-1])
    rings = 0
    for turn in range(200):
        if turn % 3 == 0:
            loop.bell.ring()
            rings += 1
        loop.turn()
        if not loop.has_work():
            break
    assert 10 < ends.count(False) <= rings, "a ring ends one wait at most"
    assert ends.count(True) == loop.counters.steps == 30, "and keeps no step from being observed"
    check_at_rest(loop)


@pytest.mark.parametrize("depth", sharpest([2, 1, 8]))
def test_bells_at_any_moment_change_no_token(depth):
    """A program on the simulator rings whenever the adversary likes."""
    interrupted = []
    for seed in range(9):
        device = SimDevice(seed, maps_host=seed % 2 == 0)
        shape = sizes(seed)
        loop = checksum_loop(device, shape, depth, kernels=kernels_for(seed))
        jobs = script(seed, shape.max_len)
        turn, interrupt = loop.turn, loop.log.interrupted
        loop.turn = lambda turn=turn, device=device: device.bulk_out.launch(device.bell.ring) or turn()
        loop.log.interrupted = lambda interrupt=interrupt: interrupted.append(interrupt())
        run(loop, jobs)
        for job in jobs:
            assert job.tokens == (job.expected()[: len(job.tokens)] if job.flag == -1 else job.expected())
        check_at_rest(loop)
    assert len(interrupted) > 2


# Nothing but transfers to wait for.


def loading(device, shape=SHAPE):
    """A loop whose request cannot run until transfers on their way have filled their pages, and these transfers."""
    loop = checksum_loop(device, shape, 2, buckets=())
    transfers = range(1, loop.pools[0].size)
    for transfer in transfers:
        loop.pools[0].fill({loop.pools[0].take(Pin.LOAD): b"%d" % transfer}, transfer)
    loop.submit(request(0, [1, 2, 3] * 5, 5))
    return loop, transfers


def acknowledge(loop, transfers):
    for transfer in transfers:
        loop.planner.ledger.advance(Clock.BULK_IN, transfer)


@pytest.mark.parametrize("native", [True, False])
def test_with_only_transfers_pending_a_turn_lasts_until_the_bell(native, monkeypatch):
    monkeypatch.setattr("gapless.loop.loop.NEWS_SECONDS", 60.0)
    device = CpuDevice(threads=1, use_native=native)
    loop, transfers = loading(device)
    for _ in range(3):
        begin = device.clock()
        ringing = threading.Timer(0.05, loop.bell.ring)
        ringing.start()
        assert loop.turn() == ([], [], []) and not loop.in_flight and not loop.bell.rung
        assert 0.05 <= (device.clock() - begin) / 1e9 < 30, "one turn a ring, and no later"
        ringing.join()
    assert loop.log.timeline.host.wait
    acknowledge(loop, transfers)
    launched = loop.turn()
    assert launched.started == [(0, 0)]
    settled = launched.tokens
    while loop.has_work():
        settled += loop.turn().tokens
    assert [int(item.tokens[0]) for item in settled] == continue_prompt([1, 2, 3] * 5, 5, VOCAB)
    assert loop.account().idle[Cause.NO_WORK] >= 100_000_000, "what could not run was no work"
    device.close()


def test_a_transfer_that_rings_ends_the_wait_and_without_a_ring_it_is_bounded():
    device = SimDevice(0, "lazy")
    loop, transfers = loading(device)
    for waits in range(1, 4):
        loop.turn()
        assert waits <= device.host_now / 1e9 / NEWS_SECONDS < waits + 0.1
    device.bulk_in.launch(acknowledge, loop, transfers)
    device.bulk_in.launch(loop.bell.ring)
    before = device.host_now
    loop.turn()
    assert device.host_now - before < 10**7 and not loop.bell.rung
    assert loop.turn().started == [(0, 0)]


def test_an_abort_and_a_failed_device_end_what_waits_for_transfers():
    loop, _ = loading(CpuDevice(threads=1))
    loop.abort(0)
    assert not loop.has_work()
    device = CpuDevice(threads=1)
    loop, _ = loading(device)
    failing = threading.Timer(0.05, device.fail, (TimeoutError("stalled"),))
    failing.start()
    with pytest.raises(DeviceError, match="stalled"):
        loop.turn()
    failing.join()


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_without_transfers_the_loop_never_waits_for_the_bell_alone(depth, monkeypatch):
    """Nor at rest, nor when a capture is due, nor to raise a failure."""
    monkeypatch.setattr(SimBell, "wait", lambda bell, seconds: pytest.fail("it waits for the bell"))
    captured = 0
    for seed in range(4):
        device, shape = SimDevice(seed), sizes(seed)
        loop = checksum_loop(device, shape, depth, patience=1)
        run(loop, script(seed, shape.max_len), check=False)
        for _ in range(3):
            assert loop.turn() == ([], [], [])
        captured += len(loop.launcher.graphs)
        loop.submit(request(10_000, [1, 2, 3], 20))
        loop.turn()
        device.fail(TimeoutError("stalled"))
        with pytest.raises(DeviceError, match="stalled"):
            while True:
                loop.turn()
    assert captured > 4


# Capture.


def test_a_depth_that_shrinks_lets_the_steps_in_flight_run_out(monkeypatch):
    loop = checksum_loop(SimDevice(0, mood="lazy"), SHAPE, 8)
    loop.submit(request(0, [1, 2, 3], 40))
    while loop.in_flight < 6:
        loop.turn()
    monkeypatch.setattr(Depth, "now", lambda self, waiting: 2)
    while loop.has_work():
        before = loop.in_flight
        loop.turn()
        assert loop.in_flight < max(before, 2)
    assert loop.counters.declined_depth == 5


def test_counters_add_up_after_all_requests():
    loop = checksum_loop(SimDevice(4), SHAPE, 4)
    prompts = [[key, 2, 3, 4, 5, 6] for key in range(5)]
    tokens = finish(loop, *(request(key, prompt, 7) for key, prompt in enumerate(prompts)))
    counters = loop.counters
    assert loop.rows.appended == sum(map(len, tokens)) == 35
    assert counters.prompt_tokens == counters.prefix_queries == 30 and counters.prefix_hits == 0
    assert counters.steps == loop.records.after(0)[-1].step
    assert sum(record.chunk_tokens for record in loop.records) == 30


def test_a_prompt_counts_once_however_often_it_is_computed():
    preempted = 0
    for seed in range(3):
        loop = checksum_loop(SimDevice(seed), SHAPE._replace(pages=14, max_len=40), 2)
        items = [request(key, [key + 1] * 6, 30) for key in range(4)]
        finish(loop, *items, request(9, [1] * 6, 4))
        preempted += loop.planner.preemptions
        assert loop.counters.admitted_tokens == 5 * 6
        assert loop.counters.prefix_queries >= 5 * 6 and loop.counters.admitted_cached <= 4
        assert not loop.requests.fresh
    assert preempted > 1


def test_a_record_says_who_took_part():
    loop = checksum_loop(SimDevice(1), SHAPE._replace(step_tokens=4), 2)
    prompts = {5: [1, 2, 3, 4, 5, 6, 7, 8, 9], 2**40: [7, 8]}
    taken = dict.fromkeys(prompts, 0)
    for key, prompt in prompts.items():
        loop.submit(request(key, prompt, 6))
    settled = []
    while loop.has_work():
        settled += loop.turn().tokens
    of_step = {item.step: item.keys.tolist() for item in settled}
    chunks = []
    for record in loop.records:
        keys = record.decode.tolist()
        assert len(keys) == record.decode_rows and sum(chunk.size for chunk in record.chunks) == record.chunk_tokens
        chunks += record.chunks
        # A row may run on after its end, which the host did not know yet; nobody else gets a token.
        assert set(of_step.get(record.step, ())) <= {*keys, *(chunk.key for chunk in record.chunks)}
        for key in of_step.get(record.step, ()):
            taken[key] += 1
    assert taken == dict.fromkeys(prompts, 6)
    assert {key: [(c.start, c.size) for c in chunks if c.key == key] for key in prompts} == {
        5: [(0, 3), (3, 3), (6, 3)],
        2**40: [(0, 1), (1, 1)],
    }
    steady = [record.decode for record in loop.records if record.decode_rows == 2]
    assert len({id(keys) for keys in steady}) == 1 < len(steady), "by reference"


def test_step_numbers_outgrow_int32():
    loop = checksum_loop(SimDevice(14), SHAPE, 4)
    loop.planner.step = loop.planner.ledger.passed[Clock.COMPUTE] = 2**31 - 8
    assert finish(loop, request(0, [1, 2, 3], 20)) == [continue_prompt([1, 2, 3], 20, VOCAB)]
    assert loop.records.after(0)[-1].step > 2**31
    check_at_rest(loop)


# A row that fails.


class Poisoned(ChecksumModel):
    """The logits after one token are not finite."""

    def forward(self, inputs, plan, cache):
        hidden = super().forward(inputs, plan, cache)
        return torch.where((inputs.ids == POISON)[:, None], -1, hidden)

    def logits(self, hidden):
        logits = super().logits(hidden.clamp(min=0))
        return torch.where(hidden < 0, torch.nan, logits)


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_a_row_without_finite_logits_ends_with_an_error_and_disturbs_nobody(depth):
    failed = 0
    for seed in range(12):
        shape, device = sizes(seed), SimDevice(seed)
        loop = loop_of(device, Poisoned(VOCAB, shape.max_len), shape, depth)
        jobs = script(seed, shape.max_len)
        run(loop, jobs)
        for job in jobs:
            expected, prompt = job.expected(), job.request.tokens.tolist()
            if prompt[-1] == POISON or POISON in expected[:-1]:
                expected = [] if prompt[-1] == POISON else expected[: expected.index(POISON) + 1]
                failed += job.flag == Flag.ERROR
                assert job.flag in (Flag.ERROR, -1) or expected[-1] in job.request.stop_ids
            assert job.tokens == (expected[: len(job.tokens)] if job.flag == -1 else expected)
        check_at_rest(loop)
    assert failed > 3


def test_kv_of_a_failed_row_is_shared_with_nobody():
    loop = loop_of(SimDevice(0), Poisoned(VOCAB, SHAPE.max_len), SHAPE, 2)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    started = start_of(loop, request(0, [*prompt, POISON], 5))
    assert started == 0 and loop.pools[0].counts().cached == 0
    assert start_of(loop, request(1, [*prompt, 9], 1)) == 0
    assert start_of(loop, request(2, [*prompt, 9], 1)) == 8
    assert start_of(loop, request(3, [*prompt, POISON], 1)) == 8
    assert start_of(loop, request(4, [*prompt, 9], 1)) == 0, "in doubt since request 3 failed on it"


@pytest.mark.parametrize("depth", sharpest([2, 1, 8]))
def test_a_failed_row_takes_those_that_read_its_pages_out_of_the_index_too(depth):
    """They may have read what is bad, and sampled nothing from it yet."""
    loop = loop_of(SimDevice(0, "lazy"), Poisoned(VOCAB, SHAPE.max_len), SHAPE, depth)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for item in (request(0, [*prompt, POISON], 5), request(1, [*prompt, *range(20, 29)], 5)):
        loop.submit(item)
    assert loop.turn().started == [(0, 0), (1, 8)], "shared within one step"
    while 0 in loop.requests:
        loop.turn()
    assert loop.planner.by_key[1].private
    while loop.has_work():
        loop.turn()
    assert loop.pools[0].counts().cached == 0
    check_at_rest(loop)


def start_of(loop, item):
    """Run one request; how many of its tokens the prefix index had."""
    loop.submit(item)
    started = []
    while loop.has_work():
        started += loop.turn().started
    return dict(started)[item.key]


# Aborts and refusals.


@pytest.mark.parametrize("mood", ["lazy", "eager", "bursts"])
def test_an_abort_in_flight_ends_at_once_and_disturbs_nobody(mood):
    loop = checksum_loop(SimDevice(5, mood=mood), SHAPE, 8)
    jobs = [Job(request(key, [key, 1, 2], 20), 0, None) for key in range(2)]
    by_key = {job.request.key: job for job in jobs}
    for job in jobs:
        loop.submit(job.request)
    while not jobs[0].tokens or loop.in_flight < 3:
        for settled in loop.turn().tokens:
            deliver(settled, by_key)
    loop.abort(0)
    had = len(jobs[0].tokens)
    loop.abort(0)
    loop.abort(99)
    while loop.has_work():
        for settled in loop.turn().tokens:
            deliver(settled, by_key)
    assert len(jobs[0].tokens) == had < 20
    assert jobs[1].tokens == jobs[1].expected()
    check_at_rest(loop)


def test_an_aborted_request_may_come_again_at_once():
    loop = checksum_loop(SimDevice(6, mood="lazy"), SHAPE, 8)
    loop.submit(request(0, [1, 2, 3, 4, 5], 20))
    while loop.in_flight < 3:
        loop.turn()
    loop.abort(0)
    assert finish(loop, request(1, [1, 2, 3, 4, 5], 20)) == [continue_prompt([1, 2, 3, 4, 5], 20, VOCAB)]
    check_at_rest(loop)


def test_a_full_queue_refuses_and_the_others_go_on():
    loop = checksum_loop(SimDevice(7), SHAPE._replace(rows=2, queue=1), 2)
    for key in range(3):
        loop.submit(request(key, [key + 1], 4))
    with pytest.raises(QueueFullError):
        loop.submit(request(3, [3], 4))
    assert set(loop.requests) == {0, 1, 2}
    while loop.has_work():
        loop.turn()
    check_at_rest(loop)
    assert finish(loop, request(3, [3], 4)) == [continue_prompt([3], 4, VOCAB)]


@pytest.mark.parametrize("had", [0, 1, 3])
def test_requests_of_an_engine_that_died_are_queued_beyond_the_limit_and_go_on_after_their_tokens(had):
    loop = checksum_loop(SimDevice(7), SHAPE._replace(rows=2, queue=1), 2)
    whole = {key: continue_prompt([key + 1, 2, 3], 6, VOCAB) for key in range(8)}
    for key, tokens in whole.items():
        loop.submit(request(key, [key + 1, 2, 3], 6)._replace(output=np.array(tokens[:had], np.int32)))
    found = {key: tokens[:had] for key, tokens in whole.items()}
    while loop.has_work():
        for settled in loop.turn().tokens:
            for key, token, _ in settled.entries():
                found[key] = [*found[key], token]
    assert found == whole
    assert loop.counters.admitted_tokens == (0 if had else 8 * 3)
    check_at_rest(loop)


@pytest.mark.parametrize(
    ("tokens", "max_len", "field"),
    [(0, 4, "prompt"), (4, 4, "prompt"), (9, 4, "prompt"), (4, 50, "max_tokens"), (4, 2**31 - 1, "max_tokens")],
)
def test_a_request_that_can_never_run_is_refused(tokens, max_len, field):
    loop = checksum_loop(SimDevice(8), SHAPE, 2)
    item = request(0, [1] * tokens, 0)._replace(max_len=max_len)
    with pytest.raises(RequestError) as caught:
        loop.submit(item)
    assert caught.value.param == field
    assert not loop.has_work() and not loop.requests


def test_a_request_that_fills_the_pool_to_the_last_page_runs():
    shape = SHAPE._replace(pages=6)  # five of four tokens: the last token of a sequence needs no page
    loop = checksum_loop(SimDevice(9), shape, 4)
    assert finish(loop, request(0, [1, 2], 19)) == [continue_prompt([1, 2], 19, VOCAB)]
    with pytest.raises(RequestError, match="the engine has 21"):
        loop.submit(request(1, [1, 2], 20))


# The prefix index.


def test_a_prefix_known_from_before_is_not_computed_again_and_gives_the_same_tokens():
    loop = checksum_loop(SimDevice(10), SHAPE, 4)
    prompt = list(range(14))
    first = finish(loop, request(0, prompt, 9))
    ran = loop.counters.prompt_tokens
    assert finish(loop, request(1, prompt, 9)) == first == [continue_prompt(prompt, 9, VOCAB)]
    assert loop.counters.prefix_hits == 12 and loop.counters.prompt_tokens - ran == 2
    # What was generated is part of a known prefix too.
    again = prompt + first[0][:7]
    assert finish(loop, request(2, again, 2)) == [first[0][7:]]
    assert loop.counters.prefix_hits == 12 + 20


def test_the_last_known_token_always_runs():
    loop = checksum_loop(SimDevice(11), SHAPE, 4)
    prompt = list(range(16))
    assert finish(loop, request(0, prompt, 3)) == finish(loop, request(1, prompt, 3))
    assert loop.counters.prefix_hits == 12


def test_tenants_do_not_see_each_other_s_prefixes():
    loop = checksum_loop(SimDevice(12), SHAPE, 4)
    prompt = list(range(14))
    for key, (salt, hits) in enumerate((("a", 0), ("b", 0), ("", 0), ("a", 12), ("b", 24))):
        finish(loop, request(key, prompt, 3, salt=salt))
        assert loop.counters.prefix_hits == hits


def test_without_the_index_nothing_is_shared_or_kept():
    loop = checksum_loop(SimDevice(13), SHAPE, 4, prefix_caching=False)
    prompt = list(range(14))
    assert finish(loop, request(0, prompt, 5)) == finish(loop, request(1, prompt, 5))
    assert loop.counters.prefix_hits == 0 and loop.pools[0].counts().cached == 0


@pytest.mark.parametrize("depth", sharpest([4, 1, 2, 8]))
def test_equal_prompts_are_computed_once_at_any_depth(depth):
    shape = SHAPE._replace(rows=8, pages=90, step_tokens=64)
    loop, prompt = checksum_loop(SimDevice(15), shape, depth), list(range(30))
    assert finish(loop, *(request(key, prompt, 5) for key in range(8))) == [continue_prompt(prompt, 5, VOCAB)] * 8
    assert loop.counters.prompt_tokens == 30 + 7 * 2
