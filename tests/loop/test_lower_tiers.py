"""Tiers below the host tier over the checksum model: equal tokens at every depth, whatever a tier does or does not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from dictionary_tier import DictionaryTier
from harness import ask, check_at_rest, checksum_loop, run
from sharpest import sharpest
from simulation.lower import LateLine
from test_host_tier import SHAPE, SLOT, prompts
from tier_faults import flipped, spoil, swapped, truncated
from tier_kinds import TierHome

from gapless.device import CpuDevice
from gapless.loop.loop import NEWS_SECONDS
from gapless.loop.spec import HostSizes
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.offload.below import LowerTiers
from gapless.offload.copies import GroupCopies, HostCounts, PageCopy
from gapless.offload.lower import JOB_PAGES
from gapless.offload.tiers.disk import DISK_BLOCK, LOG, PAGES_FILE, DiskTier
from gapless.offload.tiers.lmcache import LMCacheTier
from gapless.offload.tiers.seam import Found, JobEnd, Namespace, TierSetup, key_of
from gapless.offload.tiers.worker import TierWorker
from gapless.pace.load_gate import HOST_SOURCE, LoadGate
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.no_race

NAMESPACE = Namespace.of({"model": "checksum"})


class Engine:
    """A loop whose device holds one prompt, whose host tier holds one, and whose tiers below hold all."""

    def __init__(self, *factories, target="", depth=2, copies=11, late_ns=10**10, lookup_ns=10**10):
        self.device = CpuDevice(threads=1)
        self.loop = checksum_loop(self.device, SHAPE, depth, host=HostSizes(copies * SLOT, 1, late_ns))
        transfers = self.loop.parts.transfers
        setup = TierSetup(str(target), 1 << 20, NAMESPACE, tuple(transfers.memory), (transfers.stride(0),))
        self.tiers = [factory(setup) for factory in factories]
        self.workers = [TierWorker(str(place), tier, self.loop.bell.ring) for place, tier in enumerate(self.tiers)]
        for worker in self.workers:
            worker.start()
        self.below = transfers.host.attach(self.workers, transfers.slot, lookup_ns)
        self.keys = 0

    def ask(self, *asked):
        """Prompts in turn, whose tokens are checked."""
        for prompt in asked:
            self.keys += 1
            job = ask(self.keys, prompt, arrives=0)
            run(self.loop, [job])
            job.check()
        check_at_rest(self.loop)
        self.loop.parts.transfers.host.check()
        return self.below.counts

    def fill(self, *asked):
        """Each of these prompts, or of the usual ones, is computed and stored."""
        for prompt in asked or prompts():
            self.ask(prompt)
            self.settle()

    def settle(self):
        """Everything that is to be stored is stored, as far as it is to be."""
        until = time.monotonic() + 60
        while self.below.jobs or self.loop.parts.transfers.busy:
            assert time.monotonic() < until, "jobs do not end"
            if self.loop.has_work():
                self.loop.turn()
            time.sleep(0)

    def close(self):
        for worker in self.workers:
            worker.close()
        self.device.close()


@pytest.fixture
def engine():
    opened = []

    def open_(*factories, **options):
        opened.append(Engine(*factories, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture
def home(request, tmp_path, tier_servers):
    """What keeps the pages of a kind of tier."""
    one = TierHome(request.param, tier_servers, tmp_path)
    yield one
    one.stop()


BELOW = ["disk", "dictionary", "fake Redis", "Redis", "Mooncake", "fake LMCache", "LMCache", "NIXL"]
SERVERS = BELOW[2:]


@pytest.mark.parametrize("home, depth", [
    pytest.param(kind, depth, marks=() if depth == 4 else pytest.mark.seeds) for kind in BELOW for depth in (1, 2, 4, 8)
    if depth == 4 or kind in ("disk", "dictionary", "fake Redis")
], indirect=["home"])  # fmt: skip
def test_pages_come_from_below_when_device_and_host_have_given_them_up(home, depth, engine):
    one = engine(home.kind.make, target=home.target, depth=depth)
    one.fill()
    (counts,) = one.ask(*prompts())
    assert counts.loaded >= 3 * 9 and counts.hits >= counts.loaded
    assert not (counts.failed or counts.refused or counts.late) and not one.loop.parts.transfers.host.counts.refused
    assert one.loop.counters.prefix_hits >= 4 * 27


def test_another_engine_finds_the_pages_of_the_first_on_disk(engine, tmp_path):
    first = engine(DiskTier, target=tmp_path)
    first.fill()
    first.close()
    second = engine(DiskTier, target=tmp_path)
    (counts,) = second.ask(*prompts())
    assert counts.loaded >= 4 * 9 and not second.loop.parts.transfers.host.counts.refused
    assert second.loop.counters.prefix_hits >= 4 * 36


def faults(tmp_path):
    """What happens to the files of a disk tier: (name, fault, whether the device has to find it)."""

    def flipped():
        data = np.fromfile(tmp_path / PAGES_FILE, np.uint8)
        data[7::SLOT] ^= 4
        data.tofile(tmp_path / PAGES_FILE)

    def swapped():
        data = np.fromfile(tmp_path / PAGES_FILE, np.uint8).reshape(-1, SLOT)
        np.roll(data, 1, 0).tofile(tmp_path / PAGES_FILE)

    def truncated():
        (tmp_path / PAGES_FILE).write_bytes((tmp_path / PAGES_FILE).read_bytes()[: 12 * SLOT + 9])

    def torn():
        (tmp_path / LOG).write_bytes((tmp_path / LOG).read_bytes()[: DISK_BLOCK + 99])

    return {
        "flipped": (flipped, True),
        "swapped": (swapped, True),
        "truncated": (truncated, False),
        "torn": (torn, False),
    }


@pytest.mark.parametrize("fault", sharpest(["torn", "flipped", "swapped", "truncated"]))
def test_a_page_changed_on_disk_is_computed_and_stored_again(fault, engine, tmp_path):
    first = engine(DiskTier, target=tmp_path)
    first.fill()
    first.close()
    strikes, seen_by_the_device = faults(tmp_path)[fault]
    strikes()
    second = engine(DiskTier, target=tmp_path)
    second.fill()
    (counts,) = second.below.counts
    assert bool(counts.refused) == seen_by_the_device and not counts.failed
    before = counts.loaded, counts.refused
    second.ask(*prompts())
    assert counts.loaded > before[0] and counts.refused == before[1], "bad pages were dropped, and stored again"


@pytest.mark.parametrize("home", SERVERS, indirect=True)
@pytest.mark.parametrize("fault", sharpest([swapped, flipped, truncated]))
def test_a_page_changed_in_other_software_is_computed_and_stored_again(home, fault, engine):
    if fault is truncated and home.kind.make is LMCacheTier:
        pytest.skip("LMCache has places of one size, so that no page is cut short")
    keys = []

    def recording(setup):
        tier = home.kind.make(setup)
        store = tier.store
        tier.store = lambda job, pages: (keys.extend([page.key for page in pages]), store(job, pages))
        return tier

    first = engine(recording, target=home.target)
    first.fill()
    first.close()
    spoil(home, [*dict.fromkeys(keys)], SLOT, fault)
    second, bad = engine(home.kind.make, target=home.target), []
    (counts,) = second.below.counts
    while not bad or bad[-1]:
        assert len(bad) < 12, "each load that fails drops a page"
        before = counts.refused + counts.failed
        second.fill()
        bad.append(counts.refused + counts.failed - before)
    assert len(bad) > 1, "the fault was meant to be found"
    assert bool(counts.refused) == (fault is flipped) and bool(counts.failed) != bool(counts.refused)
    before = counts.loaded
    second.ask(*prompts())
    assert counts.loaded >= before + 3 * 9, "bad pages were dropped, and stored again"


def test_a_failed_load_makes_the_answer_a_miss(engine):
    class Forgetful(DictionaryTier):
        asked = 0

        def load(self, job, pages):
            self.asked += 1
            super().load(job, pages[:0])
            self.ended[-1] = self.ended[-1]._replace(failed=True)

    one = engine(Forgetful)
    one.fill()
    kept = set(one.tiers[0].kept)
    (counts,) = one.ask(prompts()[0])
    one.settle()
    assert counts.failed == one.tiers[0].asked == 1 and not counts.loaded
    assert one.tiers[0].kept.keys() >= kept, "it was computed, and stored again"
    assert not one.loop.planner.has_work()


class Stuck(DictionaryTier):
    """Ends loads when it is let."""

    free = False

    def load(self, job, pages):
        if self.free:
            super().load(job, pages)
        else:
            self.waits = [*getattr(self, "waits", ()), (job, pages)]

    def poll(self):
        if self.free:
            for job, pages in self.waits:
                super().load(job, pages)
            self.waits = []
        return super().poll()


def test_a_late_load_is_computed_and_its_slots_are_its_own_until_it_ends(engine):
    one = engine(Stuck, late_ns=50_000_000)
    one.fill()
    host = one.loop.parts.transfers.host
    (counts,) = one.ask(prompts()[0])
    assert counts.late == 1 and not counts.loaded
    job = next(job for job in one.below.jobs.values() if job.loads)
    one.ask(*prompts()[1:3])
    assert all(copy.pins == 1 and not copy.gone for copy in job.copies)
    one.tiers[0].free = True
    one.settle()
    assert counts.loaded >= len(job.copies) and not host.counts.refused
    one.ask(*prompts())


def test_a_tier_that_does_not_answer_is_waited_for_no_longer_than_its_deadline(engine):
    answers = threading.Event()

    class Dead(DictionaryTier):
        def lookup(self, keys):
            answers.wait(60)
            return [Found.HIT for _ in keys]

    one = engine(Dead, lookup_ns=50_000_000)
    (counts,) = one.ask(prompts()[0])
    answers.set()
    assert counts.late == 1


@pytest.mark.process
def test_an_aborted_request_that_asked_a_slow_tier_wakes_the_loop_no_more(engine):
    answers = threading.Event()

    class Slow(DictionaryTier):
        def lookup(self, keys):
            answers.wait(10)
            return [Found.MISS for _ in keys]

    one = engine(Slow)
    one.loop.submit(ask(1, prompts()[0]).request)
    one.loop.turn()
    assert one.below.patience() is not None
    one.loop.abort(1)
    assert one.below.patience() is None, "only it has waited"
    answers.set()
    one.ask(prompts()[1])


def test_the_first_tier_that_has_a_page_loads_it_and_all_store_it(engine):
    one = engine(DictionaryTier, DictionaryTier)
    one.fill()
    first, second = one.tiers
    assert first.kept.keys() == second.kept.keys()
    one.ask(prompts()[0])
    assert one.below.counts[0].loaded and not one.below.counts[1].loaded
    first.kept.clear()
    one.ask(prompts()[1])
    assert one.below.counts[1].loaded


@pytest.mark.process
def test_a_store_is_dropped_and_counted_when_its_tier_is_too_slow(engine, monkeypatch):
    monkeypatch.setattr("gapless.offload.lower.BRAKE_SECONDS", 0.05)

    class Slow(DictionaryTier):
        def store(self, job, pages):
            time.sleep(0.05)
            super().store(job, pages)

    one = engine(Slow, copies=40)
    (counts,) = one.ask(*prompts(12))
    one.settle()
    assert counts.dropped_slow > 10 and counts.stored > 4
    before = counts.stored
    one.ask(*prompts(13)[12:])
    one.settle()
    assert counts.stored > before, "the brake is let go when what waited is stored"


def test_copies_that_made_room_before_their_store_are_counted_as_gone(engine):
    class Blocked(DictionaryTier):
        free = False

        def store(self, job, pages):
            while not self.free:
                time.sleep(0.001)
            super().store(job, pages)

    one = engine(Blocked, lookup_ns=1_000_000)
    (counts,) = one.ask(*prompts(4))
    one.tiers[0].free = True
    one.settle()
    assert counts.dropped_gone > 10 and counts.stored and len(one.tiers[0].kept) == counts.stored
    assert max(JOB_PAGES, 2) > 11 // 4, "a store holds few of the host's slots"


@pytest.mark.parametrize("times, pages", [
    ([0.005], 2), ([0.002], 4), ([0.0001], 32), ([0.0001, 0.005], 2), ([0.005, 0.0001, 0.005], 2), ([0.002, 0.0], 4),
])  # fmt: skip
@pytest.mark.parametrize("loads", [False, True])
def test_jobs_are_larger_where_pages_take_less(times, pages, loads):
    """Pages of 4 MiB, two of which a job always has. A job that moved nothing says nothing."""
    sent, size = [], 4 << 20
    line = SimpleNamespace(
        store=lambda job, some: sent.append((job, len(some))), load=lambda job, some, _: sent.append((job, len(some))),
        ask=lambda *_: None, exchange=None,
    )  # fmt: skip
    tiers = LowerTiers((line,), lambda group, slot: memoryview(bytes(size)), lambda: 0, 1, 1, LoadGate())
    group = GroupCopies(0, PagePool(3000, 16, Ledger()), 3000, HostCounts())
    for turn, seconds in enumerate((*times[:1], *times, 0.0)):  # the first load does not count for the gate
        digests = [b"%d %d" % (turn, number) for number in range(40)]
        sent.clear()
        if loads:
            search = tiers.ask([(group, digest) for digest in digests])
            search.found = {key_of(0, digest): 0 for digest in digests}
            tiers.fetch(search, [(group, digest) for digest in digests])
        else:
            for digest in digests:
                tiers.offer(PageCopy(group, digest, 0))
            tiers.store(0)
        job, count = sent[0]
        tiers.ended(
            0, JobEnd(job, (1,) * count if seconds else (), False, size * count if seconds else 0, seconds * count)
        )
    assert count == pages


def test_short_prefixes_are_not_asked_for(engine):
    one = engine(DictionaryTier)
    one.loop.planner.room.source.least_pages = 11
    (counts,) = one.ask(*prompts(), *prompts())
    assert not counts.hits and not counts.loaded


def test_a_request_whose_pages_find_no_slot_is_computed_at_once():
    device = SimDevice(3, "lazy")
    loop = checksum_loop(device, SHAPE, 2, host=HostSizes(11 * SLOT, 1, 10**10))
    host, line = loop.parts.transfers.host, LateLine({}, 1, delays=(0,), fails=0)
    host.attach([line], loop.parts.transfers.slot)

    def asked(key, prompt):
        job = ask(key, prompt, arrives=0)
        run(loop, [job])
        job.check()

    for key, prompt in enumerate(prompts()):
        asked(key, prompt)
    (group,), pinned = host.groups, [*host.groups[0].copies.values()]
    for copy in pinned:
        copy.pin()
    group.free, free = [], group.free
    begin, counts = device.host_now, host.below.counts[0]
    asked(9, prompts()[0])
    assert counts.hits and not counts.loaded
    assert device.host_now - begin < NEWS_SECONDS * 10**9, "the loop waited for the bell in vain"
    group.free += free
    for copy in pinned:
        copy.unpin()
    host.check()


def slow_down(gate):
    """The first tier takes long for a page."""
    for _ in range(2):
        gate.moved(0, 1, 10**12)


def test_a_tier_whose_loads_take_longer_than_computing_is_not_asked(engine):
    one = engine(DictionaryTier)
    one.fill()
    gate = one.loop.parts.transfers.host.gate
    gate.weighs, before = True, one.below.counts[0].hits
    slow_down(gate)
    (counts,) = one.ask(prompts()[0])
    assert counts.hits == before and not counts.loaded and one.loop.parts.transfers.host.counts.slower == 1
    gate.weighs = False
    (counts,) = one.ask(prompts()[1])
    assert counts.hits > before and counts.loaded


def test_a_trial_of_a_slow_tier_that_finds_nothing_is_used_up(engine):
    one = engine(DictionaryTier)
    gate = one.loop.parts.transfers.host.gate
    gate.weighs, counts = True, one.below.counts[0]
    for _ in range(2):
        gate.computed(100, 10**6)
        gate.moved(0, 1, 10**14)
    gate.declined(10**13)  # a trial is due
    asked = []
    for prompt in prompts(4):
        one.ask(prompt)
        asked.append(counts.missed)
    assert asked[0] > 0 and asked == asked[:1] * 4, "each has asked, or none"


def test_a_load_from_below_teaches_the_gate_what_its_pages_take(engine):
    one = engine(DictionaryTier)
    one.fill()
    one.ask(*prompts()[:2])
    gate = one.loop.parts.transfers.host.gate
    gate.weighs = True
    for _ in range(200):
        gate.computed(1, 1)  # as if tokens took nothing
    assert one.below.counts[0].loaded and not gate.pays(1, 1, one.below.least_ns(1)) and not gate.pays(1, 1), (
        "both ways are known"
    )


def test_a_page_is_computed_when_only_a_slow_tier_has_it(engine):
    class Empty(DictionaryTier):
        def lookup(self, keys):
            return [Found.MISS for _ in keys]

    one = engine(DictionaryTier, Empty)
    one.fill()
    gate = one.loop.parts.transfers.host.gate
    gate.weighs = True
    slow_down(gate)
    slow, _ = one.ask(prompts()[0])
    assert slow.hits and not slow.loaded and one.loop.parts.transfers.host.counts.slower == 1


def test_a_request_that_waited_for_room_loads_what_the_host_has_when_tiers_below_do_not_pay(engine):
    one = engine(DictionaryTier, copies=40)
    known, other, new = prompts(3)
    one.fill(known, other)
    host = one.loop.parts.transfers.host
    host.gate.weighs = True
    slow_down(host.gate)
    jobs = [ask(10, new, arrives=0), ask(11, known + new[:12], arrives=0)]
    run(one.loop, jobs)
    for job in jobs:
        job.check()
    assert host.counts.loaded >= 9 and not one.below.counts[0].hits


def test_a_request_whose_pages_load_slowly_from_host_and_below_counts_once(engine):
    one = engine(DictionaryTier, copies=40)
    known, other, new = prompts(3)
    one.fill(known + new[:12], other)
    host = one.loop.parts.transfers.host
    for copy in [*host.groups[0].copies.values()][9:12]:
        copy.lose()
    host.gate.weighs = True
    for source in (HOST_SOURCE, 0, HOST_SOURCE, 0):
        host.gate.moved(source, 1, 10**12)
    (counts,) = one.ask(known + new[:12])
    assert not (counts.hits or host.counts.loaded) and host.counts.slower == 1
