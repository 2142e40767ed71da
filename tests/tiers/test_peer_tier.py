"""The peer tier: what a peer is given arrives, and a peer that fails or lies makes a miss, never a wrong page."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest
from fake_resp import free_port
from peer_rig import KEY, WrongPeer, giver_of, taker_of
from tier_rig import SLOT, checksum, content, end_of, has, key, loaded, page, setup_of, slot_of, stored

from gapless.base.errors import ConfigError
from gapless.base.peers import PeerAddress, PeerPlan, check_reach, parse_peers, read_key
from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.server.kv_transfer import MAX_NAME_CHARS
from gapless.tiers import frames
from gapless.tiers.frames import FrameKind, FrameSocket
from gapless.tiers.giving import MAX_CONNECTIONS, MAX_STRANGERS
from gapless.tiers.link import FIRST_BACK_OFF, PeerCaller, PeerLink
from gapless.tiers.peer import PeerWorker, open_peer_tier
from gapless.tiers.seam import Found, Namespace
from gapless.tiers.shared import Copies, PageMemory, mapped
from gapless.tiers.shelf import Shelf


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.sock"


@pytest.fixture
def wrong(opened, path):
    """(a peer that has pages 0..3, a taker, its setup)"""
    setup = setup_of("")
    pages = {key(number): (content(number), checksum(content(number))) for number in range(4)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    return peer, opened(taker_of(setup, path)), setup


def decided(tier, keys, claim="", peer="", seconds=5.0):
    """The answer when nothing is pending any more, and how long it took."""
    begin = time.monotonic()
    while True:
        found = tier.lookup_for(begin, keys, KVTransfer(claim=claim, peer=peer), begin + seconds)
        if Found.PENDING not in found:
            return found, time.monotonic() - begin
        assert time.monotonic() < begin + seconds, "no answer"
        time.sleep(0.001)


def connected(path):
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(str(path))
    return raw


# Two that keep to the protocol.


def test_pages_arrive_over_tcp_too(opened):
    address = PeerAddress("127.0.0.1", free_port())
    setup = setup_of("")
    giver = opened(open_peer_tier(setup, PeerPlan(address, (), KEY)))
    taker = opened(open_peer_tier(setup, PeerPlan(None, (address,), KEY)))
    stored(giver, setup, 0, 1, 2)
    assert has(taker, 2, 7, 0) == [True, False, True]
    end, got = loaded(taker, setup, 0, 2)
    assert got == [content(0), content(2)] and not end.failed and end.nbytes == 2 * SLOT


def test_the_end_of_a_machine_is_noticed_though_it_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as raw:
        FrameSocket(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, tries = [
            raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        ]
        assert idle + tries * pause <= 60


def test_a_page_is_copied_when_it_is_stored(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    stored(giver, setup, 0)
    slot_of(setup, 0)[:] = bytes(SLOT)
    assert has(taker, 0) == [True]
    assert loaded(taker, setup, 0)[1] == [content(0)]


@pytest.mark.parametrize("key_of_taker", [b"", b"another key of the tests, long"])
def test_a_peer_with_another_key_gets_nothing_and_gives_nothing(key_of_taker, opened, path, caplog):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path, key=key_of_taker))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    assert "another key" in caplog.text


def test_a_taker_that_does_not_ask_for_a_proof_gets_nothing_either(opened, path, caplog):
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer = FrameSocket(connected(path))
    peer.send(FrameKind.HELLO, b"gaplessP3" + bytes(32) + setup.namespace.digest)
    proof = peer.receive(FrameKind.CHALLENGE)[1][-32:]
    peer.send(FrameKind.PROOF, proof, setup.namespace.text.encode())  # the giver's own, back to it
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.WELCOME)
    assert "another key" in caplog.text
    peer.close()


def test_peers_of_different_models_say_both_and_go_no_further(opened, path, caplog):
    setup = setup_of("")
    other = setup_of("", namespace=Namespace.of({"model": "another"}))
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(other, path))
    stored(giver, setup, 0)
    assert has(taker, 0) == [False]
    until = time.monotonic() + 5
    while len([one for one in caplog.messages if "something else" in one]) < 2 and time.monotonic() < until:
        time.sleep(0.005)
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
    until = time.monotonic() + 0.05
    while time.monotonic() < until + 0.05:
        assert taker.lookup_for(1, [key(0)], KVTransfer(claim="R"), until) == [Found.PENDING]
        time.sleep(0.001)
    assert has(taker, 3) == [False]
    assert taker.lookup_for(2, [key(3)], KVTransfer(claim="S"), until + 9) == [Found.PENDING]
    giver.close()
    found, seconds = decided(taker, [key(0)], "R")
    assert found == [Found.MISS] and seconds < 1, "a peer that has gone has nothing"


class Hand:
    """A clock that is set."""

    now = 100.0

    def __call__(self):
        return self.now


def test_the_shelf_has_a_bound_and_forgets():
    clock = Hand()
    shelf = Shelf(3 * SLOT, SLOT, clock)
    assert not shelf.put(key(9), memoryview(bytes(4 * SLOT)), 0)
    for number in range(5):
        clock.now += 1
        assert shelf.put(key(number), memoryview(content(number)), number)
        shelf.find("", [key(2)])
    assert [one is Found.HIT for one in shelf.find("", [key(n) for n in range(5)])] == [False, False, True, True, True]
    assert shelf.used == 3 * SLOT
    taken = shelf.lend(key(2))
    clock.now += 59
    shelf.put(key(4), memoryview(content(4)), 4)
    clock.now += 2
    shelf.expire()
    assert shelf.used == SLOT and shelf.lend(key(2)) is None, "nobody has asked for it for a minute"
    assert taken.data == content(2), "who reads it has it all the same"
    shelf.drop([key(4), key(7)])
    assert shelf.used == 0
    for number in (5, 6):
        assert shelf.put(key(number), memoryview(content(number)), number)
    shelf.drop([key(5), key(6)])
    for number in (7, 8):
        assert shelf.put(key(number), memoryview(content(number)), number)
    assert taken.data == content(2), "its place is not free before it is given back"
    shelf.give_back([taken])
    assert shelf.put(key(9), memoryview(content(9)), 9) and shelf.used == 3 * SLOT


def test_a_shelf_that_is_all_lent_refuses_pages():
    shelf = Shelf(SLOT, SLOT)
    assert shelf.put(key(0), memoryview(content(0)), 0)
    taken = [shelf.lend(key(0)), shelf.lend(key(0))]
    for one in taken:
        assert not shelf.put(key(1), memoryview(content(1)), 1), "a reader may still look"
        assert taken[0].data == content(0)
        shelf.give_back([one])
    assert shelf.put(key(1), memoryview(content(1)), 1)


def test_a_page_that_two_threads_put_at_once_has_one_place(monkeypatch):
    shelf = Shelf(2 * SLOT, SLOT)
    write = shelf.memory.write

    def meanwhile(place, data):
        monkeypatch.setattr(shelf.memory, "write", write)
        assert shelf.put(key(0), data, 0)
        write(place, data)

    monkeypatch.setattr(shelf.memory, "write", meanwhile)
    assert shelf.put(key(0), memoryview(content(0)), 0)
    shelf.check()
    assert shelf.used == SLOT and shelf.put(key(1), memoryview(content(1)), 1) and shelf.used == 2 * SLOT


def test_the_shelf_knows_requests_for_a_while():
    clock = Hand()
    shelf = Shelf(SLOT, SLOT, clock)

    def state(name):
        return shelf.find(name, [key(0)])[0]

    assert state("unknown") is Found.PENDING, "its request may be on its way"
    clock.now += 1
    assert state("unknown") is Found.MISS
    clock.now += 59
    assert state("unknown") is Found.MISS
    shelf.begin("unknown")
    assert state("unknown") is Found.PENDING
    clock.now += 10_000
    assert state("unknown") is Found.PENDING, "it still runs"
    shelf.end("unknown")
    assert state("unknown") is Found.MISS
    clock.now += 61
    assert state("unknown") is Found.PENDING, "forgotten, as if it had never been"


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
    monkeypatch.setattr(frames, "PAGE", None)  # no page goes through the socket
    assert has(taker, 0, 1, 2) == [True] * 3
    end, got = loaded(taker, setup, 0, 1, 2)
    assert got == [content(number) for number in range(3)] and not end.failed
    assert end.checksums == tuple(checksum(content(number)) for number in range(3))


def test_a_page_that_is_read_in_place_keeps_its_place_until_the_load_has_ended(opened, path):
    setup = setup_of("", pages=2)
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    raw = FrameSocket(connected(path))
    frames.greet(raw, KEY, setup.namespace)
    raw.send(FrameKind.MAP)
    memory = mapped(fd := raw.receive_memory())
    os.close(fd)
    raw.send(FrameKind.FETCH, key(0))
    _, sum_, nbytes, start = frames.LENT.unpack(raw.receive(FrameKind.LENT)[1])
    for number in range(1, 6):
        stored(giver, setup, number)
        assert bytes(memory[start : start + nbytes]) == content(0) and sum_ == checksum(content(0))
    raw.send(FrameKind.RETURN)
    raw.receive(FrameKind.RETURNED)
    for number in range(6, 8):
        stored(giver, setup, number)
    assert bytes(memory[start : start + nbytes]) != content(0), "its place serves others again"
    raw.close()


def test_a_reader_that_says_nothing_keeps_its_places_for_a_while_and_is_not_answered_after_it(
    opened, path, monkeypatch
):
    monkeypatch.setattr("gapless.tiers.giving.LEASE_SECONDS", 0.6)  # the machine may be busy
    setup = setup_of("", pages=2)
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0, 1)
    raw = FrameSocket(connected(path))
    frames.greet(raw, KEY, setup.namespace)
    raw.send(FrameKind.MAP)
    os.close(raw.receive_memory())
    raw.send(FrameKind.FETCH, key(0), key(1))
    raw.receive(FrameKind.LENT)
    raw.receive(FrameKind.LENT)
    assert giver.shelf.lent == 2 and not giver.shelf.put(key(2), memoryview(content(2)), 2)
    until = time.monotonic() + 5
    while giver.server.connections:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert giver.shelf.lent == 0 and giver.shelf.put(key(2), memoryview(content(2)), 2)
    with pytest.raises(OSError):
        raw.send(FrameKind.RETURN)
        raw.receive(FrameKind.RETURNED)
    raw.close()
    giver.shelf.check()


@pytest.fixture
def hanging(monkeypatch):
    """Look-ups of the host `gone` hang until this is set; another fails."""
    answers, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host, *args, **options):
        if host == "gone":
            answers.wait(20)
            raise OSError("no such host")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    monkeypatch.setattr("gapless.tiers.link.SECONDS", 0.3)
    yield answers
    answers.set()


def far_link(host, *args):
    return PeerLink(PeerCaller(PeerAddress(host, 1), KEY, Namespace("")), Copies(), *args)


def test_a_look_up_that_hangs_holds_a_link_no_longer_than_a_peer_may(hanging):
    link = far_link("gone", 0.0)
    for _ in range(2):
        begin = time.monotonic()
        assert link.turn() and "look-up" in link.error and time.monotonic() - begin < 1.5
    assert sum(thread.name == "gapless-look-up" for thread in threading.enumerate()) == 1, "one for each try"
    hanging.set()
    while "look-up" in link.error:
        assert link.turn()
    assert link.error == "no such host", "the answer that came late"


def test_what_one_peer_has_is_found_while_the_look_up_of_another_hangs(opened, path, hanging):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), taker_of(setup, path)
    stored(giver, setup, 0)
    link = far_link("gone").start()
    taker.links[str(link.address)] = link
    worker = PeerWorker("peers", taker, lambda: None)
    worker.start()
    worker.ask_for(1, [key(0), key(1)], 0.2, NO_TRANSFER)
    until = time.monotonic() + 5
    while not (answers := worker.take()):
        assert time.monotonic() < until
        time.sleep(0.005)
    assert answers[0].hits == (True, False)
    begin = time.monotonic()
    worker.close()
    assert time.monotonic() - begin < 2 and not hanging.is_set(), "closing waits for the look-up"


def test_the_longest_name_that_a_request_may_have_reaches_the_peer(opened, path):
    setup = setup_of("")
    giver, taker = opened(giver_of(setup, path)), opened(taker_of(setup, path))
    stored(giver, setup, 0)
    name = "\N{OLD PERSIAN SIGN A}" * MAX_NAME_CHARS
    giver.shelf.end(name)
    assert decided(taker, [key(0), key(1)], name)[0] == [Found.HIT, Found.MISS]
    assert not taker.links[str(PeerAddress(path=str(path)))].error


@pytest.mark.parametrize("error", [UnicodeError("a host without a name"), OSError("no such host")])
def test_a_peer_whose_host_cannot_be_looked_up_is_left_alone_for_a_while(error, monkeypatch):
    tries = []

    def look_up(*_, **__):
        tries.append(1)
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    clock = Hand()
    link = PeerLink(PeerCaller(PeerAddress("a", 1), KEY, Namespace("")), Copies(), clock=clock)
    assert [link.turn() for _ in range(3)] == [True, False, False] and len(tries) == 1
    assert str(error) in link.error
    clock.now += FIRST_BACK_OFF
    assert [link.turn() for _ in range(3)] == [True, False, False] and len(tries) == 2


def two_of(look_up):
    """A look-up that knows a host with two addresses, of which the first does not answer."""

    def both(host, port, *args, **options):
        lines = [
            look_up(one, port, *args, **options) for one in (("127.0.0.2", "127.0.0.1") if host == "two" else (host,))
        ]
        return [line for some in lines for line in some]

    return both


def test_every_address_of_a_host_is_tried(monkeypatch, opened):
    address = PeerAddress("127.0.0.1", free_port())
    setup = setup_of("")
    giver = opened(open_peer_tier(setup, PeerPlan(address, (), KEY)))
    monkeypatch.setattr(socket, "getaddrinfo", two_of(socket.getaddrinfo))
    link = opened(PeerLink(PeerCaller(PeerAddress("two", address.port), KEY, setup.namespace), Copies()).start())
    until = time.monotonic() + 5
    while not giver.server.connections:
        assert time.monotonic() < until and not link.error
        time.sleep(0.005)


@pytest.mark.parametrize("mood", ["outside", "not mapped", "may shrink"])
def test_a_peer_that_lends_wrongly_makes_a_miss(mood, opened, path):
    setup = setup_of("")
    pages = {key(number): (content(number), checksum(content(number))) for number in range(2)}
    peer = opened(WrongPeer(path, setup.namespace, pages))
    peer.mood, peer.lends = mood, mood != "may shrink"
    memory = opened(PageMemory(2, SLOT))
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SLOT)
    peer.fd = {"outside": memory.fd, "not mapped": -1, "may shrink": unsealed}[mood]
    taker = opened(taker_of(setup, path))
    if mood == "may shrink":
        assert decided(taker, [key(0)], "R")[0] == [Found.MISS]
    else:
        assert has(taker, 0) == [True]
        end, _ = loaded(taker, setup, 0)
        assert end.failed and not end.checksums
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
    giver = opened(open_peer_tier(setup, PeerPlan(address, (), KEY)))
    stored(giver, setup, 0)
    link = PeerLink(Slow(address, KEY, setup.namespace), Copies())
    link.load(7, [page(setup, 0, 1)])
    opened(link.start())
    until = time.monotonic() + 5
    while not link.ended:
        assert time.monotonic() < until
        time.sleep(0.005)
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


@pytest.mark.parametrize(
    "sent", [b"", b"\x00" * 5, b"\x01\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x01\x49\x00\x00\x00" + b"x" * 73]
)
def test_what_is_no_peer_is_sent_away(sent, opened, path):
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(path))
        raw.settimeout(3)
        raw.sendall(sent)
        if not sent:
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # what it had sent was not read
            assert raw.recv(9) == b""
    until = time.monotonic() + 2
    while giver.server.connections:
        assert time.monotonic() < until, "a connection is kept"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x05\x02\x00\x00\x00xx",
        b"\x05\x05\x00\x00\x00\x00\xff\xff\xff\x7f",
        b"\x07\x05\x00\x00\x00abcde",
        pytest.param(b"\x05\x07\x02\x00\x00" + b"\x01\x02" + bytes(4) + bytes(513), id="a name that is too long"),
    ],
)
def test_frames_that_do_not_fit_together_end_the_connection(frame, opened, path):
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer = FrameSocket(raw := connected(path))
    frames.greet(peer, KEY, setup.namespace)
    raw.sendall(frame)
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.ANSWER)
    peer.close()


def greeted(path, setup):
    peer = FrameSocket(connected(path))
    frames.greet(peer, KEY, setup.namespace)
    return peer


def test_connections_of_peers_are_bounded(opened, path, monkeypatch):
    monkeypatch.setattr("gapless.tiers.giving.MAX_CONNECTIONS", 3)
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    strangers = [connected(path) for _ in range(4)]
    *peers, one_more = [greeted(path, setup) for _ in range(4)]
    assert not one_more.wait(3), "it has proved itself, and there is no room"
    for peer in peers:
        peer.send(FrameKind.RETURN)
        peer.receive(FrameKind.RETURNED)
    peers[0].close()
    until = time.monotonic() + 3
    while giver.server.connections > 6:
        assert time.monotonic() < until
        time.sleep(0.005)
    peers[0] = greeted(path, setup)
    peers[0].send(FrameKind.RETURN)
    peers[0].receive(FrameKind.RETURNED)
    for one in (*strangers, *peers, one_more):
        one.close()


def test_a_peer_gets_in_while_strangers_connect_and_say_nothing(opened, path):
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    strangers = [connected(path) for _ in range(MAX_CONNECTIONS + MAX_STRANGERS)]
    strangers[MAX_CONNECTIONS - 1].settimeout(0.5)
    with suppress(TimeoutError):
        assert strangers[MAX_CONNECTIONS - 1].recv(1) == b"", "only the latest are waited for"
    taker = opened(taker_of(setup, path))
    found, seconds = decided(taker, [key(0)], "R")
    assert found == [Found.HIT] and seconds < 0.9, "strangers were waited for"
    strangers += [connected(path) for _ in range(MAX_STRANGERS)]
    assert has(taker, 0) == [True], "strangers took the place of a peer"
    assert giver.server.connections <= MAX_STRANGERS + 2
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_says_a_little_at_a_time_is_sent_away(opened, path, monkeypatch):
    monkeypatch.setattr("gapless.tiers.giving.ADMIT_SECONDS", 0.2)
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer, begin = FrameSocket(connected(path)), time.monotonic()
    peer.send(FrameKind.HELLO, b"gaplessP3" + bytes(32) + setup.namespace.digest)
    peer.receive(FrameKind.CHALLENGE)
    assert not peer.wait(3) and time.monotonic() - begin < 0.9
    peer.close()


# What the user says.


def test_addresses_are_read_and_shown():
    for text in ("127.0.0.1:5600", "[::1]:7", "prefill.example:80", "unix:/run/kv.sock"):
        assert str(PeerAddress.parse(text, "x")) == text
    for text in ("5600", ":5600", "host", "host:0", "host:70000", "host:x", "unix:"):
        with pytest.raises(ConfigError, match="kv_peers must be HOST:PORT"):
            parse_peers(None, [text])
    for text in (".example:1", "a..b:1", "x" * 64 + ":1"):
        with pytest.raises(ConfigError, match=r"kv_peers: '.*' is no name of a host"):
            parse_peers(None, [text])
    with pytest.raises(ConfigError, match="twice"):
        parse_peers(None, ["a:1", "a:1"])
    local = [
        "127.0.0.1:1",
        "127.9.9.9:1",
        "[::1]:1",
        "localhost:1",
        "unix:/x",
        "0.0.0.0:1",
        "10.0.0.1:1",
        "[::]:1",
        "a:1",
    ]
    assert [PeerAddress.parse(text, "x").local for text in local] == [True] * 5 + [False] * 4
    assert all(PeerAddress.parse(text, "x").everywhere for text in ("0.0.0.0:1", "[::]:1", "[::0]:1"))
    assert not any(PeerAddress.parse(text, "x").everywhere for text in ("[::1]:1", "a:1", "unix:/x"))
    check_reach(parse_peers("127.0.0.1:1", ["unix:/x"]))
    for listen, peers, field in (("0.0.0.0:1", [], "kv_peer_listen"), (None, ["other:1"], "kv_peers")):
        with pytest.raises(ConfigError, match=f"{field}.*in the clear.*kv_peer_ssl_certfile"):
            check_reach(parse_peers(listen, peers))


def test_keys_come_from_a_file_or_else_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("GAPLESS_KV_PEER_KEY", raising=False)
    assert read_key(None) == b""
    monkeypatch.setenv("GAPLESS_KV_PEER_KEY", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        read_key(None)
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(str(tmp_path / "key")) == KEY
    with pytest.raises(ConfigError, match=r"kv_peer_key_file .*cannot be read"):
        read_key(str(tmp_path / "none"))


def test_an_address_in_use_is_refused_and_a_socket_left_behind_is_not(opened, path):
    setup = setup_of("")
    giver = giver_of(setup, path)
    with pytest.raises(ConfigError, match="kv_peer_listen: cannot listen on"):
        giver_of(setup, path)
    giver.close()
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    opened(giver_of(setup, path))
    assert path.stat().st_mode & 0o077 == 0


def test_a_socket_that_was_removed_does_not_stop_the_end(path):
    giver = giver_of(setup_of(""), path)
    path.unlink()
    giver.close()
