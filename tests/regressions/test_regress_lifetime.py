"""Rows of the class lifetime: a page, a row or a buffer reused while a step in flight can still reach it."""

from __future__ import annotations

import pytest
from scenes import (
    broken,
    crowd,
)

from gapless.memory.pages import PagePool

pytestmark = pytest.mark.unguarded

SEEDS = range(8)


def test_lifetime_L5_one_victim_at_a_time_while_pages_are_on_their_way_back():
    """Deferred frees made a preemption yield no page at once, so more and more requests were preempted. Here fenced
    pages are a class of their own: while any are, or a victim still waits for its steps, no other row is chosen."""

    def watched(loop):
        planner, plan = loop.planner, loop.planner.plan

        def watch():
            fenced, held, preempted = loop.pools[0].counts().fenced, set(planner.leaving), planner.preemptions
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
