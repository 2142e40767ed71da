"""Prefill and decode apart over the checksum model: equal tokens at every depth, whatever becomes of the other side."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness import ask, check_at_rest, checksum_loop, run
from peer_rig import KEY, WrongPeer
from sharpest import sharpest
from test_host_tier import SHAPE, SLOT, prompts
from waiting import until

from gapless.base.peers import PeerAddress, PeerPlan
from gapless.base.records import KVTransfer
from gapless.base.shared import SharedMemory
from gapless.device import CpuDevice
from gapless.loop.spec import HostSizes
from gapless.offload.host import HostTier
from gapless.offload.tiers.frames import PeerError
from gapless.offload.tiers.peer import PeerWorker, open_peer_tier
from gapless.offload.tiers.seam import Found, Namespace, TierSetup, key_of
from gapless.offload.waits import TierSource
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.no_race

NAMESPACE = Namespace.of({"model": "checksum"})
OTHER = Namespace.of({"model": "another"})


class Side:
    """A loop with a peer tier: it gives pages at `listen`, and takes them from `peer`."""

    def __init__(self, listen=None, peer=None, depth=2, copies=11, shelf=1 << 20, key=KEY, namespace=NAMESPACE, sim=0):
        self.device = SimDevice(sim, maps_host=sim % 2 == 0) if sim else CpuDevice(threads=1)
        self.loop = checksum_loop(
            self.device, SHAPE, depth, host=HostSizes(copies * SLOT, 1, given=shelf if listen else 0)
        )
        transfers = self.loop.parts.transfers
        setup = TierSetup("", shelf, namespace, tuple(transfers.memory), (transfers.stride(0),), transfers.shared)
        listens = PeerAddress(path=str(listen)) if listen else None
        peers = (PeerAddress(path=str(peer)),) if peer else ()
        self.tier = open_peer_tier(setup, PeerPlan(listens, peers, key), transfers.adopt, back_off=0.02)
        self.worker = PeerWorker("peer", self.tier, self.loop.bell.ring)
        self.worker.start()
        self.below = transfers.host.attach([self.worker], transfers.slot, 10**10)
        (self.counts,) = self.below.counts
        self.keys = 0
        self.closed = False

    def ask(self, prompt, offer="", claim="", new=6, aborts_after=None):
        """Run a prompt; its tokens are checked. Returns how long it took."""
        self.keys += 1
        job = ask(self.keys, prompt, new=new, transfer=KVTransfer(offer, claim))
        job.aborts_after = aborts_after
        begin = time.monotonic()
        run(self.loop, [job], most_turns=10**6)
        seconds = time.monotonic() - begin
        job.check()
        check_at_rest(self.loop)
        self.loop.parts.transfers.host.check()
        return seconds

    def settle(self):
        late = time.monotonic() + 60
        while self.below.jobs or self.loop.parts.transfers.busy:
            assert time.monotonic() < late, "jobs do not end"
            if self.loop.has_work():
                self.loop.turn()
            time.sleep(0)

    def prefill(self, prompt, name):
        self.ask(prompt, offer=name, new=1)
        self.settle()

    def pages(self):
        """What a peer may take, by key."""
        shelf, chain = self.tier.shelf, self.loop.planner.index.chain
        found = {}
        for prompt in prompts(8):
            tokens = np.array(prompt, np.int32)
            for digest in chain(tokens, "").up_to(10).reach(10, tokens):
                if (page := shelf.lend(key_of(0, digest))) is not None:
                    found[key_of(0, digest)] = bytes(page.data), page.checksum
                    shelf.give_back([page])
        return found

    def close(self):
        if not self.closed:
            self.closed = True
            self.worker.close()
            self.device.close()


@pytest.fixture
def side():
    opened = []

    def open_(**options):
        opened.append(Side(**options))
        return opened[-1]

    yield open_
    for one in reversed(opened):
        one.close()


@pytest.fixture
def pair(side, tmp_path):
    """(a prefiller, a decoder)"""
    path = tmp_path / "p.sock"
    return side(listen=path), side(peer=path)


def all_but_one(prefiller, name, ready=None):
    """Give all pages of a prompt but one, as if that one were computed until `ready`, under this name."""
    prefiller.prefill(prompts()[0], "R")
    shelf = prefiller.tier.shelf
    shelf.drop([[*prefiller.pages()][8]])
    shelf.begin(name)
    if ready is not None:
        threading.Thread(target=lambda: (until(ready), shelf.end(name)), daemon=True).start()


def turned(side, done):
    side.loop.turn()
    return done()


@pytest.mark.parametrize("depth", sharpest([4, 1, 2, 8]))
def test_the_decoder_computes_missing_pages_and_no_more(depth, side, tmp_path):
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path, depth=depth), side(peer=path, depth=depth)
    for number, prompt in enumerate(prompts(6)):
        prefiller.prefill(prompt, f"R{number}")
        decoder.ask(prompt, claim=f"R{number}")
    counts = decoder.counts
    assert counts.loaded >= 6 * 9 and counts.hits >= counts.loaded
    assert not (counts.failed or counts.refused or counts.late or counts.stored)
    assert decoder.loop.counters.prefix_hits >= 6 * 36
    assert prefiller.counts.stored >= 6 * 10 and not prefiller.counts.loaded


def test_the_decoder_loads_pages_while_the_prefiller_computes_the_next_ones(side, tmp_path):
    prefiller, decoder = side(listen=tmp_path / "p.sock"), side(peer=tmp_path / "p.sock", copies=20)
    counts, host = decoder.counts, decoder.loop.parts.transfers.host.counts
    all_but_one(prefiller, "S", lambda: counts.loaded == host.loaded == 8)  # they are on the device too
    decoder.ask(prompts()[0], claim="S")
    assert (counts.loaded, counts.hits, counts.missed) == (8, 8, 1)


def test_pages_are_read_where_the_prefiller_has_them_and_go_back(pair):
    prefiller, decoder = pair
    for number, prompt in enumerate(prompts(3)):
        prefiller.prefill(prompt, f"R{number}")
        decoder.ask(prompt, claim=f"R{number}")
    counts, host = decoder.counts, decoder.loop.parts.transfers.host
    assert counts.lent == counts.loaded == host.counts.loaded >= 3 * 9 and not counts.refused
    until(lambda: not prefiller.tier.shelf.lent)
    assert not decoder.below.holding()
    decoder.settle()
    assert host.counts.stored <= 3 * 2, "what was computed: the prefiller's host tier has the rest"


def test_a_page_from_a_peer_wakes_the_thread_that_waits_for_it(side, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.peer.LOOKUP_SECONDS", 60.0)  # how often it looks otherwise
    prefiller, decoder = side(listen=tmp_path / "p.sock"), side(peer=tmp_path / "p.sock")
    prefiller.prefill(prompts()[0], "R")
    monkeypatch.setattr("gapless.offload.below.CLAIM_NS", 10**12)  # an answer is seen before it is late
    decoder.ask(prompts()[0], claim="R")
    assert decoder.counts.loaded == 9


@pytest.mark.unguarded
def test_lent_memory_is_unmapped_when_its_peer_has_gone(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.link.PEER_LOOK_SECONDS", 0.05)
    prefiller, decoder = pair
    gc.disable()
    try:
        prefiller.prefill(prompts()[0], "R")
        decoder.ask(prompts()[0], claim="R")
        assert decoder.counts.lent
        before = mappings_of_pages()
        prefiller.tier.server.close()
        until(lambda: mappings_of_pages() == before - 1)
    finally:
        gc.enable()


def mappings_of_pages():
    """How often this process has mapped memory that engines share: its own, and that of peers."""
    return Path("/proc/self/maps").read_text().count("/memfd:gapless-pages")


@pytest.mark.seeds
def test_pages_are_copied_to_the_host_where_the_device_has_no_room(pair, monkeypatch):
    monkeypatch.setattr(TierSource, "fits_alone", lambda *_: False)
    prefiller, decoder = pair
    all_but_one(prefiller, "S", lambda: decoder.counts.loaded == 8)
    decoder.ask(prompts()[0], claim="S")
    assert decoder.counts.loaded == 8 and not decoder.counts.lent


@pytest.mark.process
def test_a_lent_page_goes_back_in_time_and_is_computed(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.below.LEASE_NS", 0)
    prefiller, decoder = pair
    monkeypatch.setattr(HostTier, "load_early", lambda *_: 0)
    all_but_one(prefiller, "S")
    decoder.loop.submit(ask(9, prompts()[0], transfer=KVTransfer(claim="S")).request)
    until(lambda: turned(decoder, lambda: decoder.counts.lent))
    until(lambda: turned(decoder, lambda: not prefiller.tier.shelf.lent))
    assert decoder.below.patience() is not None, "it still waits"
    decoder.loop.abort(9)
    until(lambda: turned(decoder, lambda: not decoder.loop.has_work()))


@pytest.mark.process
def test_a_request_gives_back_lent_pages_when_it_goes(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.below.LEASE_NS", 10**15)
    monkeypatch.setattr("gapless.offload.tiers.giving.LEASE_SECONDS", 10**6)
    monkeypatch.setattr("gapless.offload.tiers.giving.LONGEST_LEASE_SECONDS", 10**6)
    prefiller, decoder = pair
    monkeypatch.setattr(HostTier, "load_early", lambda *_: 0)
    all_but_one(prefiller, "S")
    for key in (8, 9):  # the second one waits for what the first has borrowed
        decoder.loop.submit(ask(key, prompts()[0], transfer=KVTransfer(claim="S")).request)
    until(lambda: turned(decoder, lambda: decoder.counts.lent))
    assert prefiller.tier.shelf.lent
    for key in (8, 9):
        decoder.loop.abort(key)
    until(lambda: turned(decoder, lambda: not prefiller.tier.shelf.lent))
    check_at_rest(decoder.loop)


@pytest.mark.process
def test_a_load_that_has_no_room_gives_back_in_time_too(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.below.LEASE_NS", 200_000_000)
    prefiller, decoder = pair
    all_but_one(prefiller, "S")
    host = decoder.loop.parts.transfers.host
    host.running = 10**6  # as if rows might take every page
    decoder.loop.submit(ask(9, prompts()[0], transfer=KVTransfer(claim="S")).request)
    until(lambda: turned(decoder, lambda: decoder.counts.lent))
    assert prefiller.tier.shelf.lent and not host.counts.loaded
    until(lambda: turned(decoder, lambda: not prefiller.tier.shelf.lent))
    assert not host.counts.loaded
    decoder.loop.abort(9)
    until(lambda: turned(decoder, lambda: not decoder.loop.has_work()))


def test_of_several_that_wait_those_borrow_that_fit_together(side, tmp_path):
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path), side(peer=path, copies=80)
    jobs = [ask(key, one, transfer=KVTransfer(claim=f"R{key}")) for key, one in enumerate(prompts(6))]
    for number, prompt in enumerate(prompts(6)):
        prefiller.prefill(prompt, f"R{number}")
    run(decoder.loop, jobs, most_turns=10**6)
    for job in jobs:
        job.check()
    assert 9 <= decoder.counts.lent < decoder.counts.loaded, "what comes for one is not to make room for another"


def test_a_page_is_computed_when_it_changes_while_it_is_lent(side, tmp_path):
    prefiller = side(listen=tmp_path / "right.sock")
    prefiller.prefill(prompts()[0], "R")
    peer = WrongPeer(tmp_path / "wrong.sock", NAMESPACE, prefiller.pages())
    memory = SharedMemory(SLOT)
    peer.fd, peer.lends = memory.fd, True  # all its pages are in one place, which holds none of them
    decoder = side(peer=tmp_path / "wrong.sock")
    decoder.ask(prompts()[0], claim="R")
    assert decoder.counts.lent >= 9 and decoder.counts.refused >= 9
    assert not decoder.loop.counters.prefix_hits
    peer.close()
    memory.close()


@pytest.mark.unguarded
def test_places_that_serve_other_pages_while_the_device_reads_them_are_noticed_and_computed(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.giving.LEASE_SECONDS", 0.05)  # and the decoder renews later
    prefiller, decoder = pair
    prefiller.prefill(prompts()[0], "R")
    shelf, host, reused = prefiller.tier.shelf, decoder.loop.parts.transfers.host, list[int]()
    next_load = host.next_load

    def late(most):
        """A load has begun; before the device reads, the lease ends, and each place gets the page of another."""
        if (batch := next_load(most)) is not None and not reused:
            reused.append(len(batch.moves))
            until(lambda: not shelf.lent)
            places = [page.data for page in shelf.pages.values()]
            others = [bytes(data) for data in places]
            shelf.drop([*shelf.pages])
            for place, other in zip(places, others[1:] + others[:1], strict=True):
                place[:] = other
        return batch

    host.next_load = late
    decoder.ask(prompts()[0], claim="R")
    assert decoder.counts.refused >= reused[0] > 0 and host.counts.refused == decoder.counts.refused
    assert not decoder.loop.counters.prefix_hits and not host.counts.loaded


def test_two_requests_at_once_share_what_is_lent(pair):
    prefiller, decoder = pair
    prefiller.prefill(prompts()[0], "R")
    jobs = [ask(number, prompts()[0], transfer=KVTransfer(claim="R")) for number in (1, 2)]
    run(decoder.loop, jobs, most_turns=10**6)
    for job in jobs:
        job.check()
    assert decoder.counts.lent == 9 and decoder.loop.counters.prefix_hits == 2 * 36


def test_a_request_that_claims_its_pages_gets_them_whatever_loads_take(pair):
    prefiller, decoder = pair
    prefiller.prefill(prompts()[0], "R")
    gate = decoder.loop.parts.transfers.host.gate
    gate.weighs = True
    for _ in range(2):
        gate.computed(1, 1)
        gate.moved(0, 1, 10**12)
    decoder.ask(prompts()[0], claim="R")
    assert decoder.counts.loaded >= 9 and not decoder.loop.parts.transfers.host.counts.slower


@pytest.mark.parametrize("seed", sharpest([1, 2]))
def test_simulated_devices_give_each_other_pages_too(seed, side, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.below.CLAIM_NS", 10**15)  # their clocks run ahead of the threads between them
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path, sim=seed), side(peer=path, sim=seed + 2)
    for prompt in prompts(3):
        prefiller.prefill(prompt, "R")
        decoder.ask(prompt, claim="R")
    assert decoder.counts.loaded >= 3 * 9 and not decoder.counts.refused


def test_without_a_name_the_decoder_finds_what_is_there(pair):
    prefiller, decoder = pair
    prefiller.ask(prompts()[0])
    prefiller.settle()
    decoder.ask(prompts()[0])
    assert decoder.counts.loaded >= 9
    decoder.ask(prompts()[1])
    assert decoder.counts.loaded < 12


@pytest.mark.parametrize("first", ["prefiller", "decoder"])
def test_both_sides_may_have_the_request_at_once(first, pair):
    prefiller, decoder = pair
    prompt = prompts()[0]

    def late(work):
        time.sleep(0.1)
        work()

    def prefills():
        prefiller.prefill(prompt, "R")

    thread = threading.Thread(target=prefills if first == "prefiller" else lambda: late(prefills))
    thread.start()
    decoder.ask(prompt, claim="R")
    thread.join()
    assert decoder.counts.loaded >= 9 and not decoder.counts.late


def test_a_request_that_was_aborted_or_never_came_is_waited_for_no_longer(pair, monkeypatch):
    prefiller, decoder = pair
    monkeypatch.setattr("gapless.offload.below.CLAIM_NS", 10**12)
    monkeypatch.setattr("gapless.offload.tiers.shelf.UNKNOWN_SECONDS", 10**3)
    prefiller.ask(prompts()[0], offer="R", aborts_after=0)
    decoder.ask(prompts()[1], claim="R")  # it has ended, else this would take a quarter of an hour
    monkeypatch.setattr("gapless.offload.tiers.shelf.UNKNOWN_SECONDS", 0.5)
    assert decoder.ask(prompts()[2], claim="never") > 0.4
    monkeypatch.setattr("gapless.offload.tiers.shelf.UNKNOWN_SECONDS", 10**3)
    decoder.ask(prompts()[3], claim="never")  # that it did not come is remembered
    assert not decoder.counts.loaded and not decoder.counts.late


def test_a_request_that_hangs_at_the_prefiller_is_computed_at_the_deadline(pair, monkeypatch):
    monkeypatch.setattr("gapless.offload.below.CLAIM_NS", 300_000_000)
    prefiller, decoder = pair
    prefiller.tier.shelf.begin("R")
    assert decoder.ask(prompts()[0], claim="R") > 0.2
    assert not decoder.counts.loaded


def test_requests_that_name_nobody_pass_those_that_wait(pair):
    prefiller, decoder = pair
    prefiller.tier.shelf.begin("R")
    waits, passes = ask(1, prompts()[0], transfer=KVTransfer(claim="R")), ask(2, prompts()[1])
    for job in (waits, passes):
        decoder.loop.submit(job.request)
    tokens = {1: 0, 2: 0}
    late = time.monotonic() + 60
    while tokens[2] < 6:
        assert time.monotonic() < late
        for step in decoder.loop.turn().tokens:
            for key in step.keys.tolist():
                tokens[key] += 1
    assert tokens == {1: 0, 2: 6}
    prefiller.tier.shelf.end("R")
    while decoder.loop.has_work():
        assert time.monotonic() < late
        decoder.loop.turn()


def test_a_page_is_given_again_when_the_shelf_has_given_it_up(side, tmp_path):
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path, copies=40), side(peer=path)
    prompt = prompts()[0]
    for copies in (True, False):
        prefiller.prefill(prompt, "first")
        for key in [*prefiller.pages()]:
            prefiller.tier.shelf.drop([key])
        group = prefiller.loop.parts.transfers.host.groups[0]
        for copy in [] if copies else [*group.copies.values()]:
            copy.lose()  # as if others had made room of it; the device has the page
        prefiller.prefill(prompt, "second")
        assert len(prefiller.pages()) >= 10
        before = decoder.counts.loaded
        decoder.loop.parts.transfers.host.groups[0].forgotten()
        for pool in decoder.loop.pools:
            pool.forget()
        decoder.ask(prompt, claim="second")
        assert decoder.counts.loaded >= before + 9


def test_memory_kept_for_peers_has_a_bound(side, tmp_path):
    prefiller = side(listen=tmp_path / "p.sock", shelf=12 * SLOT)
    for number, prompt in enumerate(prompts(8)):
        prefiller.prefill(prompt, f"R{number}")
        assert prefiller.tier.shelf.used <= 12 * SLOT
    assert prefiller.tier.shelf.used > 8 * SLOT and not prefiller.below.jobs
    pins = [copy.pins for copy in prefiller.loop.parts.transfers.host.groups[0].copies.values()]
    assert sum(pins) * SLOT == prefiller.tier.shelf.used, "others could not make room"


def test_news_that_come_while_the_loop_goes_to_rest_are_taken_in_the_next_turn(pair):
    prefiller, _ = pair
    prefiller.prefill(prompts()[0], "R")
    loop = prefiller.loop
    assert not loop.has_work()
    prefiller.worker.ask(prefiller.below.ask([]).open.popitem()[0], [], 0.1)  # as the thread may, at any moment
    until(lambda: prefiller.worker.has_news)
    assert not loop.rest() and loop.has_work()


MOODS = {
    "flipped": "refused",
    "dies": "failed",
    "torn page": "failed",
    "long page": "failed",
    "gone": "failed",
    "closes": "nothing",
    "nonsense": "nothing",
    "huge": "nothing",
    "slow": "loaded",
}


@pytest.mark.parametrize("depth", sharpest([4, 1]))
@pytest.mark.parametrize("mood", sharpest(MOODS, 5))
def test_whatever_a_peer_does_the_tokens_are_right(mood, depth, side, tmp_path):
    prefiller = side(listen=tmp_path / "p.sock")
    for prompt in prompts():
        prefiller.prefill(prompt, "R")
    peer = WrongPeer(tmp_path / "wrong.sock", NAMESPACE, prefiller.pages())
    decoder = side(peer=tmp_path / "wrong.sock", depth=depth)
    decoder.ask(prompts()[0], claim="R")
    assert decoder.counts.loaded >= 9, "it is sound at first"
    before = decoder.counts.loaded
    peer.mood = mood
    decoder.ask(prompts()[1], claim="R")
    counts = decoder.counts
    seen = {"refused": counts.refused, "failed": counts.failed, "loaded": counts.loaded - before >= 9}
    assert {what for what, count in seen.items() if count} - {"loaded"} == {MOODS[mood]} - {"loaded", "nothing"}
    assert mood != "slow" or seen["loaded"]
    peer.mood = "sound"
    time.sleep(0.03)
    decoder.ask(prompts()[2], claim="R")
    assert counts.loaded - before >= 9, "no grudge is held"
    peer.close()


@pytest.mark.parametrize("wrong", [{"key": b"another key of the tests, long"}, {"namespace": OTHER}])
def test_a_peer_with_another_key_or_model_gives_nothing(wrong, side, tmp_path):
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path), side(peer=path, **wrong)
    prefiller.prefill(prompts()[0], "R")
    decoder.ask(prompts()[0], claim="R")
    assert not decoder.counts.hits and decoder.tier.links[f"unix:{path}"].error


def dies():
    raise PeerError("dead")


@pytest.mark.parametrize("state", ["before", "pending", "found", "loading"])
def test_a_prefiller_that_dies_costs_a_computation(state, side, tmp_path, monkeypatch):
    path = tmp_path / "p.sock"
    prefiller, decoder = side(listen=path), side(peer=path)
    prefiller.prefill(prompts()[0], "R")
    server, lookup, fill = prefiller.tier.server, decoder.tier.lookup_for, decoder.tier.load
    if state == "before":
        server.close()
    elif state == "pending":
        prefiller.tier.shelf.begin("S")
        threading.Timer(0.1, server.close).start()
    elif state == "found":

        def found(*question):
            answer = lookup(*question)
            if Found.HIT in answer:
                server.close()
            return answer

        decoder.tier.lookup_for = found
    else:

        def loading(job, pages):
            left = iter([prefiller.tier.shelf.lend(page.key) for page in pages[:3]])
            prefiller.tier.shelf.lend = lambda key: next(left, None) or dies()
            fill(job, pages)

        decoder.tier.load = loading
    prompt = prompts()[1 if state == "pending" else 0]
    assert decoder.ask(prompt, claim="S" if state == "pending" else "R") < 1.5
    assert decoder.counts.loaded <= 3 and decoder.counts.failed == (state in ("found", "loading"))
    decoder.ask(prompts()[2])


def test_a_decoder_that_dies_leaves_the_prefiller_as_it_was(pair, side, tmp_path):
    prefiller, decoder = pair
    prefiller.prefill(prompts()[0], "R")
    decoder.ask(prompts()[0], claim="R")
    used = prefiller.tier.shelf.used
    decoder.close()
    prefiller.prefill(prompts()[1], "S")
    until(lambda: not prefiller.tier.server.connections)
    assert prefiller.tier.shelf.used == 2 * used
    another = side(peer=tmp_path / "p.sock")
    another.ask(prompts()[1], claim="S")
    assert another.counts.loaded >= 9
