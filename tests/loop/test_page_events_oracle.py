"""Page events over the checksum model: a dictionary that applies them is the settled part of the index."""

from __future__ import annotations

import random

import pytest
import torch
from grouped_model import GroupedModel
from harness import VOCAB, Run, ask, check_at_rest, kernels_for, model_loop, script, sizes
from page_router import Router

from gapless.base.records import Flag
from gapless.loop.spec import HostSizes, Sizes
from gapless.memory.events import PageEvents
from gapless.memory.pages import PageListener
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

POISON = 5
SLOT = 4096


class Poisoned(ChecksumModel):
    """The logits after one token are not finite, so that its row fails and the pages that it shares are in doubt."""

    def forward(self, inputs, plan, cache):
        return torch.where((inputs.ids == POISON)[:, None], -1, super().forward(inputs, plan, cache))

    def logits(self, hidden):
        return torch.where(hidden < 0, torch.nan, super().logits(hidden.clamp(min=0)))


def collect(loop):
    events = loop.planner.index.events = PageEvents(loop.pools)
    return events


def settled(pool):
    return {digest for page, digest in pool.digest_of.items() if pool.settled(page)}


class Watched(Run):
    """Compares the router with the index every turn or every few; at times it empties the index, or loses events."""

    def __init__(self, loop, jobs, seed, complete=True, upsets=0.0):
        super().__init__(loop, jobs, looks=True)
        self.events, self.router = collect(loop), Router(loop.planner.index.hasher)
        self._rng, self._complete, self._upsets = random.Random(seed), complete, upsets
        self.hidden = self.unsettled = 0
        for pool in loop.pools:
            pool.hide = self._counted(pool.hide)

    def _counted(self, hide):
        def counted(pages):
            self.hidden += sum(page != 0 for page in pages)
            hide(pages)

        return counted

    def check(self):
        super().check()
        if self._rng.random() < self._upsets:
            for pool in self.loop.pools:
                pool.forget()
        if self._rng.random() < 0.3:
            return  # the port was not clear
        self.router.apply(self.events.take())
        for group, pool in enumerate(self.loop.pools):
            want = settled(pool)
            self.unsettled += len(pool.digest_of) - len(want)
            assert self.router.known(group) <= want
            if self._complete:
                assert self.router.known(group) == want


@pytest.mark.parametrize("kind", [ChecksumModel, Poisoned, GroupedModel])
def test_a_router_knows_the_settled_pages_and_no_others(kind):
    preempted = hits = removed = 0
    hidden = unsettled = 0
    for seed in range(5):
        shape = sizes(seed)._replace(page_size=2, pages=26 + seed % 4)
        loop = model_loop(kind(VOCAB, shape.max_len), SimDevice(seed), shape, 1 + seed % 4, kernels=kernels_for(seed))
        player = Watched(loop, script(seed, shape.max_len), seed, upsets=0.02 * (seed % 3 == 0))
        player.run(1_000)
        check_at_rest(loop)
        assert player.router.cleared >= 1 and player.router.stored
        preempted, hits = preempted + loop.planner.preemptions, hits + loop.counters.prefix_hits
        hidden, unsettled = hidden + player.hidden, unsettled + player.unsettled
        removed += player.router.removed
    assert removed > 40 and preempted and hits and unsettled
    assert hidden if kind is Poisoned else not hidden


@pytest.mark.parametrize("lost", [False, True])
def test_pages_that_came_from_elsewhere_are_announced_with_the_sequence_that_claims_them(lost):
    """They are loaded from the host tier, or were announced before events were lost."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    shape = Sizes(rows=2, max_len=64, pages=60 if lost else 20, page_size=4, step_tokens=64, queue=8)
    host = None if lost else HostSizes(100 * SLOT, 1)
    loop = model_loop(ChecksumModel(VOCAB, shape.max_len), SimDevice(1), shape, 2, host=host)
    router, events = Router(loop.planner.index.hasher), collect(loop)
    for number, prompt in enumerate(prompts * 2):
        if lost and number == len(prompts):
            events.restart()
        job = ask(number, prompt)
        player = Run(loop, [job], looks=True)
        player.run(1_000)
        job.check()
        router.apply(events.take())
        own = loop.planner.index.hasher.after(loop.planner.index.hasher.root(""), job.request.tokens)
        assert {*own[:10]} <= router.known() <= settled(loop.pools[0])
    assert loop.counters.prefix_hits >= 4 * 36
    assert router.cleared == 1 + lost and (lost or loop.parts.transfers.host.counts.loaded > 20)


def test_an_engine_that_sends_no_events_collects_none():
    shape = Sizes(rows=2, max_len=64, pages=20, page_size=4, step_tokens=64, queue=8)
    loop = model_loop(ChecksumModel(VOCAB, shape.max_len), SimDevice(1), shape, 2)
    job = ask(1, range(20))
    Run(loop, [job], looks=True).run(1_000)
    assert job.flag == Flag.LENGTH and loop.planner.index.events is None
    assert type(loop.pools[0].journal) is PageListener
