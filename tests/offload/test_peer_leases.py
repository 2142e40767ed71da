"""Leases of pages that a peer reads in place: a sign of life renews them, silence and a bound end them."""

from __future__ import annotations

import socket

import pytest
from peer_rig import KEY, GivenSlots
from tier_rig import SLOT, Hand, content, key, stored
from waiting import until

from gapless.base.peers import PeerAddress
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.frames import LEASE, LEASE_SECONDS, FrameKind, FrameSocket
from gapless.offload.tiers.giving import FROM_TAKERS, LONGEST_LEASE_SECONDS, PeerSession
from gapless.offload.tiers.link import RENEW_SECONDS, PeerCaller, PeerLink
from gapless.offload.tiers.seam import TierPage
from gapless.offload.tiers.shelf import Shelf


class Lent:
    """A giver of two pages, with room for no more, on a clock that is set."""

    def __init__(self):
        self.clock, self.slots = Hand(), GivenSlots(3)
        self.shelf = Shelf(2 * SLOT, (SLOT,), self.slots.shared, self.clock)
        for number in range(2):
            assert all(self.shelf.put([self.slots.page(key(number), content(number), number)]))
        self.open = []

    def connect(self, *numbers):
        """Return both ends of a connection, to which these pages are lent."""
        ends = [FrameSocket(raw) for raw in socket.socketpair()]
        self.open += ends
        session = PeerSession(ends[0], self.shelf, True, self.clock)
        if numbers:
            ends[1].send(FrameKind.FETCH, LEASE.pack(7), *map(key, numbers))
            assert session.turn()
            ends[1].receive(FrameKind.LENT)
        return session, ends[1]

    def put(self):
        """Put another page there; return whether there was room for it."""
        return all(self.shelf.put([self.slots.page(key(2), content(2), 2)]))

    def close(self):
        for end in self.open:
            end.close()
        self.shelf.check()
        self.slots.shared.close()


@pytest.fixture
def lent(opened):
    return opened(Lent())


def late(session):
    """Whether the peer should have returned something by now, or sent a frame."""
    return session.left() == 0.0


def ended(session):
    """Have a session end, as its thread does when a turn is the last."""
    try:
        assert not session.turn()
    except OSError:
        assert late(session)
    session.end()
    return True


def test_a_peer_that_renews_keeps_its_loan_beyond_the_first_term(lent):
    session, taker = lent.connect(0, 1)
    for _ in range(3):
        lent.clock.now += LEASE_SECONDS - 0.1
        taker.send(FrameKind.RENEW)
        assert not late(session) and session.turn() and lent.shelf.lent == 2
    assert taker.silent, "it is not answered"
    taker.send(FrameKind.RETURN, LEASE.pack(7))
    assert session.turn() and not lent.shelf.lent
    lent.clock.now += 100
    taker.send(FrameKind.RENEW)
    assert not late(session) and session.turn(), "who has nothing can be late with nothing"


def test_a_lease_is_renewed_by_every_frame(lent):
    session, taker = lent.connect(0)
    lent.clock.now += LEASE_SECONDS - 0.1
    taker.send(FrameKind.RETURN, LEASE.pack(6))
    assert session.turn()
    lent.clock.now += LEASE_SECONDS - 0.1
    assert not late(session) and lent.shelf.lent == 1


def test_pages_lent_to_a_peer_that_is_silent_go_back_with_the_end_of_its_connection(lent):
    session, taker = lent.connect(0, 1)
    lent.clock.now += LEASE_SECONDS - 0.1
    assert not late(session)
    lent.clock.now += 0.1
    assert late(session) and not lent.put(), "its slots are not reused before the connection has ended"
    assert ended(session) and lent.shelf.lent == 0 and lent.put()
    assert not taker.wait(1), "so it hears of it before it can take what it reads for right"


def test_a_peer_that_renews_for_ever_gives_back_at_the_bound(lent):
    session, taker = lent.connect(0)
    for _ in range(int(LONGEST_LEASE_SECONDS) - 1):
        lent.clock.now += 1
        taker.send(FrameKind.RENEW)
        assert session.turn() and lent.shelf.lent == 1
    lent.clock.now += 1
    taker.send(FrameKind.RENEW)
    assert late(session) and not session.turn()
    session.end()
    assert lent.shelf.lent == 0


def test_a_lease_is_renewed_by_its_own_connection_alone(lent):
    (session, _), (stranger, other) = lent.connect(0), lent.connect()
    lent.clock.now += LEASE_SECONDS
    for _ in range(3):
        other.send(FrameKind.RENEW)
        assert stranger.turn() and not late(stranger) and not stranger.lent
    assert late(session) and ended(session)


def test_a_giver_that_was_stopped_itself_reads_its_frames_before_it_judges(lent):
    session, taker = lent.connect(0)
    taker.send(FrameKind.RENEW)
    lent.clock.now += LEASE_SECONDS + 1
    assert late(session) and session.turn() and not late(session) and lent.shelf.lent == 1


# The side that takes.


@pytest.fixture
def borrower(giver, setup, path, monkeypatch):
    """(a giver, a link to it whose clock is set, the clock, and the frames that the link has sent)"""
    clock, said, send = Hand(), [], FrameSocket.send

    def noted(self, kind, *parts, **options):
        said.extend([kind] if kind in FROM_TAKERS else [])
        send(self, kind, *parts, **options)

    monkeypatch.setattr(FrameSocket, "send", noted)
    stored(giver, setup, 0, 1)
    caller = PeerCaller(PeerAddress(path=str(path)), KEY, setup.namespace)
    link = PeerLink(caller, CopyThreads(), setup.slot_bytes, lambda data: lambda: None, clock=clock)
    assert link.turn() and link.lends
    said.clear()
    yield giver, link, clock, said
    link.stop()
    link.start().close()


def rest(link):
    """Let a link do all that is due."""
    while link.turn():
        pass


def test_a_link_renews_while_it_has_borrowed_pages_and_is_silent_otherwise(borrower):
    giver, link, clock, said = borrower
    clock.now += 10
    rest(link)
    assert not said
    for job in (1, 2):
        link.load(job, [TierPage(key(job - 1))], borrows=True)
        rest(link)
    assert [len(end.checksums) for end in link.ended] == [1, 1] and giver.shelf.lent == 2
    clock.now += RENEW_SECONDS - 0.01
    rest(link)
    assert said == [FrameKind.FETCH] * 2, "these frames renew too"
    said.clear()
    clock.now += 0.01
    for _ in range(4):
        rest(link)
        clock.now += RENEW_SECONDS
    assert said == [FrameKind.RENEW] * 4 and 2 * RENEW_SECONDS < LEASE_SECONDS
    for job in (1, 2):
        link.give_back(job)
    rest(link)
    clock.now += 10
    rest(link)
    assert said == [FrameKind.RENEW] * 4 + [FrameKind.RETURN] * 2 and giver.shelf.lent == 0


def test_a_question_is_repeated_until_its_time_has_passed(borrower):
    giver, link, clock, said = borrower
    giver.shelf.begin("R")
    link.ask("R", [key(5)], clock.now + 0.1)
    for _ in range(3):
        rest(link)
        clock.now += 0.03
    assert said == [FrameKind.ASK] * 3
    clock.now += 0.03
    rest(link)
    assert said == [FrameKind.ASK] * 3


def test_a_link_that_gives_back_after_the_end_of_the_lease_connects_again_at_once(borrower):
    giver, link, _, said = borrower
    link.load(1, [TierPage(key(0))], borrows=True)
    rest(link)
    (session,) = giver.server.connections
    session.stop()
    until(lambda: not giver.server.connections)
    link.give_back(1)
    rest(link)
    assert link.lends and not link.error and FrameKind.RETURN not in said


def test_a_link_renews_nothing_at_a_peer_that_has_come_after_the_one_that_lent(borrower):
    giver, link, clock, said = borrower
    link.load(1, [TierPage(key(0))], borrows=True)
    rest(link)
    assert said == [FrameKind.FETCH]
    (session,) = giver.server.connections
    session.stop()
    until(lambda: not giver.shelf.lent)
    clock.now += 10
    rest(link)
    assert link.lends, "it has connected again"
    said.clear()
    clock.now += 10
    rest(link)
    link.give_back(1)
    rest(link)
    assert not said
