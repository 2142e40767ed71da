"""The gate: steps run drafts where those pay, by times and shares that were measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.kernels.layout import NO_TOKEN, REJECTED, RIGHT
from gapless.model.seam import BatchShape
from gapless.step.speculation import FIRST, LOOKS, RETRY, Gate, PromptLookup, Speculation, kind_of

DRAFTS, ROWS = 4, 8
ALL, ROW = (1, 2, 3), np.arange(1, 4, dtype=np.int32)


def gate_of(rows: int = ROWS, head: Any = None) -> Gate:
    drafter = None if head else PromptLookup(DRAFTS, 1, 3)
    gate = Gate(Speculation(DRAFTS, drafter, ROWS, head), rows)
    for row in range(1, rows + 1):
        params = SamplingParams(temperature=0.0, max_tokens=None)
        gate.admit(row, Request(row, np.array([1], np.int32), params, 0, (), 0, 9))
    return gate


def lines(places: int, right: int) -> np.ndarray:
    """Outbox tokens of rows that all have drafts, `right` of them right; in a step of one place the first, if any."""
    after = [5] * right + [REJECTED] * (DRAFTS - right)
    if places == 1:
        after = [RIGHT if right else REJECTED] + [NO_TOKEN] * (DRAFTS - 1)
    return np.tile(np.array([5, *after], np.int32), (len(ROW), 1))


def steps_with_drafts(gate: Gate, count: int, right: int, ratio: float) -> int:
    """Of `count` steps, those with drafts, each of which takes `ratio` times as long as one without."""
    verified = 0
    for _ in range(count):
        verify = gate.decide(ALL)
        verified += verify.places > 1
        gate.observe(ROW, lines(verify.places, right), verify.places)
        batch = BatchShape(len(ALL) * verify.places, (), 9, verify.places)
        gate.learn(kind_of(len(ALL)), batch, int(1000 * ratio) if verify.places > 1 else 1000)
    return verified


def test_a_step_without_drafts_is_measured_though_drafts_seem_to_pay():
    for right in (1, 4):
        gate = gate_of()
        assert steps_with_drafts(gate, LOOKS * FIRST, right, 1.0) == LOOKS * (FIRST - 1)
        assert steps_with_drafts(gate, LOOKS * RETRY, right, 1.0) == LOOKS * (RETRY - 1), "and again, now and then"


def test_drafts_that_cost_more_than_they_give_end_once_that_is_measured():
    gate = gate_of()
    steps_with_drafts(gate, LOOKS * FIRST, 2, 6.0)
    assert steps_with_drafts(gate, LOOKS * (RETRY - 1), 2, 6.0) == 0
    assert steps_with_drafts(gate, LOOKS, 2, 6.0) == LOOKS, "a trial may find that they cost less by now"


def test_drafts_whose_masks_come_late_end_though_their_steps_are_short():
    gate = gate_of()
    verified = []
    for _ in range(LOOKS * FIRST * 3):
        verify = gate.decide(ALL)
        verified.append(verify.places > 1)
        gate.observe(ROW, lines(verify.places, 2), verify.places)
        held = 0.9 if verify.places > 1 else 0.0  # nine of ten steps wait for the masks
        gate.learn(kind_of(len(ALL)), BatchShape(len(ALL) * verify.places, (), 9, verify.places), 1000, held)
    assert all(verified[:LOOKS]) and not any(verified[LOOKS * FIRST :])


def test_drafts_that_are_never_right_get_no_trials():
    gate = gate_of()
    steps_with_drafts(gate, LOOKS * RETRY, 0, 1.1)
    assert steps_with_drafts(gate, 4 * LOOKS * RETRY, 0, 1.1) == 0


def test_a_head_drafts_once_a_step_without_it_was_measured_and_is_tried_again():
    gate = gate_of(head=object())
    assert steps_with_drafts(gate, LOOKS, 3, 1.5) == 0
    assert steps_with_drafts(gate, LOOKS * (RETRY - 1), 3, 1.5) == LOOKS * (RETRY - 2)
    steps_with_drafts(gate, LOOKS * RETRY, 0, 1.5)
    assert steps_with_drafts(gate, LOOKS * RETRY, 0, 1.5) == LOOKS, "its share is known from such steps alone"


def steps_beside(gate: Gate, count: int, right: int, ratio: float) -> int:
    """As `steps_with_drafts`, beside 100 prompt tokens."""
    verified = 0
    for _ in range(count):
        verify = gate.decide_beside(ALL, 100, 1)
        verified += verify.places > 1
        if verify.places > 1:
            gate.observe(ROW, lines(verify.places, right), verify.places)
        batch = BatchShape(len(ALL) * verify.places, ((0, 100),), 9, verify.places)
        gate.learn(kind_of(len(ALL), 100), batch, int(1000 * ratio) if verify.places > 1 else 1000)
    return verified


def test_steps_beside_chunks_run_drafts_by_times_of_their_own():
    gate = gate_of()
    steps_with_drafts(gate, LOOKS * FIRST, 3, 1.5)
    assert steps_beside(gate, FIRST, 3, 1.1) == FIRST - 1
    assert steps_beside(gate, RETRY, 3, 1.1) == RETRY - 1, "one is measured without, now and then"
    dear = gate_of()
    steps_with_drafts(dear, LOOKS * FIRST, 3, 1.5)
    steps_beside(dear, FIRST, 3, 6.0)
    assert steps_beside(dear, RETRY - 1, 3, 6.0) == 0
    assert steps_with_drafts(dear, LOOKS, 3, 1.5) == LOOKS, "without chunks they still pay"


def test_drafts_that_would_not_pay_alone_do_not_run_beside_chunks():
    gate = gate_of()
    steps_with_drafts(gate, LOOKS * FIRST, 2, 6.0)
    assert steps_beside(gate, RETRY, 2, 1.0) == 0


def test_lines_taken_in_one_by_one_count_as_they_do_together(monkeypatch):
    """Rejected drafts stand after the right ones; rows without a mask, and without drafts, are among them."""
    made = [[5, *[6] * right, *[REJECTED] * (drafts - right), *[NO_TOKEN] * (DRAFTS - drafts)]
            for drafts in range(DRAFTS + 1) for right in range(drafts + 1)]  # fmt: skip
    made.append([NO_TOKEN] * (1 + DRAFTS))
    gates = []
    for few in (0, 1000):
        monkeypatch.setattr("gapless.step.speculation.FEW", few)
        gates.append(gate := gate_of(len(made)))
        gate.observe(np.arange(1, len(made) + 1, dtype=np.int32), np.array(made, np.int32), 1 + DRAFTS)
    one, other = (gate.counts for gate in gates)
    assert (one.drafts, one.draft_tokens, one.accepted.tolist()) == (14, 40, other.accepted.tolist())
    assert (other.drafts, other.draft_tokens) == (14, 40)
    assert np.allclose(gates[0].there, gates[1].there) and np.allclose(gates[0].right, gates[1].right)


def test_more_rows_than_drafts_are_for_have_none():
    gate = gate_of(16)
    assert gate.decide(tuple(range(1, ROWS + 2))).places == 1
    assert gate.decide(tuple(range(1, ROWS + 1))).places == 1 + DRAFTS
