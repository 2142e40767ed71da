"""Slots of adapters: shared by the rows of one, loaded again only when no step can read them."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.memory.adapters import AdapterSlots
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.rows import RowTable

TOKENS = np.array([1], np.int32)


class World:
    """Slots for adapters of one letter, each with one request."""

    def __init__(self, slots: int) -> None:
        self.ledger = Ledger()
        self.slots = AdapterSlots(slots, self.ledger)
        self.rows = RowTable(8, 4, self.ledger)
        self.rows.slots = dict.fromkeys("abcd", self.slots)
        self.slots.requests.update("abcd")

    def lends(self, name):
        return self.rows.lends((name,))

    def load(self):
        """Begin and end the next load; the adapter that it brings, or None."""
        load = self.slots.next_load()
        if load is not None:
            self.ledger.advance(Clock.ADAPTERS, load.number)
        return load and load.adapter

    def take(self, name):
        return self.rows.take(1, TOKENS, (name,))


@pytest.fixture
def world():
    return World(2)


def test_an_adapter_is_loaded_when_it_is_asked_for_and_its_rows_share_the_slot(world):
    assert world.load() is None and not world.lends("a")
    load = world.slots.next_load()
    assert load.adapter == "a" and not world.lends("a"), "it is on its way"
    assert world.slots.next_load() is None and not world.slots.wanted
    world.ledger.advance(Clock.ADAPTERS, load.number)
    one, other = world.take("a"), world.take("a")
    assert world.rows.leased[one] == world.rows.leased[other] == {"a": load.slot}


def test_a_slot_is_loaded_again_when_the_last_step_of_its_rows_has_completed():
    world = World(1)
    world.lends("a"), world.load()
    row, other = world.take("a"), world.take("a")
    assert not world.lends("b") and world.load() is None
    world.rows.retire(row, last_step=1)
    world.rows.retire(other, last_step=2)
    world.ledger.advance(Clock.COMPUTE, 1)
    assert world.load() is None and not world.slots.free
    world.ledger.advance(Clock.COMPUTE, 2)
    assert world.load() == "b" and world.lends("b") and not world.lends("a")


def test_the_idle_adapter_that_was_taken_least_recently_makes_way(world):
    for name in "ab":
        world.lends(name), world.load()
    for name in "ba":
        world.rows.retire(world.take(name), last_step=0)
    world.lends("c")
    assert world.load() == "c" and world.lends("a") and not world.lends("b")


def test_one_that_was_just_loaded_waits_for_its_requests_unless_they_have_left(world):
    for name in "ab":
        world.lends(name), world.load()
    world.lends("c")
    assert world.load() is None
    world.slots.requests["a"] = 0
    assert world.load() == "c"


def test_an_adapter_takes_no_more_rows_when_all_slots_are_in_use_and_another_waits(world):
    for name in "ab":
        world.lends(name), world.load(), world.take(name)
    assert not world.lends("c") and world.load() is None
    assert not world.lends("a") and world.lends("b")
    world.slots.requests["c"] = 0
    assert world.load() is None and world.lends("a"), "nothing waits for it any more"


def test_one_is_forgotten_when_no_request_load_or_step_needs_it(world):
    world.lends("a")
    load = world.slots.next_load()
    assert not world.slots.forget("a"), "a request waits for it"
    world.slots.requests["a"] = 0
    assert not world.slots.forget("a"), "it is being loaded"
    world.ledger.advance(Clock.ADAPTERS, load.number)
    row = world.take("a")
    world.rows.retire(row, last_step=1)
    assert not world.slots.forget("a"), "a step in flight reads it"
    world.ledger.advance(Clock.COMPUTE, 1)
    assert world.slots.forget("a") and sorted(world.slots.unused) == [1, 2] and not world.slots.held
    world.slots.requests["b"] = 0
    assert world.slots.forget("b"), "it was never loaded"
