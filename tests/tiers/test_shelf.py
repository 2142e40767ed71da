"""The shelf of pages for peers: its bounds, what it forgets, and who may still read what is gone."""

from __future__ import annotations

from tier_rig import SLOT, Hand, content, key

from gapless.tiers.seam import Found
from gapless.tiers.shelf import Shelf


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
    assert shelf.used == SLOT and shelf.lend(key(2)) is None, "no peer has asked for it for a minute"
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
