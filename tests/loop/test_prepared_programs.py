"""Programs of steps with drafts are prepared before the first step, for each number of drafts that may be tried."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from direct import Varied, run_directly
from harness import VOCAB, kernels_for, sizes
from oracle_drafter import numbers_at_random
from oracles import masked_jobs

from gapless.model.drafting.prompt_lookup import PromptLookup
from gapless.step.graphs import COMMON_LANES
from gapless.step.keys import ForwardKey, ProgramKey, SampleKey
from gapless.step.kinds import kinds
from gapless.step.lanes.adjust import AdjustKey
from gapless.step.lanes.mask import MaskKey, ReplyKey
from gapless.step.leader import Leader
from gapless.step.speculation import Speculation
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

DRAFTS, SEEDS = 8, range(100, 104)


@pytest.fixture
def keys(monkeypatch):
    """Collects the keys of steps, those that a step without graphs has too."""
    found, decide = set[ProgramKey](), Leader.decide

    def look(leader, plan):
        decision = decide(leader, plan)
        found.update(decision.key.programs())
        return decision

    monkeypatch.setattr(Leader, "decide", look)
    return found


def run_masked(seed: int, buckets: Iterable[int] | None = None):
    """Rows with and without matchers, in steps of 0, 2, 4 and 8 drafts in any order."""
    shape = sizes(seed)._replace(rows=5, slots=5)
    speculation = Speculation(DRAFTS, PromptLookup(DRAFTS, 1, 3), shape.rows)
    device, kernels = SimDevice(seed), kernels_for(seed)
    loop = loop_of(device, Varied(VOCAB, 48), shape, 2, speculation=speculation, buckets=buckets, kernels=kernels)
    numbers_at_random(seed, loop, speculation)
    return run_directly(loop, masked_jobs(seed))


def facts(key: ProgramKey) -> tuple[object, ...] | None:
    """What decides with drafts which kernels a program launches; a list with masks has those of one without."""
    match key:
        case ForwardKey():
            return ForwardKey, key.batch.places, bool(key.batch.chunks)
        case SampleKey():
            return SampleKey, key.places, key.drafts, key.sized
        case AdjustKey():
            return AdjustKey, key.places
        case MaskKey():
            return MaskKey, key.drafted[1]
        case ReplyKey():
            return ReplyKey, key.drafts
    return None


def test_kinds_hold_every_program_that_steps_with_drafts_run_without_graphs(keys):
    for seed in SEEDS:
        loop = run_masked(seed, buckets=())
    program, shapes = loop.launcher.program, loop.launcher.graphs.shapes
    prepared = {facts(key) for key in kinds(5, *program.outbox[:2], shapes.places, shapes.drafted_rows)}
    assert {facts(key) for key in keys} <= prepared
    assert {key.drafted[1] for key in keys if isinstance(key, MaskKey)} == {1, 3, 5, 9}


def test_lists_of_masked_rows_have_a_graph_for_each_number_of_drafts(keys):
    for seed in SEEDS:
        captured = run_masked(seed).launcher.graphs.likely()
    masked = {key for key in keys if isinstance(key, MaskKey) and key.rows in COMMON_LANES}
    assert {key.drafted[1] for key in masked} == {1, 3, 5, 9} and masked <= {*captured}
