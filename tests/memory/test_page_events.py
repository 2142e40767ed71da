"""Page events of a pool, page by page: what is announced, when, and how it is put together."""

from __future__ import annotations

import numpy as np
from page_router import Router

from gapless.base.records import PageChange
from gapless.memory.events import PageEvents
from gapless.memory.groups import FULL, WindowRule
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher

SIZE = 4
STORED, REMOVED, CLEARED = PageChange


class World:
    """An index over pools of ten pages, and what a sequence of it does."""

    def __init__(self, *rules, name_of=str):
        self.ledger = Ledger()
        self.pools = [PagePool(11, SIZE, self.ledger, rule) for rule in rules or (FULL,)]
        self.index = PrefixIndex(PrefixHasher("m", SIZE), self.pools)
        self.events = self.index.events = PageEvents(self.pools, name_of)
        self.steps = 0
        assert [event.change for event in self.events.take()] == [CLEARED]

    def write(self, tokens, salt="", adapter="", first=0):
        """A new step fills the pages of these tokens from `first` on; returns their pages by group."""
        self.steps += 1
        chain = self.index.chain(tokens, salt, adapter)
        held = [[pool.take() if number >= first else 0 for number in range(len(tokens) // SIZE)] for pool in self.pools]
        self.index.publish(chain, tokens, held, first, len(tokens) // SIZE, self.steps)
        return held

    def observe(self):
        for step in range(self.ledger.completed, self.steps):
            self.ledger.advance(Clock.COMPUTE, step + 1)

    def take(self):
        return [(event.change, event.group, len(event.digests)) for event in self.events.take()]


def prompt(pages, seed=0):
    return np.random.default_rng(seed).integers(0, 99, pages * SIZE).astype(np.int32)


def test_pages_that_follow_each_other_are_one_event_once_their_step_was_observed():
    world, tokens = World(), prompt(3)
    world.write(tokens, "t:s")
    assert world.take() == []
    world.observe()
    (event,) = world.events.take()
    hasher = world.index.hasher
    assert event.digests == tuple(hasher.after(hasher.root("t:s"), tokens))
    assert (event.change, event.parent, event.salt, event.window) == (STORED, None, "t:s", 0)
    assert event.tokens.tolist() == tokens.tolist()
    world.write(np.concatenate((tokens, prompt(2, 1))), "t:s", first=3)
    world.observe()
    (more,) = world.events.take()
    assert more.parent == event.digests[-1] and len(more.digests) == 2


def test_the_tokens_of_an_event_are_a_copy():
    """The row table's line is another sequence's when the event is taken."""
    world, tokens = World(), prompt(2)
    world.write(tokens)
    before = tokens.copy()
    tokens[:] = 0
    world.observe()
    assert world.events.take()[0].tokens.tolist() == before.tolist()


def test_a_page_that_leaves_before_it_was_announced_is_mentioned_neither_way():
    world = World()
    (pages,) = world.write(prompt(2))
    world.pools[0].hide(pages)
    world.observe()
    assert world.take() == []


def test_a_page_in_doubt_and_an_evicted_one_are_removed():
    world = World()
    (pages,) = world.write(prompt(3))
    world.observe()
    assert world.take() == [(STORED, 0, 3)]
    world.pools[0].hide(pages[:1])
    world.pools[0].retire(pages, world.steps)
    while world.pools[0].free:
        world.pools[0].take()
    assert world.take() == [(REMOVED, 0, 1)]
    world.pools[0].take()
    world.pools[0].take()
    assert world.take() == [(REMOVED, 0, 2)]


def test_a_page_that_comes_back_is_stored_after_it_was_removed():
    world, router = World(), None
    router = Router(world.index.hasher)
    for _ in range(3):
        (pages,) = world.write(prompt(2))
        world.observe()
        router.apply(world.events.take())
        assert len(router.known()) == 2
        world.pools[0].hide(pages)
        world.pools[0].retire(pages, world.steps)
    assert router.removed == 4


def test_prompts_of_their_own_tenants_and_groups_are_events_of_their_own():
    world = World(FULL, WindowRule(8), name_of=lambda digest: f"name of {digest}")
    for salt, adapter in (("a", ""), ("b", ""), ("a", "lora")):
        world.write(prompt(1), salt, adapter)
    world.observe()
    found = [(event.group, event.salt, event.adapter, event.window) for event in world.events.take()]
    assert found == [
        (group, *own, window)
        for group, window in ((0, 0), (1, 8))
        for own in (("a", ""), ("b", ""), ("a", "name of lora"))
    ]


def test_events_queued_before_a_clear_are_dropped_with_it():
    world = World()
    (pages,) = world.write(prompt(2))
    world.observe()
    world.take()
    world.pools[0].hide(pages[:1])
    world.write(prompt(2, 1))
    world.pools[0].forget()
    world.observe()
    assert world.take() == [(CLEARED, 0, 0)]
    world.write(prompt(2, 2))
    world.observe()
    assert world.take() == [(STORED, 0, 2)]


def test_events_that_are_never_taken_do_not_outgrow_the_pages():
    world = World()
    for seed in range(100):
        (pages,) = world.write(prompt(4, seed))
        world.pools[0].retire(pages, world.steps)
        world.observe()
        if not seed:
            world.take()
    found = world.events.take()
    assert sum(len(event.digests) for event in found) <= 2 * world.pools[0].size
    router = Router(world.index.hasher)
    router.known().update(world.index.hasher.after(world.index.hasher.root(""), prompt(4)))
    router.apply(found)
    assert router.known() == {*world.pools[0].digest_of.values()}
