"""Rows with penalties, biases, allowed ids and bad words, more than there are slots for: who waits for a slot."""

from __future__ import annotations

import numpy as np
import pytest
from direct import Varied, direct_run
from harness import VOCAB, Job, check_at_rest, sizes
from mutation.tools import replaced
from oracles import ASKING

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.loop.loop import Loop
from gapless.memory.slots import Slots
from gapless.testing.loops import loop_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice


def varied(rows: int, slots: int) -> Loop:
    shape = sizes(0)._replace(rows=rows, pages=400, step_tokens=200, slots=slots, queue=400)
    return loop_of(SimDevice(1, "eager"), Varied(VOCAB, 48), shape, 2)


def asking(key: int, output: int = 6, **asks: object) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=None, **asks)
    words = ((1, 2, 3, 4),) * 256 if params.bad_words else ()
    return Job(Request(key, np.array([key, 1], np.int32), params, 0, (), 0, 2 + output, bad_words=words), 0, None)


def started(loop: Loop, jobs: list[Job]) -> list[int]:
    """The requests that the first step admits, all having been submitted; then all run to their ends."""
    for job in jobs:
        loop.submit(job.request)
    first, by_key = None, {job.request.key: job for job in jobs}
    while loop.has_work():
        turn = loop.turn()
        first = first or [key for key, _ in turn.started]
        for settled in turn.tokens:
            deliver(settled, by_key)
    assert [job.tokens for job in jobs] == [direct_run(job.request) for job in jobs]
    check_at_rest(loop)
    return first


def test_requests_that_wait_for_a_slot_hold_up_nobody_however_many_they_are():
    jobs = [asking(key, presence_penalty=1.0) for key in range(60)] + [asking(60), asking(61)]
    assert started(varied(rows=4, slots=2), jobs) == [0, 1, 60, 61]


def test_rows_run_in_chains_while_a_request_waits_for_a_slot():
    shape = sizes(0)._replace(rows=8, pages=400, step_tokens=200, slots=1)
    loop = loop_of(SimDevice(1, "eager"), Varied(VOCAB, 48), shape, 4, chain=4)
    jobs = [
        asking(0, presence_penalty=1.0, output=40),
        asking(1, output=40),
        asking(2, presence_penalty=1.0, output=40),
    ]
    for job in jobs:
        loop.submit(job.request)
    while len(loop.requests) == 3:
        assert any(loop.planner.waiting.parked.values()) or not loop.counters.chained_steps
        loop.turn()
    assert loop.counters.chained_steps > 20, "while the third was set aside"


def test_slots_are_filled_in_several_steps_where_all_ask_for_much():
    jobs = [asking(key, bad_words=["x"]) for key in range(6)] + [asking(7)]
    assert started(varied(rows=8, slots=8), jobs) == [0, 1, 2, 7]


def test_a_parked_request_that_leaves_is_forgotten():
    loop = varied(rows=4, slots=1)
    for key in range(300):
        loop.submit(asking(key, presence_penalty=1.0).request)
    loop.turn()
    for key in range(1, 299):
        loop.abort(key)
    waiting = loop.planner.waiting
    assert sum(map(len, (waiting.heap, *waiting.parked.values()))) < 200
    while loop.has_work():
        loop.turn()
    check_at_rest(loop)


@pytest.mark.parametrize("early", [None, 1, 1_000], ids=["at its last step", "one step early", "at once"])
def test_a_slot_that_is_given_away_before_its_last_step_has_run_is_noticed(early, guarded_steps):
    def retire(original, self, slot, last_step):
        original(self, slot, max(0, last_step - (early or 0)))

    noticed = 0
    with replaced(Slots, "retire", retire), guarded_steps.rest():
        for seed in range(100, 104):
            try:
                ASKING.play(seed, SimDevice(seed, "lazy"), 4)
            except AssertionError as error:
                noticed += "slots of it are free" in str(error)
    assert bool(noticed) == (early is not None)


def test_an_engine_without_slots_refuses_what_would_wait_for_ever():
    loop = varied(rows=2, slots=0)
    with pytest.raises(RequestError, match="no slots"):
        loop.submit(asking(0, presence_penalty=1.0).request)
    assert started(loop, [asking(1)]) == [1]
