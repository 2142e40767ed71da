"""The peer tier: what a peer is given arrives, and a peer that fails or lies makes a miss, never a wrong page."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
from fake_resp import free_port
from peer_rig import KEY, WrongPeer, decided, giver_of, is_found, open_giver, taker_of
from tier_rig import SLOT, checksum, content, end_of, has, key, loaded, page, setup_of, slot_of, stored
from waiting import until

from gapless.base.peers import PeerAddress, PeerPlan
from gapless.base.records import KVTransfer
from gapless.base.shared import SharedMemory
from gapless.offload.tiers import giving
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.link import PeerCaller, PeerLink
from gapless.offload.tiers.peer import PeerTier, open_peer_tier
from gapless.offload.tiers.seam import Found, Namespace, TierPage
from gapless.server.kv_transfer import MAX_NAME_CHARS


@pytest.fixture
def wrong(opened, path, setup):
    """(a peer that has pages 0..3, a taker)"""
    pages = {key(number): (content(number), checksum(content(number))) for number in range(4)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    return peer, opened(taker_of(setup, path))


# Two that keep to the protocol.


def test_pages_arrive_over_tcp_too(opened, setup):
    address = PeerAddress("127.0.0.1", free_port())
    giver = opened(open_giver(setup, PeerPlan(address, (), KEY)))
    taker = opened(open_peer_tier(setup, PeerPlan(None, (address,), KEY)))
    stored(giver, setup, 0, 1, 2)
    assert has(taker, 2, 7, 0) == [True, False, True]
    end, got = loaded(taker, setup, 0, 2)
    assert got == [content(0), content(2)] and not end.failed and end.nbytes == 2 * SLOT


def test_a_page_is_given_from_its_slot_until_it_is_released(giver, taker, setup):
    released = []
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
def test_a_peer_with_another_key_gets_nothing_and_gives_nothing(key_of_taker, giver, opened, setup, path, caplog):
    taker = opened(taker_of(setup, path, key=key_of_taker))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    assert "another key" in caplog.text


def test_peers_of_different_models_say_both_and_go_no_further(giver, opened, setup, path, caplog):
    taker = opened(taker_of(setup_of("", namespace=Namespace.of({"model": "another"})), path))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    until(lambda: sum("something else" in one for one in caplog.messages) >= 2)
    told = [one for one in caplog.messages if "something else" in one]
    assert len(told) == 2 and all("checksum" in one and "another" in one for one in told)


def test_a_peer_of_another_namespace_cannot_say_that_it_is_of_ours(opened, setup, path):
    lies = Namespace.of({"model": "another"})
    peer = opened(WrongPeer(path, lies._replace(text=setup.namespace.text + " "), {key(0): (content(0), 0)}))
    assert has(opened(taker_of(setup, path)), 0) == [False] and not peer.asked


def test_a_peer_that_comes_later_is_found_when_a_request_names_it(taker, opened, setup, path):
    assert has(taker, 0) == [False]
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    is_found(taker, key(0))


def test_a_peer_that_was_started_again_is_asked_again(giver, taker, opened, setup, path):
    stored(giver, setup, 0)
    assert has(taker, 0) == [True]
    giver.close()
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 1)
    assert has(taker, 0, 1) == [False, True]


def test_the_peer_that_has_most_is_taken_of_several(opened, setup, tmp_path):
    first, second = (opened(giver_of(setup, tmp_path / name)) for name in ("a", "b"))
    taker = opened(taker_of(setup, tmp_path / "a", tmp_path / "b"))
    stored(first, setup, 0)
    stored(second, setup, 0, 1)
    assert has(taker, 0, 1) == [True, True]
    assert loaded(taker, setup, 0, 1)[1] == [content(0), content(1)]
    names = [*taker.links]
    assert decided(taker, [key(0), key(1)], "", names[0]) == [Found.HIT, Found.MISS]
    assert decided(taker, [key(0)], "", "unix:/another") == [Found.MISS]


def test_memory_of_a_peer_that_has_gone_is_let_go_though_nothing_is_asked(giver, opened, setup, path, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.link.PEER_LOOK_SECONDS", 0.05)
    closed, plan = list[bool](), PeerPlan(None, (PeerAddress(path=str(path)),), KEY)
    taker = opened(open_peer_tier(setup, plan, lambda data: lambda: closed.append(True)))
    stored(giver, setup, 0)
    assert has(taker, 0) == [True] and not closed
    giver.close()
    until(lambda: closed)


# Requests that peers name.


def test_pages_of_a_named_request_are_waited_for_until_it_has_ended(giver, taker, setup):
    late_at = time.monotonic() + 60

    def found(number=1):
        return taker.lookup_for(number, [key(0), key(1)], KVTransfer(claim="R"), late_at)

    giver.shelf.begin("R")
    assert found() == [Found.PENDING] * 2
    assert decided(taker, [key(1)]) == [Found.MISS], "without a name nothing is waited for"
    stored(giver, setup, 0)
    until(lambda: found() == [Found.HIT, Found.PENDING])
    giver.shelf.end("R")
    until(lambda: found() == [Found.HIT, Found.MISS])
    assert decided(taker, [key(0), key(1)], "R") == [Found.HIT, Found.MISS], "it has ended: nothing is waited for"
    giver.close()
    assert decided(taker, [key(0)], "R") == [Found.MISS], "a peer that has gone has nothing"


# Peers that do not keep to it.


@pytest.mark.parametrize("mood", ["closes", "short answer", "nonsense", "huge"])
def test_a_wrong_answer_is_a_miss_and_ends_the_connection(mood, wrong):
    peer, taker = wrong
    assert has(taker, 0, 5) == [True, False]
    peer.mood = mood
    assert decided(taker, [key(0), key(1)], "R") == [Found.MISS] * 2
    peer.mood = "sound"
    is_found(taker, key(0))


@pytest.mark.seeds
@pytest.mark.parametrize("mood", ["silent", "mute"])
def test_a_peer_that_does_not_answer_has_nothing_after_a_second(mood, wrong, opened, setup, path):
    peer, _ = wrong
    peer.mood = mood
    assert decided(opened(taker_of(setup, path)), [key(0)], "R") == [Found.MISS]


MOODS = ["torn page", "dies", "long page", "short page", "another page", "gone", "wrong frame"]


@pytest.mark.parametrize("mood", [*MOODS, pytest.param("stuck", marks=pytest.mark.seeds)])
def test_a_load_that_goes_wrong_keeps_the_pages_before(mood, wrong, setup):
    peer, taker = wrong
    assert has(taker, 0, 1, 2) == [True] * 3
    peer.mood = mood
    end, got = loaded(taker, setup, 0, 1, 2)
    assert got == [content(0)] and end.failed and end.checksums == (checksum(content(0)),)


def test_a_flipped_byte_comes_with_the_checksum_of_the_stored_page(wrong, setup):
    peer, taker = wrong
    peer.mood = "flipped"
    assert has(taker, 0) == [True]
    end, (got,) = loaded(taker, setup, 0)
    assert got != content(0) and checksum(got) != end.checksums[0] == checksum(content(0))


def test_pages_of_a_process_of_this_host_are_read_in_place(giver, taker, setup, monkeypatch):
    stored(giver, setup, 0, 1, 2)
    monkeypatch.setattr(giving, "PAGE_HEAD", None)  # no page goes through the socket
    assert has(taker, 0, 1, 2) == [True] * 3
    end, got = loaded(taker, setup, 0, 1, 2)
    assert got == [content(number) for number in range(3)] and not end.failed
    assert end.checksums == tuple(checksum(content(number)) for number in range(3))


def test_the_longest_name_that_a_request_may_have_reaches_the_peer(giver, taker, setup, path):
    stored(giver, setup, 0)
    name = "\N{OLD PERSIAN SIGN A}" * MAX_NAME_CHARS
    giver.shelf.end(name)
    assert decided(taker, [key(0), key(1)], name) == [Found.HIT, Found.MISS]
    assert not taker.links[str(PeerAddress(path=str(path)))].error


def test_a_load_ends_before_the_first_page_that_is_not_lent_and_the_connection_is_kept(giver, taker, setup, path):
    stored(giver, setup, 0, 1, 2)
    assert has(taker, 0, 1, 2) == [True] * 3
    giver.shelf.drop([key(1)])
    end, (got, *_) = loaded(taker, setup, 0, 1, 2)
    assert end.failed and got == content(0) and end.checksums == (checksum(content(0)),)
    assert not taker.links[str(PeerAddress(path=str(path)))].error and giver.shelf.lent == 0


@pytest.mark.parametrize("mood", ["outside", "not mapped", "may shrink", "torn", "more than asked"])
def test_a_peer_that_lends_wrongly_makes_a_miss(mood, opened, setup, path):
    pages = {key(number): (content(number), checksum(content(number))) for number in range(2)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    peer.mood, peer.lends = mood, mood != "may shrink"
    memory = opened(SharedMemory(2 * SLOT))
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SLOT)
    peer.fd = {"not mapped": -1, "may shrink": unsealed}.get(mood, memory.fd)
    taker = opened(taker_of(setup, path))
    if mood == "may shrink":
        assert decided(taker, [key(0)], "R") == [Found.MISS]
    else:
        assert has(taker, 0) == [True]
        end, _ = loaded(taker, setup, 0)
        assert end.failed and not end.checksums
        assert taker.links[str(PeerAddress(path=str(path)))].error, "that ends the connection"
    os.close(unsealed)


def test_a_load_that_is_cancelled_ends_and_writes_no_slot_after(wrong, setup, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.link.FRAME_SECONDS", 1e6)  # the peer's silence does not end it
    peer, taker = wrong
    assert has(taker, 0, 1) == [True, True]
    peer.mood = "stuck"
    taker.load(7, [page(setup, 0, 0), page(setup, 1, 1)])
    taker.load(8, [page(setup, 0, 2)])
    until(lambda: slot_of(setup, 0) == content(0))
    taker.cancel(7)
    taker.cancel(8)
    ends = {}
    until(lambda: ends.update({end.job: end for end in taker.poll()}) or len(ends) == 2)
    assert len(ends[7].checksums) == 1 and not ends[7].failed and ends[8].checksums == ()
    assert slot_of(setup, 2) == bytes(SLOT)


def test_a_load_that_is_cancelled_before_there_is_a_connection_asks_for_nothing(opened, setup):
    class Slow(PeerCaller):
        def connect(self):
            link.cancel(7)
            return super().connect()

    address = PeerAddress("127.0.0.1", free_port())
    giver = opened(open_giver(setup, PeerPlan(address, (), KEY)))
    stored(giver, setup, 0)
    link = PeerLink(Slow(address, KEY, setup.namespace), CopyThreads(), setup.slot_bytes)
    link.load(7, [page(setup, 0, 1)])
    opened(link.start())
    until(lambda: link.ended)
    end = link.ended.popleft()
    assert end.job == 7 and end.checksums == () and not end.failed and slot_of(setup, 1) == bytes(SLOT)


def test_a_load_of_a_page_that_no_peer_said_it_had_fails(wrong, opened, setup, path):
    taker = opened(taker_of(setup, path, path.with_name("another")))
    taker.load(3, [page(setup, 0, 0)])
    assert end_of(taker, 3).failed
    assert has(taker, 0) == [True]
    taker.drop([key(0)])
    taker.load(4, [page(setup, 0, 0)])
    assert end_of(taker, 4).failed


def test_closing_ends_every_load(wrong, setup, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.link.FRAME_SECONDS", 1e6)
    peer, taker = wrong
    assert has(taker, 0, 1) == [True, True]
    peer.mood = "stuck"
    for job in range(3):
        taker.load(job, [page(setup, 0, 0), page(setup, 1, 1)])
    until(lambda: slot_of(setup, 0) == content(0))
    taker.close()
    assert sorted(end.job for end in taker.poll()) == [0, 1, 2]
