"""Rows of the class placeholder: a stand-in for a token that the host does not know yet leaks or is miscounted."""

from __future__ import annotations

from collections import Counter

import pytest
from harness import checksum_loop, script, sizes
from scenes import (
    Log,
    broken,
    job,
    play,
    tokens,
)
from sharpest import sharpest

from gapless.base.records import Flag
from gapless.loop.spec import Sizes
from gapless.memory.pages import PagePool
from gapless.plan.decode import DecodeSet
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

SEEDS = range(8)


@pytest.mark.parametrize("every", sharpest([3, 1, 7]))
def test_row_031_clearing_the_cache_neither_drops_nor_doubles_a_token(every):
    """A pause with a cleared cache discarded a fixed number of frames instead of those in flight: tokens were lost or
    came twice. Here the prefix index is emptied again and again under steps in flight, and every token comes once."""

    def scene():
        for seed in SEEDS:
            shape = sizes(seed)
            loop = checksum_loop(SimDevice(seed), shape, 8)
            _forget_often(loop, every)
            play(loop, script(seed, shape.max_len))

    scene()

    def with_pages_in_use(pool):
        pool.free.extend(page for page in pool.digest_of if page not in pool.cached)
        forget(pool)

    forget = PagePool.forget
    with broken(PagePool, "forget", with_pages_in_use):
        scene()


def _forget_often(loop, every):
    turn, turns = loop.turn, Counter()

    def with_forget():
        turns["all"] += 1
        if turns["all"] % every == 0:
            loop.pools[0].forget()
        return turn()

    loop.turn = with_forget


def _count_lines(loop, sampled):
    read = loop.launcher.read

    def counted(flight):
        out = read(flight)
        sampled["lines"] += int((out.flags != int(Flag.INERT)).sum())
        sampled["inert"] += int((out.flags == int(Flag.INERT)).sum())
        return out

    loop.launcher.read = counted


def test_row_036_a_known_length_costs_no_extra_step():
    """Without a check of the length every request ran a step too many, and rows went in and out of the batch. Here the
    host plans to the last token and no further: with max_tokens alone no line of any outbox is inert."""

    def scene():
        for depth in (1, 4, 8):
            sampled = Counter()
            loop = checksum_loop(SimDevice(depth), Sizes(4, 48, 49, 4, 16, 32), depth)
            _count_lines(loop, sampled)
            jobs = [job(key, tokens(key, 4 + key), 1 + 3 * key) for key in range(9)]
            log = Log(loop)
            play(loop, jobs)
            assert sampled == {"lines": sum(len(one.tokens) for one in jobs), "inert": 0}
            assert sum(len(plan.decode) for plan in log.plans) == sum(len(one.tokens) - 1 for one in jobs)

    scene()
    with broken(DecodeSet, "leave_at_end", lambda *_: None):
        scene()
