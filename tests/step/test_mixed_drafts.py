"""Steps with chunks whose decode rows run drafts: captured and eager ones give the tokens of a run without drafts."""

from __future__ import annotations

import numpy as np
import pytest
from mixed_harness import LONGEST, REQUESTS, SETTINGS, dense_model, drive, engine
from oracle_drafter import cost
from sharpest import sharpest

from gapless.kernels.layout import ACTIVE, DRAFTED, LENGTH
from gapless.model.drafting.prompt_lookup import PromptLookup
from gapless.pace.draft_gate import ENDING, DraftGate
from gapless.step import graphs
from gapless.step.keys import ForwardKey, SampleKey
from gapless.step.lanes.mask import MaskKey
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice

LOOKUP = Speculation(4, PromptLookup(4, 1, 3), 5)
APART = 2
"""Turns between requests: so few that most chunks run beside rows that decode"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dense_model(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(autouse=True)
def drafts_always_pay(monkeypatch):
    learn = DraftGate.learn
    monkeypatch.setattr(DraftGate, "learn", lambda gate, kind, *size: learn(gate, kind, *size[:2], cost(*size[:2])))
    monkeypatch.setattr("gapless.pace.draft_gate.PAYS", 0.0)


def replayed_beside(loop):
    """Whether each step that ran drafts beside chunks was a replay, as the loop runs."""
    seen, launch = [], loop.launcher.launch

    def look(plan, requests):
        flight = launch(plan, requests)
        if plan.chunks and flight.batch.places > 1:
            seen.append(flight.decision.captured)
        return flight

    loop.launcher.launch = look
    return seen


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_drafts_beside_chunks_give_the_tokens_of_a_run_without_captured_or_not(model, depth):
    loop = engine(SimDevice(1), model, buckets=())
    wanted = drive(loop, SETTINGS, APART)
    for buckets in ((), None):
        device = SimDevice(depth)
        loop = engine(device, model, depth, buckets=buckets, patience=1, speculation=LOOKUP)
        seen = replayed_beside(loop)
        assert drive(loop, SETTINGS, APART) == wanted and len(wanted) == REQUESTS - 1
        assert loop.counters.dropped_identity == 0
        tables = loop.launcher.executor.program.tables
        assert not tables.state[0].any() and not tables.params[0].any() and not tables.pages[0].any()
        counts = loop.launcher.gate.report()
        assert counts.draft_tokens > counts.right > 20
        assert len(seen) > 20 and (sum(seen) > 5) == (buckets is None)


def test_a_graph_of_drafts_beside_chunks_serves_prompts_from_the_first_step_on(model):
    device = SimDevice(1)
    loop = engine(device, model, patience=9, buckets=None, speculation=LOOKUP)
    loop.capture()
    keys = [key for key in loop.launcher.graphs.stand_ins if isinstance(key, ForwardKey) and key.batch.places > 1]
    assert keys and all(
        len(key.batch.chunks) == ENDING + graphs.GOING_ON[-1] and key.batch.decode == 5 * 5 for key in keys
    )
    masked = [key for key in loop.launcher.graphs.likely() if isinstance(key, MaskKey)]
    assert {key.rows for key in masked if key.drafted == (5 + ENDING, 5)} == {1, 4}
    seen = replayed_beside(loop)
    drive(loop, SETTINGS[:1], APART)
    assert len(seen) > 20 and all(seen)


def test_more_prompts_that_end_than_logits_are_kept_for_go_without_drafts(model):
    gate = engine(SimDevice(1), model, speculation=LOOKUP).launcher.gate
    assert gate.decide_beside((1, 2), 30, ENDING).places == 5
    assert gate.decide_beside((1, 2), 30, ENDING + 1).places == 1
    assert gate.decide_beside((1, 2, 3, 4, 5, 6), 30, 1).places == 1
    assert gate.decide_beside((), 30, 1).places == 1


def test_a_capture_of_drafts_beside_chunks_touches_no_row_but_the_null_row(model):
    device = SimDevice(0)
    loop = engine(device, model, buckets=None, speculation=LOOKUP)
    tables, found = loop.launcher.executor.program.tables, loop.launcher.graphs
    for table in tables:
        table[1:] = 3
    tables.state[1:, ACTIVE], tables.state[1:, LENGTH], tables.state[1:, DRAFTED] = 1, 2, 4
    before = [table[1:].clone() for table in tables]
    key = found.mixed_key(3, 2, LONGEST + 10, 5)
    assert key is not None and key.packet.rows == 4 + ENDING and key.batch.rows == 4 * 5 + ENDING
    assert not found.capture((key, SampleKey(key.packet.rows, key.samples, True, 5, drafts=True)))
    assert all(np.array_equal(table[1:], kept) for table, kept in zip(tables, before, strict=True))
    assert not tables.state[0].any()


def test_a_larger_graph_serves_steps_with_as_many_places_alone(model):
    device = SimDevice(1)
    found = engine(device, model, patience=1, speculation=LOOKUP).launcher.graphs
    assert not found.capture((found.mixed_key(4, 4, 64), found.mixed_key(4, 4, 32, 5)))
    assert found.larger(found.mixed_key(1, 1, 10)) == found.mixed_key(4, 4, 64)
    assert found.larger(found.mixed_key(1, 1, 10, 5)) == found.mixed_key(4, 4, 32, 5)
    assert found.larger(found.mixed_key(1, 1, 40, 5)) is None
    assert found.mixed_key(1, ENDING + 1, 10, 5) is None and graphs.CHUNK_COUNTS[-1] > ENDING
