"""The host tier over the checksum model: equal tokens at every depth, whatever is stored, loaded, late or spoilt."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from adapted_checksum import adapted_loop
from harness import VOCAB, ask, check_at_rest, checksum_loop, kernels_for, run
from sharpest import sharpest

from gapless.base.errors import ConfigError
from gapless.base.records import Cause
from gapless.device import CpuDevice
from gapless.kernels import native
from gapless.loop.loop import NEWS_SECONDS
from gapless.loop.spec import HostSizes, Sizes
from gapless.memory.pages import PageListener
from gapless.memory.source import NO_SOURCE
from gapless.offload.below import LowerTiers
from gapless.offload.host import BATCH_PAGES
from gapless.offload.transfers import AT_REST, MOST_BATCH
from gapless.testing.adversary import Adversary
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.no_race

SLOT = 4096
SHAPE = Sizes(rows=2, max_len=64, pages=20, page_size=4, step_tokens=64, queue=8)


def prompts(count=4, length=40):
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def rounds(loop, *, times=2):
    """Several prompts in turn, of which the device holds one, `times` over; all tokens are checked."""
    key = 0
    for _ in range(times):
        for prompt in prompts():
            key += 1
            job = ask(loop.counters.steps * 1_000 + key, prompt)
            run(loop, [job])
            job.check()
    check_at_rest(loop)
    loop.parts.transfers.host.check()
    return loop.parts.transfers.host.counts


@pytest.mark.parametrize("depth", sharpest([4, None, 1, 2, 8], keep=2))
def test_threads_load_what_the_device_has_given_up(depth):
    device = CpuDevice(threads=1)
    loop = checksum_loop(device, SHAPE, depth, host=HostSizes(100 * SLOT, 1))
    counts = rounds(loop)
    assert counts.loaded > 4 * 4 and not counts.refused
    assert loop.counters.prefix_hits >= 4 * counts.loaded
    device.close()


class Failing:
    """A copy that raises now and then, as a launch does."""

    def __init__(self, copy_pages):
        self.copy_pages, self.calls, self.raised = copy_pages, 0, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls % 4 == 0:
            self.raised += 1
            raise RuntimeError("a launch that fails")
        self.copy_pages(*args)


@pytest.mark.parametrize("direction", ["bulk_in", "bulk_out"])
@pytest.mark.unguarded
def test_an_error_in_the_launch_of_a_transfer_fails_that_transfer_alone(direction):
    for device in (SimDevice(1), CpuDevice()):
        loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1))
        way = getattr(loop.parts.transfers, direction)
        way.copy_pages = failing = Failing(way.copy_pages)
        counts = rounds(loop, times=4)
        failed = counts.refused if direction == "bulk_in" else counts.dropped_failed
        assert failing.raised and failed, "a transfer was meant to fail"
        assert counts.loaded and counts.stored, "the others go on"
        device.close()


@pytest.mark.parametrize("bits", sharpest([1, 1 << 30]))
def test_a_flipped_bit_is_computed_again(bits):
    device = SimDevice(1)
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1))
    rounds(loop, times=1)
    loop.parts.transfers.slots[0][:, 3] ^= bits
    loop.parts.transfers.slots[0][:, 5] ^= bits  # a plain sum would miss half of such pairs
    counts = rounds(loop)
    assert counts.refused > 20 and counts.loaded, "the second round stores them again"


def test_time_that_only_a_load_takes_counts_as_copy_wait():
    device = SimDevice(3, "lazy")
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1))
    rounds(loop, times=1)
    before = loop.account().idle
    rounds(loop, times=1)
    after = loop.account().idle
    assert after[Cause.COPY_WAIT] - before[Cause.COPY_WAIT] > 4 * 1_000


def test_moved_bytes_and_times_are_known_to_the_next_step():
    device = SimDevice(3, "lazy")
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1))
    counts = rounds(loop)
    transfers = loop.parts.transfers
    moved, page_bytes = transfers.report(), transfers.slots[0][0].nbytes
    assert moved.read_bytes == counts.loaded * page_bytes and moved.read_ns > 0
    assert moved.written_bytes == counts.stored * page_bytes and moved.written_ns > 0
    assert moved.loading == moved.storing == 0
    assert counts.hit == counts.loaded and counts.missed == 4 * 9, "the first round, but for each last token's page"
    steps = [*loop.records]
    loads = [(step.loads_from, step.loads_until) for step in steps]
    stores = [(step.stores_from, step.stores_until) for step in steps]
    assert sum(until > 0 for _, until in loads) == 4 and sum(until > 0 for _, until in stores) >= 3
    assert all(begin < end <= step.launched_at for step, (begin, end) in zip(steps, loads, strict=True) if end)
    spans = [span for span in stores if span[1]]
    assert all(one[1] <= other[0] for one, other in pairwise(spans)), "one transfer at a time"


def test_a_load_is_begun_by_the_turn_that_asks_for_it():
    device = SimDevice(3, "lazy")
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1))
    rounds(loop, times=1)
    before = device.host_now
    counts = rounds(loop, times=1)
    assert counts.loaded and device.host_now - before < NEWS_SECONDS * 10**9, "the loop waited for the bell in vain"


@pytest.mark.parametrize("mood", sharpest(["random", "eager", "bursts"]))
def test_the_end_of_a_load_between_two_looks_of_a_turn_ends_its_wait(mood):
    for seed in range(6):
        device = SimDevice(seed, mood)
        loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1), kernels=kernels_for(seed))
        loop.parts.transfers.most = lambda *_: 2  # so that each load is several transfers
        rounds(loop, times=1)
        before = device.host_now
        counts = rounds(loop, times=1)
        assert counts.loaded > 24 and device.host_now - before < NEWS_SECONDS * 10**9, f"seed {seed}"


def logged(monkeypatch, calls, owner, name, what):
    """Have each call of a method note `what(*args)`."""
    method = getattr(owner, name)

    def call(*args):
        calls.append(what(*args))
        return method(*args)

    monkeypatch.setattr(owner, name, call)


def test_pages_are_loaded_beside_an_adapter_while_nothing_runs(monkeypatch):
    device, begun = SimDevice(2), []
    loop = adapted_loop(device, SHAPE._replace(max_len=48), 2, host=HostSizes(100 * SLOT, 1))
    run(loop, [ask(1, prompts()[0])])
    evict(loop)
    logged(monkeypatch, begun, loop.parts.adapters, "wait", lambda *_: bool(loop.parts.transfers.bulk_in.underway))
    adapted, plain = ask(2, [1], adapter="ann"), ask(3, prompts()[0])
    run(loop, [adapted, plain])
    plain.check()
    assert begun[0] and loop.parts.transfers.host.counts.loaded >= 9


@pytest.mark.parametrize("depth", sharpest([2, 1, None]))
def test_a_step_is_launched_before_transfers_are_taken_in_or_begun(depth, monkeypatch):
    device, calls = SimDevice(2, "eager"), []
    loop = checksum_loop(device, SHAPE, depth, host=HostSizes(100 * SLOT, 1))
    logged(monkeypatch, calls, loop, "turn", lambda: "turn")
    logged(monkeypatch, calls, loop.launcher, "launch", lambda plan, _: "launch" if plan.decode else "first")
    for way in (loop.parts.transfers.bulk_in, loop.parts.transfers.bulk_out):
        logged(monkeypatch, calls, way, "begin", lambda *_: "transfer")
        logged(monkeypatch, calls, way, "ended", lambda: "transfer")
    rounds(loop)
    turns = " ".join(calls).split("turn")
    both = [turn.split() for turn in turns if "launch" in turn and "transfer" in turn]
    assert len(both) > 20 and all(turn[0] == "launch" for turn in both)


def test_loads_that_no_running_request_is_beside_queue_one_behind_another(monkeypatch):
    device, sizes_ = SimDevice(2, "lazy"), []
    shape = SHAPE._replace(max_len=300, pages=90)
    loop = checksum_loop(device, shape, 2, host=HostSizes(200 * SLOT, 1))
    known = prompts(1, 280)[0]
    run(loop, [ask(1, known)])
    evict(loop)
    way = loop.parts.transfers.bulk_in
    logged(monkeypatch, sizes_, way, "begin", lambda batch, _: (len(batch.moves), way.moving))
    loop.parts.transfers.page_ns = 1e9  # beside running rows it would begin few
    run(loop, [ask(2, known)])
    assert sizes_ == [(AT_REST, 0), (5, AT_REST)]
    counts = loop.parts.transfers.host.counts
    assert (counts.loaded, counts.refused) == (AT_REST + 5, 0), "each has places and checksums of its own"


def test_transfers_beside_running_rows_have_the_pages_that_a_tenth_of_the_time_allows():
    device = SimDevice(2)
    transfers = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1)).parts.transfers
    assert transfers.most(10**9) == BATCH_PAGES, "nothing is measured"
    transfers.page_ns, transfers.host.running = 1000, 1
    assert [transfers.most(passed) for passed in (1, 10**6, 10**9)] == [BATCH_PAGES, 100, MOST_BATCH]
    transfers.host.running = 0
    assert transfers.most(1) == AT_REST


def test_transfers_that_begin_in_one_look_share_its_tenth_of_the_time(monkeypatch):
    device, most = SimDevice(2), []
    transfers = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 1)).parts.transfers
    transfers.poll()
    transfers.page_ns, transfers.host.running = 1000, 1
    monkeypatch.setattr(transfers.host, "next_load", lambda pages: most.append(pages) or "batch")
    monkeypatch.setattr(transfers.host, "next_store", most.append)
    monkeypatch.setattr(transfers.bulk_in, "begin", lambda batch, _: transfers.bulk_in.underway.append(batch) or 60)
    device.host_now += 10**6
    transfers.poll()
    assert most == [100, 40]


def evict(loop):
    pages = [loop.pools[0].take() for _ in range(loop.pools[0].available())]
    loop.pools[0].retire(pages, 0)


class SlowSteps(Adversary):
    """Moves the streams of steps only where nothing else can move."""

    def __init__(self):
        super().__init__(random.Random(1), "manual")

    def forced(self, ready, needed):
        return next((stream for stream in ready if stream.name.startswith("bulk")), needed)


@pytest.mark.parametrize("peers", [False, True])
def test_the_end_of_a_load_is_seen_within_a_step_and_that_of_a_store_where_peers_wait_for_it(peers, monkeypatch):
    monkeypatch.setattr(LowerTiers, "gives", peers)
    device, (known, other, *_) = SimDevice(1), prompts()
    loop = checksum_loop(device, SHAPE._replace(pages=30), 2, host=HostSizes(100 * SLOT, 1))
    run(loop, [ask(1, known, new=1)])
    evict(loop)
    device.adversary = SlowSteps()
    seen, transfers = {}, loop.parts.transfers
    for way, ends in ((transfers.bulk_in, "loaded"), (transfers.bulk_out, "stored")):
        for owner, name in ((way, "begin"), (transfers.host, ends)):
            steps = seen.setdefault(ends, {}).setdefault(name, [])
            logged(monkeypatch, steps, owner, name, lambda *_: loop.counters.steps)
    loop.submit(ask(2, other, new=20).request)
    while loop.counters.steps < 4:
        loop.turn()
    loop.submit(ask(3, known).request)
    while not transfers.host.counts.loaded or loop.planner.room.running < 2:
        loop.turn()
    assert seen["loaded"]["begin"] == seen["loaded"]["loaded"], "no step ended meanwhile"
    assert (seen["stored"]["begin"][0] == seen["stored"]["stored"][0]) == peers


def test_a_request_whose_load_ends_within_a_step_begins_beside_it():
    device, (known, other, *_) = SimDevice(1), prompts()
    loop = checksum_loop(device, SHAPE._replace(pages=30), 2, host=HostSizes(100 * SLOT, 1))
    run(loop, [ask(1, known, new=1)])
    evict(loop)
    device.adversary = SlowSteps()
    loop.submit(ask(2, other, new=1).request)
    loop.turn()
    loop.submit(ask(3, known).request)
    started = []
    while 3 not in started:
        flying = loop.in_flight
        started += [key for key, _ in loop.turn().started]
    assert flying == 1, "the step that ran when it began to wait"


def test_a_request_waits_once_for_a_load_that_does_not_come():
    late_ns = 5_000_000
    device, (known, other, *_) = SimDevice(1, "eager"), prompts()
    shape = Sizes(rows=2, max_len=2_000, pages=600, page_size=4, step_tokens=64, queue=8)
    loop = checksum_loop(device, shape, 2, host=HostSizes(100 * SLOT, 1, late_ns), kernels=native.load())
    run(loop, [ask(1, known)])
    evict(loop)
    bulk_in = loop.parts.transfers.bulk_in
    bulk_in.ended = lambda: None
    loop.submit(ask(2, other, new=1_900).request)  # decodes meanwhile
    loop.turn()
    loop.submit(ask(3, known).request)
    began = device.host_now
    while not any(key == 3 for key, _ in loop.turn().started):
        assert device.host_now - began < 2 * late_ns
    assert loop.parts.transfers.host.counts.late == 1
    del bulk_in.ended
    loop.abort(2)
    while loop.has_work():
        loop.turn()
    check_at_rest(loop)


def test_a_load_for_one_that_waits_preempts_nobody():
    device, (known, other) = SimDevice(1, "lazy"), prompts(2, 120)
    loop = checksum_loop(
        device, Sizes(2, 160, 41, 4, 64, 8), 2, by_priority=True, host=HostSizes(100 * SLOT, 1, 10**12)
    )
    run(loop, [ask(1, known)])
    evict(loop)
    loop.planner.room.expected = 0
    running = ask(2, other[:8], new=120, priority=-1)
    run(loop, [running, ask(3, known, arrives=6)])
    running.check()
    assert loop.planner.preemptions == 0


def test_short_prefixes_are_computed_without_a_wait():
    device = SimDevice(5)
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(100 * SLOT, 41))
    counts = rounds(loop)
    assert counts.stored and not counts.loaded


def test_an_engine_without_a_tier_has_nothing_of_it():
    device = SimDevice(6)
    loop = checksum_loop(device, SHAPE, 2)
    nothing = loop.parts.transfers is None and loop.planner.room.source is NO_SOURCE
    assert nothing and type(loop.pools[0].watcher) is PageListener
    with pytest.raises(ConfigError, match=r"host:4095 holds no page of 4,096 bytes: give more"):
        checksum_loop(device, SHAPE, 2, host=HostSizes(4095))
