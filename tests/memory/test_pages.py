"""The page pool against a naive model that keeps every owner as an object."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import NULL_PAGE, PageCounts, PagePool, Pin

PAGES = 7


class Owner:
    """A request: its pages in order, and whether it has gone."""

    def __init__(self, pages):
        self.pages = pages
        self.fence = None


class Pools(RuleBasedStateMachine):
    """Random owners, prefixes and steps. The naive model knows a page's owners one by one."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.pool = PagePool(PAGES, 4, self.ledger)
        self.step = 0
        self.owners: list[Owner] = []
        self.index: dict[bytes, int] = {}
        self.resting: list[int] = []  # indexed and unowned, oldest first
        self.free = set(range(1, PAGES))

    def holders(self, page):
        return [owner for owner in self.owners if page in owner.pages]

    def come_home(self):
        """Owners whose fence has passed are gone, those of earlier steps first, tails first."""
        gone = [owner for owner in self.owners if owner.fence is not None and owner.fence <= self.ledger.completed]
        for owner in sorted(gone, key=lambda owner: owner.fence):
            self.owners.remove(owner)
            for page in reversed(owner.pages):
                if not self.holders(page):
                    if page in self.index.values():
                        self.resting.append(page)
                    else:
                        self.free.add(page)

    @precondition(lambda self: self.pool.available())
    @rule()
    def take(self):
        page = self.pool.take()
        if self.free:
            assert page in self.free
            self.free.remove(page)
        else:
            assert page == self.resting.pop(0), "the least recently used prefix goes first"
            self.index = {digest: at for digest, at in self.index.items() if at != page}
        assert page != NULL_PAGE
        self.owners.append(Owner([page]))

    @precondition(lambda self: self.pool.available() and any(owner.fence is None for owner in self.owners))
    @rule(data=st.data())
    def grow(self, data):
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.fence is None]))
        self.take()
        owner.pages += self.owners.pop().pages

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, digest):
        page = self.pool.find(digest)
        assert page == self.index.get(digest) and self.pool.find(b"unknown") is None
        if page is not None:
            assert self.pool.resting([page]) == (page in self.resting)
            self.pool.pin(page)
            if page in self.resting:
                self.resting.remove(page)
            self.owners.append(Owner([page]))

    @precondition(lambda self: any(owner.fence is None for owner in self.owners))
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data, digest):
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.fence is None]))
        page = data.draw(st.sampled_from(owner.pages))
        self.pool.publish(page, digest)
        if digest not in self.index and page not in self.index.values():
            self.index[digest] = page

    @precondition(lambda self: any(owner.fence is None for owner in self.owners))
    @rule(data=st.data())
    def hide(self, data):
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.fence is None]))
        self.pool.hide(owner.pages)
        self.index = {digest: at for digest, at in self.index.items() if at not in owner.pages}

    @precondition(lambda self: any(owner.fence is None for owner in self.owners))
    @rule(data=st.data(), ahead=st.integers(-2, 2))
    def retire(self, data, ahead):
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.fence is None]))
        owner.fence = max(0, self.ledger.completed + ahead)
        self.pool.retire(owner.pages, owner.fence)
        self.come_home()

    @rule()
    def advance(self):
        self.ledger.advance(Clock.COMPUTE, self.ledger.completed + 1)
        self.come_home()

    @rule()
    def forget(self):
        self.pool.forget()
        self.free.update(self.resting)
        self.resting, self.index = [], {}

    @invariant()
    def counts_agree(self):
        held = {page for owner in self.owners for page in owner.pages}
        fenced = {page for page in held if all(owner.fence is not None for owner in self.holders(page))}
        expected = PageCounts(len(self.free), len(self.resting), len(held - fenced), len(fenced))
        assert self.pool.counts() == expected
        assert self.pool.fenced == len(fenced)
        assert self.pool.available() == len(self.free) + len(self.resting)
        assert expected.total == self.pool.size == PAGES - 1
        self.pool.check([owner.pages for owner in self.owners if owner.fence is None])
        assert all(self.pool.find(digest) == page for digest, page in self.index.items())


Pools.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None, derandomize=True
)
TestPools = Pools.TestCase


def pool_of(pages):
    ledger = Ledger()
    return PagePool(pages, 4, ledger), ledger


def test_the_map_has_a_letter_for_every_page():
    ledger = Ledger()
    pool = PagePool(7, 4, ledger)
    assert pool.page_map() == b"ffffff"
    first, second, third = (pool.take() for _ in range(3))
    pool.publish(first, b"one")
    pool.retire([first], last_step=1)
    ledger.advance(Clock.COMPUTE, 1)
    pool.retire([second], last_step=2)
    letters = dict(enumerate(pool.page_map().decode(), 1))
    assert (letters[first], letters[second], letters[third]) == ("c", "x", "o")
    assert sorted(letters.values()) == sorted("cxofff")
    pool.pin(first)
    assert pool.page_map()[first - 1 : first] == b"o"


def test_a_prefix_is_evicted_tail_first_and_oldest_first():
    pool, _ = pool_of(5)
    for digests in ((b"a", b"b"), (b"c", b"d")):
        pages = [pool.take() for _ in digests]
        for page, digest in zip(pages, digests, strict=True):
            pool.publish(page, digest)
        pool.retire(pages, 0)
    evicted = []
    for _ in range(4):
        known = [digest for digest in (b"a", b"b", b"c", b"d") if pool.find(digest) is not None]
        pool.take()
        evicted += [digest for digest in known if pool.find(digest) is None]
    assert evicted == [b"b", b"a", b"d", b"c"]


def test_using_a_prefix_makes_it_young():
    pool, _ = pool_of(3)
    for digest in (b"a", b"b"):
        page = pool.take()
        pool.publish(page, digest)
        pool.retire([page], 0)
    page = pool.find(b"a")
    pool.pin(page)
    pool.retire([page], 0)
    pool.take()
    assert pool.find(b"a") == page and pool.find(b"b") is None


def test_a_pool_that_lacks_digests_has_a_page_of_none():
    pool, _ = pool_of(4)
    page = pool.take()
    pool.publish(page, b"b")
    assert pool.lacks([]) and pool.lacks([b"a", b"c"]) and not pool.lacks([b"a", b"b"])
    pool.hide([page])
    assert pool.lacks([b"a", b"b"])


def test_a_shared_page_stays_owned_while_one_owner_stays():
    pool, ledger = pool_of(3)
    page = pool.take()
    pool.publish(page, b"a")
    pool.pin(page)
    pool.retire([page], 1)
    assert pool.counts() == PageCounts(1, 0, 1, 0)
    pool.retire([page], 2)
    assert pool.counts() == PageCounts(1, 0, 0, 1)
    ledger.advance(Clock.COMPUTE, 1)
    assert pool.counts() == PageCounts(1, 0, 0, 1)
    pool.pin(page)
    assert pool.counts() == PageCounts(1, 0, 1, 0), "a fenced page that is shared again is owned"
    ledger.advance(Clock.COMPUTE, 2)
    assert pool.counts() == PageCounts(1, 0, 1, 0)
    pool.retire([page], 2)
    assert pool.counts() == PageCounts(1, 1, 0, 0)


def test_an_owned_page_is_not_evicted_and_an_empty_pool_says_so():
    pool, _ = pool_of(3)
    taken = {pool.take(), pool.take()}
    assert taken == {1, 2} and pool.available() == 0
    with pytest.raises(AssertionError, match="no page"):
        pool.take()


def test_publishing_needs_an_owner():
    pool, _ = pool_of(3)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.publish(1, b"a")


def test_the_check_finds_a_lost_and_a_doubled_page():
    pool, _ = pool_of(4)
    pages = [pool.take(), pool.take()]
    pool.check([pages])
    with pytest.raises(AssertionError, match="owners counted"):
        pool.check([pages[:1]])
    with pytest.raises(AssertionError, match="owners counted"):
        pool.check([pages, pages])
    pool.free.append(pages[0])
    with pytest.raises(AssertionError, match="lists"):
        pool.check([pages])


# The doors, and pins of transfers. A transfer here is a number on its clock.


def out(number):
    return Clock.BULK_OUT, number


def test_a_step_may_read_a_page_that_is_planned_and_a_transfer_only_one_that_is_written():
    pool, ledger = pool_of(3)
    page = pool.take()
    assert not pool.settled(page), "what it holds is unknown"
    pool.publish(page, b"a", step=2)
    assert pool.find(b"a") == page and not pool.settled(page)
    ledger.advance(Clock.COMPUTE, 1)
    assert not pool.settled(page)
    ledger.advance(Clock.COMPUTE, 2)
    assert pool.settled(page)
    pool.hide([page])
    assert not pool.settled(page)


@pytest.mark.parametrize("late", [False, True])
def test_a_page_that_is_being_stored_stays_out_of_the_pool_though_its_request_ended(late):
    pool, ledger = pool_of(3)
    page = pool.take()
    pool.publish(page, b"a", step=1)
    ledger.advance(Clock.COMPUTE, 1)
    pool.pin(page, Pin.STORE)
    if not late:
        pool.unpin((page,), out(1), Pin.STORE)  # the transfer is on its way
    pool.retire([page], 1)
    assert pool.counts() == PageCounts(1, 0, late, not late), "a pin keeps it, then a fence"
    for step in range(2, 9):
        ledger.advance(Clock.COMPUTE, step)
    if late:
        pool.unpin((page,), out(1), Pin.STORE)
    assert pool.counts() == PageCounts(1, 0, 0, 1) and pool.available() == 1
    ledger.advance(Clock.BULK_OUT, 1)
    assert pool.counts() == PageCounts(1, 1, 0, 0)


def test_a_page_that_is_loaded_is_shared_once_its_transfer_is_acknowledged():
    pool, ledger = pool_of(3)
    page = pool.take(Pin.LOAD)
    pool.fill({page: b"a"}, transfer=2)
    ledger.advance(Clock.COMPUTE, 1)
    ledger.advance(Clock.BULK_IN, 1)
    assert pool.find(b"a") is None and pool.counts() == PageCounts(1, 0, 1, 0)
    ledger.advance(Clock.BULK_IN, 2)
    assert pool.find(b"a") == page and pool.settled(page) and pool.counts() == PageCounts(1, 1, 0, 0)


def test_a_page_comes_back_when_every_kind_of_pin_is_gone():
    pool, ledger = pool_of(3)
    page = pool.take()
    pool.publish(page, b"a")
    pool.pin(page, Pin.STORE)
    pool.retire([page], 0)
    assert pool.counts().owned == 1 and pool.page_map().count(b"o") == 1
    with pytest.raises(AssertionError, match="no pin LOAD"):
        pool.unpin((page,), kind=Pin.LOAD)
    pool.unpin((page,), out(1), Pin.STORE)
    ledger.advance(Clock.COMPUTE, 1)
    assert pool.counts().fenced == 1
    ledger.advance(Clock.BULK_OUT, 1)
    assert pool.counts().cached == 1


def test_a_page_under_two_pins_waits_for_the_fences_of_both():
    pool, ledger = pool_of(3)
    page = pool.take()
    pool.publish(page, b"a")
    pool.pin(page, Pin.STORE)
    pool.unpin((page,), out(1), Pin.STORE)
    pool.retire([page], 1)
    ledger.advance(Clock.BULK_OUT, 1)
    assert pool.counts().fenced == 1 and pool.available() == 1
    ledger.advance(Clock.COMPUTE, 1)
    assert pool.counts().cached == 1 and pool.available() == 2
