"""Rows of the class lifetime: a page, a row or a buffer reused while a step in flight can still reach it."""

from __future__ import annotations

import pytest
from harness import checksum_loop
from scenes import (
    broken,
    crowd,
    job,
    play,
    tokens,
)

from gapless.loop.build import Sizes
from gapless.memory.pages import PagePool
from gapless.plan.planner import Planner
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

SEEDS = range(8)


@pytest.mark.seeds
def test_row_056_two_that_need_each_others_pages_still_make_progress():
    """Freeing needed a step of progress and progress needed the free: the engine span without a token. Here a pool
    that holds one longest sequence serves four of them at depth 8, and every turn that can do nothing ends a wait."""

    def scene():
        done = []
        for seed in SEEDS:
            shape = Sizes(2, 41, 11, 4, 4, 8)
            loop = checksum_loop(SimDevice(seed), shape, 8)
            done.append(play(loop, [job(key, tokens(key, 4), 37) for key in range(4)]))
        return done

    assert all(loop.planner.preemptions > 0 for loop in scene())

    def after_one_more_step(planner):
        held, completed = planner.leaving, planner.ledger.completed
        planner.leaving = [seq for seq in held if seq.last_step < completed]
        preempt_now(planner)
        planner.leaving = [seq for seq in held if seq.last_step >= completed]

    preempt_now = Planner.preempt
    with broken(Planner, "preempt", after_one_more_step):
        scene()


def test_lifetime_L5_one_victim_at_a_time_while_pages_are_on_their_way_back():
    """Deferred frees made a preemption yield no page at once, so more and more requests were preempted. Here fenced
    pages are a class of their own: while any are, or a victim still waits for its steps, no other row is chosen."""

    def watched(loop):
        planner, plan = loop.planner, loop.planner.plan

        def watch():
            fenced, held, preempted = loop.pool.counts().fenced, set(planner.leaving), planner.preemptions
            made = plan()
            chosen = set(planner.leaving) - held or planner.preemptions - preempted > len(held)
            assert len(planner.leaving) <= 1, "a second victim, while the first has yet to give its pages back"
            assert not (chosen and fenced), f"a victim, while {fenced} pages are on their way back"
            return made

        planner.plan = watch

    def scene():
        loops = [crowd(seed, tweak=watched, mood="lazy") for seed in SEEDS]
        return sum(loop.planner.preemptions for loop in loops)

    assert scene() > 0
    with broken(PagePool, "fenced", 0):
        scene()
