"""The shelf of pages for peers: its bounds, what it forgets, and who may still read what is gone."""

from __future__ import annotations

from peer_rig import GivenSlots
from tier_rig import SLOT, Hand, content, key

from gapless.offload.tiers.seam import Found, key_of
from gapless.offload.tiers.shelf import Shelf, ShelfPage


def test_the_shelf_has_a_bound_and_forgets():
    clock, slots = Hand(), GivenSlots(5)
    shelf = Shelf(3 * SLOT, (SLOT,), slots.shared, clock)

    def put(number):
        return all(shelf.put([slots.page(key(number), content(number), number)]))

    for number in range(5):
        clock.now += 1
        assert put(number)
        shelf.find("", [key(2)])
    assert [one is Found.HIT for one in shelf.find("", [key(n) for n in range(5)])] == [False, False, True, True, True]
    assert shelf.used == 3 * SLOT and len(slots.free) == 2
    taken = shelf.lend(key(2))
    clock.now += 59
    put(4)
    clock.now += 2
    shelf.expire()
    assert shelf.used == 2 * SLOT and shelf.lend(key(2)) is None, "no peer has asked for it for a minute"
    assert taken.data == content(2), "who reads it has it all the same"
    shelf.drop([key(4), key(7)])
    assert shelf.used == SLOT
    for number in (5, 6, 7, 8):
        assert put(number)
    assert taken.data == content(2) and shelf.used == 3 * SLOT, "its slot is not free before it is given back"
    shelf.check()
    shelf.give_back([taken])
    assert put(9) and shelf.used == 3 * SLOT and len(slots.free) == 2
    slots.shared.close()


def test_a_shelf_that_is_all_lent_refuses_pages():
    slots = GivenSlots(2)
    shelf = Shelf(SLOT, (SLOT,), slots.shared)
    assert all(shelf.put([slots.page(key(0), content(0), 0)]))
    taken = [shelf.lend(key(0)), shelf.lend(key(0))]
    for one in taken:
        assert not any(shelf.put([slots.page(key(1), content(1), 1)])), "a reader may still look"
        assert taken[0].data == content(0) and len(slots.free) == 1
        shelf.give_back([one])
    assert all(shelf.put([slots.page(key(1), content(1), 1)])) and len(slots.free) == 1
    slots.shared.close()


def test_a_page_that_is_there_keeps_its_slot_and_the_other_one_is_free_again():
    slots = GivenSlots(3)
    shelf = Shelf(2 * SLOT, (SLOT,), slots.shared)
    for _ in range(3):
        assert all(shelf.put([slots.page(key(0), content(0), 0)])) and shelf.used == SLOT and len(slots.free) == 2
    shelf.check()
    slots.shared.close()


def test_each_group_of_pages_has_its_share():
    slots = GivenSlots(8)
    shelf = Shelf(6 * SLOT, (SLOT, 2 * SLOT), slots.shared)
    for number in range(4):
        assert all(shelf.put([ShelfPage(key_of(0, bytes([number]) * 32), slots.of(number), 0, lambda: None)]))
    assert all(shelf.put([ShelfPage(key_of(1, bytes(32)), slots.of(4), 0, lambda: None)]))
    assert [page.key[-4] for page in shelf.pages.values()] == [0, 0, 1] and shelf.used == 3 * SLOT
    shelf.check()
    slots.shared.close()


def test_the_shelf_knows_requests_for_a_while():
    clock = Hand()
    shelf = Shelf(SLOT, (SLOT,), clock=clock)

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
