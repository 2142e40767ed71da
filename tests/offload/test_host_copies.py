"""Copies in host memory: when pages are stored, found, loaded, refused and given away."""

from __future__ import annotations

import pytest

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PageCounts, PagePool, Pin
from gapless.offload.host import HostTier


class World:
    """A pool, a tier and their clock."""

    def __init__(self, pages=6, slots=3):
        self.now = 0
        self.ledger = Ledger()
        self.pool = PagePool(pages, 4, self.ledger)
        self.tier = HostTier([self.pool], self.ledger, slots, lambda: self.now, 100)
        self.steps = 0

    @classmethod
    def holding(cls, *digests, **sizes):
        """A world whose tier alone has these pages."""
        world = cls(**sizes)
        world.store(*digests)
        world.evict()
        return world

    def write(self, *digests):
        """A step fills a page for each of these digests, and its request leaves."""
        self.steps += 1
        for digest in digests:
            page = self.pool.take()
            self.pool.publish(page, digest, self.steps)
            self.pool.retire([page], self.steps)

    def observe(self):
        self.ledger.advance(Clock.COMPUTE, self.steps)

    def store(self, *digests):
        """The same, and the pages are stored."""
        self.write(*digests)
        self.observe()
        batch = self.tier.next_store()
        self.tier.stored(batch, [ord(move.copy.digest) for move in batch.moves])
        self.tier.check()

    def evict(self):
        """Others take all pages, and give them back."""
        pages = [self.pool.take() for _ in range(self.pool.available())]
        self.pool.retire(pages, 0)

    def load(self, *digests):
        ticket = self.tier.load([(self.pool, digest) for digest in digests])
        return ticket, self.tier.next_load()


def test_a_page_is_stored_only_when_its_step_was_observed():
    world = World()
    world.write(b"a")
    assert world.tier.busy and world.tier.next_store() is None
    world.observe()
    (move,) = world.tier.next_store().moves
    assert move.copy.digest == b"a" and world.pool.digest_of[move.page] == b"a"
    assert not world.tier.has(world.pool, b"a"), "its store is on the way"


def test_a_page_that_is_stored_is_not_given_away_before_the_end():
    world = World()
    world.write(b"a")
    world.observe()
    batch = world.tier.next_store()
    assert world.pool.counts().fenced == 1 and world.pool.available() == 4
    world.tier.stored(batch, [1])
    assert world.pool.counts() == PageCounts(4, 1, 0, 0) and world.tier.has(world.pool, b"a")


def test_a_loaded_page_is_shared_and_takes_no_second_copy():
    world = World.holding(b"a")
    assert world.pool.find(b"a") is None
    ticket, batch = world.load(b"a")
    assert world.tier.waits(ticket) and world.pool.find(b"a") is None
    world.tier.loaded(batch, [ord("a")])
    assert not world.tier.waits(ticket) and world.pool.settled(world.pool.find(b"a"))
    assert not world.tier.busy and world.tier.counts.loaded == 1 and world.pool.counts() == PageCounts(4, 1, 0, 0)


def test_a_page_with_another_checksum_is_refused_and_its_copy_dropped():
    world = World.holding(b"a")
    ticket, batch = world.load(b"a")
    world.tier.loaded(batch, [7])
    assert not world.tier.waits(ticket), "the request goes on and computes"
    assert world.pool.find(b"a") is None and world.pool.counts() == PageCounts(5, 0, 0, 0)
    assert not world.tier.has(world.pool, b"a") and world.tier.used() == 0 and world.tier.counts.refused == 1


def test_a_page_that_comes_in_doubt_while_it_is_loaded_is_refused():
    world = World.holding(b"a")
    _, batch = world.load(b"a")
    world.tier.groups[0].hidden(b"a")
    assert world.tier.used() == 1, "the transfer still reads its slot"
    world.tier.loaded(batch, [ord("a")])
    assert world.pool.find(b"a") is None and world.tier.used() == 0


def test_a_page_that_the_pool_hides_loses_its_copy():
    world = World()
    world.store(b"a")
    page = world.pool.find(b"a")
    world.pool.pin(page)
    world.pool.hide([page])
    assert not world.tier.has(world.pool, b"a") and world.tier.used() == 0


def test_an_emptied_index_leaves_no_copy():
    world = World()
    world.store(b"a")
    world.write(b"b")
    world.pool.forget()
    assert not world.tier.busy and world.tier.used() == 0


def test_a_request_stops_waiting_for_a_late_load_whose_page_still_comes():
    world = World.holding(b"a")
    ticket, batch = world.load(b"a")
    world.now = 100
    assert not world.tier.waits(ticket) and world.tier.counts.late == 1
    assert world.pool.counts().owned + world.pool.counts().fenced == 1, "late bytes must not meet a new owner"
    world.tier.loaded(batch, [ord("a")])
    assert world.pool.find(b"a") is not None


def test_the_oldest_copy_makes_room_and_those_under_a_transfer_stay():
    world = World.holding(b"a", b"b", slots=2)
    _, batch = world.load(b"a")
    world.store(b"c")
    assert world.tier.has(world.pool, b"a") and not world.tier.has(world.pool, b"b")
    world.write(b"d", b"e")
    world.observe()
    (move,) = world.tier.next_store().moves
    assert move.copy.digest == b"d" and world.tier.counts.dropped_full == 1, "c made room, a is being loaded"
    world.tier.loaded(batch, [ord("a")])
    world.tier.check()


def test_a_page_given_away_before_its_store_is_counted_as_gone():
    world = World(pages=2)
    world.write(b"a")
    world.observe()
    world.evict()
    assert world.tier.next_store() is None and not world.tier.busy
    assert world.tier.counts.dropped_gone == 1


def test_two_requests_for_one_page_share_its_load():
    world = World.holding(b"a")
    first, batch = world.load(b"a")
    second, none = world.load(b"a")
    assert none is None and first.left == second.left == 1
    world.tier.loaded(batch, [ord("a")])
    assert not world.tier.waits(second)


def test_a_load_is_not_late_while_those_before_it_end():
    world = World.holding(b"a", b"b", pages=12, slots=8)
    first, batch = world.load(b"a")
    second = world.tier.load([(world.pool, b"b")])
    world.now = 90
    world.tier.loaded(batch, [ord("a")])
    assert not world.tier.waits(first) and world.tier.next_load()
    world.now = 189
    assert world.tier.waits(second)
    world.now = 190
    assert not world.tier.waits(second) and world.tier.counts.late == 1


def test_a_page_is_not_loaded_when_no_request_waits_for_it():
    world = World.holding(b"a", b"b")
    tickets = [world.tier.load([(world.pool, b"a")]), world.tier.load([(world.pool, b"a"), (world.pool, b"b")])]
    tickets[1].given_up = True
    (move,) = world.tier.next_load().moves
    assert move.copy.digest == b"a" and not world.tier.busy
    world.tier.check()


def test_loads_leave_a_page_to_each_row_that_runs():
    world = World.holding(b"a", b"b", b"c", pages=5)
    world.tier.running = 2
    world.tier.load([(world.pool, digest) for digest in (b"a", b"b", b"c")])
    first = world.tier.next_load()
    assert len(first.moves) == 2 and world.pool.available() == 2 and world.tier.next_load() is None
    world.tier.loaded(first, [ord("a"), ord("b")])
    assert len(world.tier.next_load().moves) == 1, "what has come may make room, as all that is cached"


def test_a_filled_page_without_a_load_pin_is_an_error():
    world = World()
    with pytest.raises(AssertionError, match="without a pin"):
        world.pool.fill({world.pool.take(Pin.REQUEST): b"a"}, 1)
