"""The peer tier: what a peer is given arrives, and a peer that fails or lies makes a miss, never a wrong page."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest
from fake_resp import free_port
from peer_rig import KEY, WrongPeer, decided, giver_of, open_giver, taker_of, until
from tier_rig import SLOT, checksum, content, end_of, has, key, loaded, page, setup_of, slot_of, stored

from gapless.base.peers import PeerAddress, PeerPlan
from gapless.base.records import KVTransfer
from gapless.base.shared import SharedMemory
from gapless.server.kv_transfer import MAX_NAME_CHARS
from gapless.tiers import frames
from gapless.tiers.copying import Copies
from gapless.tiers.link import PeerCaller, PeerLink
from gapless.tiers.peer import PeerTier, open_peer_tier
from gapless.tiers.seam import Found, Namespace, TierPage


@pytest.fixture
def wrong(opened, path):
    """(a peer that has pages 0..3, a taker, its setup)"""
    setup = setup_of("")
    pages = {key(number): (content(number), checksum(content(number))) for number in range(4)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    return peer, opened(taker_of(setup, path)), setup


# Two that keep to the protocol.


def test_pages_arrive_over_tcp_too(opened):
    address = PeerAddress("127.0.0.1", free_port())
    setup = setup_of("")
    giver = opened(open_giver(setup, PeerPlan(address, (), KEY)))
    taker = opened(open_peer_tier(setup, PeerPlan(None, (address,), KEY)))
    stored(giver, setup, 0, 1, 2)
    assert has(taker, 2, 7, 0) == [True, False, True]
    end, got = loaded(taker, setup, 0, 2)
    assert got == [content(0), content(2)] and not end.failed and end.nbytes == 2 * SLOT


def test_a_page_is_given_from_its_slot_until_it_is_released(opened, path):
    setup = setup_of("")
    giver, taker, released = opened(giver_of(setup, path)), opened(taker_of(setup, path)), []
    giver.store = partial(PeerTier.store, giver)
    giver.released = lambda job, place: released.append((job, place))
    pages = [TierPage(key(number), giver.slots.of(giver.slots.take(content(number))), number) for number in range(2)]
    giver.store(3, pages)
    giver.store(4, pages[:1])
    assert released == [(4, 0)], "it is there already"
    assert has(taker, 0, 1) == [True, True] and loaded(taker, setup, 0, 1)[1] == [content(0), content(1)]
    giver.drop([key(1)])
    assert released == [(4, 0), (3, 1)] and has(taker, 0, 1) == [True, False]


@pytest.mark.parametrize("key_of_taker", [b"", b"another key of the tests, long"])
def test_a_peer_with_another_key_gets_nothing_and_gives_nothing(key_of_taker, opened, path, caplog):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path, key=key_of_taker))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    assert "another key" in caplog.text


def test_peers_of_different_models_say_both_and_go_no_further(opened, path, caplog):
    setup = setup_of("")
    other = setup_of("", namespace=Namespace.of({"model": "another"}))
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(other, path))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    until(lambda: sum("something else" in one for one in caplog.messages) >= 2)
    told = [one for one in caplog.messages if "something else" in one]
    assert len(told) == 2 and all('"checksum"' in one and '"another"' in one for one in told)


def test_a_peer_of_another_namespace_cannot_say_that_it_is_of_ours(opened, path):
    setup = setup_of("")
    lies = Namespace.of({"model": "another"})
    peer = opened(WrongPeer(path, lies._replace(text=setup.namespace.text + " "), {key(0): (content(0), 0)}))
    assert has(opened(taker_of(setup, path)), 0) == [False] and not peer.asked


def test_a_peer_that_comes_later_is_found_when_a_request_names_it(opened, path):
    setup = setup_of("")
    taker = opened(taker_of(setup, path))
    assert has(taker, 0) == [False]
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False], "it is left alone for a while"
    time.sleep(0.1)
    assert decided(taker, [key(0)], "R")[0] == [Found.HIT]


def test_a_peer_that_was_started_again_is_asked_again(opened, path):
    setup = setup_of("")
    giver, taker = giver_of(setup, path), opened(taker_of(setup, path))
    stored(giver, setup, 0)
    assert has(taker, 0) == [True]
    giver.close()
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 1)
    assert has(taker, 0, 1) == [False, True]


def test_of_several_peers_the_one_that_has_most_is_taken(opened, tmp_path):
    setup = setup_of("")
    first, second = (opened(giver_of(setup, tmp_path / name)) for name in ("a", "b"))
    taker = opened(taker_of(setup, tmp_path / "a", tmp_path / "b"))
    stored(first, setup, 0)
    stored(second, setup, 0, 1)
    assert has(taker, 0, 1) == [True, True]
    assert loaded(taker, setup, 0, 1)[1] == [content(0), content(1)]
    names = [*taker.links]
    assert decided(taker, [key(0), key(1)], "", names[0])[0] == [Found.HIT, Found.MISS]
    assert decided(taker, [key(0)], "", "unix:/another")[0] == [Found.MISS]


def test_memory_of_a_peer_that_has_gone_is_let_go_though_nothing_is_asked(opened, path, monkeypatch):
    monkeypatch.setattr("gapless.tiers.link.PEER_LOOK_SECONDS", 0.05)
    setup, closed = setup_of(""), list[bool]()
    giver, plan = giver_of(setup, path), PeerPlan(None, (PeerAddress(path=str(path)),), KEY)
    taker = opened(open_peer_tier(setup, plan, lambda data: lambda: closed.append(True)))
    stored(giver, setup, 0)
    assert has(taker, 0) == [True] and not closed
    giver.close()
    until(lambda: closed)


# Requests that peers name.


def test_pages_of_a_named_request_are_waited_for_until_it_has_ended(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    giver.shelf.begin("R")

    def later():
        time.sleep(0.05)
        stored(giver, setup, 0)
        time.sleep(0.05)
        giver.shelf.end("R")

    threading.Thread(target=later).start()
    found, seconds = decided(taker, [key(0), key(1)], "R")
    assert found == [Found.HIT, Found.MISS] and 0.09 < seconds < 1
    found, seconds = decided(taker, [key(0), key(1)], "R")
    assert found == [Found.HIT, Found.MISS] and seconds < 0.09, "it has ended: nothing is waited for"
    assert decided(taker, [key(1)])[0] == [Found.MISS], "without a name nothing is"


def test_what_is_pending_ends_with_the_question(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    giver.shelf.begin("R")
    late_at = time.monotonic() + 0.05
    while time.monotonic() < late_at + 0.05:
        assert taker.lookup_for(1, [key(0)], KVTransfer(claim="R"), late_at) == [Found.PENDING]
        time.sleep(0.001)
    assert has(taker, 3) == [False]
    assert taker.lookup_for(2, [key(3)], KVTransfer(claim="S"), late_at + 9) == [Found.PENDING]
    giver.close()
    found, seconds = decided(taker, [key(0)], "R")
    assert found == [Found.MISS] and seconds < 1, "a peer that has gone has nothing"


# Peers that do not keep to it.


@pytest.mark.parametrize("mood", ["closes", "short answer", "nonsense", "huge"])
def test_a_wrong_answer_is_a_miss_and_ends_the_connection(mood, wrong):
    peer, taker, _ = wrong
    assert has(taker, 0, 5) == [True, False]
    peer.mood = mood
    found, seconds = decided(taker, [key(0), key(1)], "R")
    assert found == [Found.MISS] * 2 and seconds < 1
    peer.mood = "sound"
    time.sleep(0.1)
    assert decided(taker, [key(0)], "R")[0] == [Found.HIT], "it may do better next time"


@pytest.mark.parametrize("mood", ["silent", "mute"])
def test_a_peer_that_does_not_answer_is_late_after_a_second(mood, wrong, opened, path):
    peer, _, setup = wrong
    peer.mood = mood
    taker = opened(taker_of(setup, path))
    found, seconds = decided(taker, [key(0)], "R")
    assert found == [Found.MISS] and 0.9 < seconds < 1.4


MOODS = ["torn page", "dies", "long page", "short page", "another page", "gone", "wrong frame", "stuck"]


@pytest.mark.parametrize("mood", MOODS)
def test_a_load_that_goes_wrong_keeps_the_pages_before(mood, wrong):
    peer, taker, setup = wrong
    assert has(taker, 0, 1, 2) == [True] * 3
    peer.mood = mood
    end, got = loaded(taker, setup, 0, 1, 2)
    assert got == [content(0)] and end.failed and end.checksums == (checksum(content(0)),)


def test_a_flipped_byte_comes_with_the_checksum_of_what_was_stored(wrong):
    peer, taker, setup = wrong
    peer.mood = "flipped"
    assert has(taker, 0) == [True]
    end, (got,) = loaded(taker, setup, 0)
    assert got != content(0) and checksum(got) != end.checksums[0] == checksum(content(0))


def test_pages_of_a_process_of_this_host_are_read_in_place(opened, path, monkeypatch):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    stored(giver, setup, 0, 1, 2)
    monkeypatch.setattr(frames, "PAGE_HEAD", None)  # no page goes through the socket
    assert has(taker, 0, 1, 2) == [True] * 3
    end, got = loaded(taker, setup, 0, 1, 2)
    assert got == [content(number) for number in range(3)] and not end.failed
    assert end.checksums == tuple(checksum(content(number)) for number in range(3))


def test_the_longest_name_that_a_request_may_have_reaches_the_peer(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    stored(giver, setup, 0)
    name = "\N{OLD PERSIAN SIGN A}" * MAX_NAME_CHARS
    giver.shelf.end(name)
    assert decided(taker, [key(0), key(1)], name)[0] == [Found.HIT, Found.MISS]
    assert not taker.links[str(PeerAddress(path=str(path)))].error


def test_a_load_ends_before_the_first_page_that_is_not_lent_and_the_connection_is_kept(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    stored(giver, setup, 0, 1, 2)
    assert has(taker, 0, 1, 2) == [True] * 3
    giver.shelf.drop([key(1)])
    end, (got, *_) = loaded(taker, setup, 0, 1, 2)
    assert end.failed and got == content(0) and end.checksums == (checksum(content(0)),)
    assert not taker.links[str(PeerAddress(path=str(path)))].error and giver.shelf.lent == 0


@pytest.mark.parametrize("mood", ["outside", "not mapped", "may shrink", "torn", "more than asked"])
def test_a_peer_that_lends_wrongly_makes_a_miss(mood, opened, path):
    setup = setup_of("")
    pages = {key(number): (content(number), checksum(content(number))) for number in range(2)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    peer.mood, peer.lends = mood, mood != "may shrink"
    memory = opened(SharedMemory(2 * SLOT))
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SLOT)
    peer.fd = {"not mapped": -1, "may shrink": unsealed}.get(mood, memory.fd)
    taker = opened(taker_of(setup, path))
    if mood == "may shrink":
        assert decided(taker, [key(0)], "R")[0] == [Found.MISS]
    else:
        assert has(taker, 0) == [True]
        end, _ = loaded(taker, setup, 0)
        assert end.failed and not end.checksums
        assert taker.links[str(PeerAddress(path=str(path)))].error, "that ends the connection"
    os.close(unsealed)


def test_a_load_that_is_cancelled_ends_at_once_and_writes_no_slot_after(wrong):
    peer, taker, setup = wrong
    assert has(taker, 0, 1) == [True, True]
    peer.mood = "stuck"
    taker.load(7, [page(setup, 0, 0), page(setup, 1, 1)])
    taker.load(8, [page(setup, 0, 2)])
    time.sleep(0.05)
    begin = time.monotonic()
    taker.cancel(7)
    taker.cancel(8)
    ends = {}
    while len(ends) < 2:
        ends |= {end.job: end for end in taker.poll()}
        assert time.monotonic() < begin + 0.5
    assert len(ends[7].checksums) == 1 and not ends[7].failed and ends[8].checksums == ()
    slots = bytes(setup.memory[0])
    time.sleep(0.05)
    assert bytes(setup.memory[0]) == slots and slot_of(setup, 2) == bytes(SLOT)


def test_a_load_that_is_cancelled_before_there_is_a_connection_asks_for_nothing(opened):
    class Slow(PeerCaller):
        def connect(self):
            link.cancel(7)
            return super().connect()

    setup, address = setup_of(""), PeerAddress("127.0.0.1", free_port())
    giver = opened(open_giver(setup, PeerPlan(address, (), KEY)))
    stored(giver, setup, 0)
    link = PeerLink(Slow(address, KEY, setup.namespace), Copies(), setup.slot_bytes)
    link.load(7, [page(setup, 0, 1)])
    opened(link.start())
    until(lambda: link.ended)
    end = link.ended.popleft()
    assert end.job == 7 and end.checksums == () and not end.failed and slot_of(setup, 1) == bytes(SLOT)


def test_a_load_of_what_no_peer_said_it_had_fails(wrong, opened, path):
    _, _, setup = wrong
    taker = opened(taker_of(setup, path, path.with_name("another")))
    taker.load(3, [page(setup, 0, 0)])
    assert end_of(taker, 3).failed
    assert has(taker, 0) == [True]
    taker.drop([key(0)])
    taker.load(4, [page(setup, 0, 0)])
    assert end_of(taker, 4).failed


def test_closing_ends_every_load(wrong):
    peer, taker, setup = wrong
    assert has(taker, 0, 1) == [True, True]
    peer.mood = "stuck"
    for job in range(3):
        taker.load(job, [page(setup, 0, 0), page(setup, 1, 1)])
    time.sleep(0.05)
    begin = time.monotonic()
    taker.close()
    assert time.monotonic() - begin < 0.5 and sorted(end.job for end in taker.poll()) == [0, 1, 2]
