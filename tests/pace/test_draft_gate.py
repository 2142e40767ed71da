"""The gate: steps run drafts where those pay, by times and shares that were measured."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.base.params import SamplingParams
from gapless.base.records import NO_TOKEN, REJECTED, RIGHT, Request
from gapless.pace.draft_gate import (
    BEYOND,
    FIRST_TRIAL,
    LEARNS,
    LOOK_STEPS,
    RETRY,
    SELDOM,
    WITHOUT_DRAFTS,
    DraftGate,
    Verify,
    kind_of,
)
from gapless.step.speculation import Speculation

DRAFTS, ROWS = 4, 8
ALL, ROW = (1, 2, 3), np.arange(1, 4, dtype=np.int32)


def gate_of(rows: int = ROWS, head: Any = None, drafts: int = DRAFTS) -> DraftGate:
    gate = DraftGate(rows, ROWS, Speculation(drafts, None, ROWS).sizes, head is None)
    for row in range(1, rows + 1):
        admit(gate, row)
    return gate


def admit(gate: DraftGate, row: int, speculate: bool = True) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, speculate=speculate)
    gate.admit(row, Request(row, np.array([1], np.int32), params, 0, (), 0, 9))


def line(places: int, right: int, drafts: int = DRAFTS) -> list[int]:
    """Outbox tokens of a row that has drafts, `right` of them right; in a step of one place the first, if any."""
    if places == 1:
        return [5, RIGHT if right else REJECTED] + [NO_TOKEN] * (drafts - 1)
    right = min(right, places - 1)
    return [5] + [5] * right + [REJECTED] * (places - 1 - right) + [NO_TOKEN] * (drafts + 1 - places)


def lines(places: int, right: int) -> np.ndarray:
    return np.tile(np.array(line(places, right), np.int32), (len(ROW), 1))


def steps_with_drafts(gate: DraftGate, count: int, right: int, ratio: float) -> int:
    """Of `count` steps, those with drafts, each of which takes `ratio` times as long as one without."""
    return sum(places > 1 for places in places_of_steps(gate, count, right, ratio))


def places_of_steps(gate: DraftGate, count: int, right: int, ratio: float) -> list[int]:
    """Rows come and go, so that there are LOOK_STEPS steps of a decision."""
    found, decode = [], ALL
    for step in range(count):
        decode = decode if step % LOOK_STEPS else (*ROW.tolist(),)
        verify = gate.decide(decode)
        found.append(verify.places)
        gate.observe(ROW, lines(verify.places, right), verify)
        gate.learn(kind_of(len(ALL)), verify.places, 0, int(1000 * ratio) if verify.places > 1 else 1000)
    return found


def test_a_step_without_drafts_is_measured_though_drafts_seem_to_pay():
    for right in (1, 4):
        gate = gate_of()
        assert steps_with_drafts(gate, FIRST_TRIAL, right, 1.0) == FIRST_TRIAL - LOOK_STEPS
        further = places_of_steps(gate, 2 * RETRY, right, 1.0)
        assert further.count(1) == LOOK_STEPS, "and again, now and then"
        assert min(further.count(3), further.count(5)) == LOOK_STEPS, "in turn with the other number of drafts"


def test_drafts_that_cost_more_than_they_give_end_once_that_is_measured():
    gate = gate_of()
    steps_with_drafts(gate, FIRST_TRIAL, 2, 6.0)
    assert steps_with_drafts(gate, RETRY - LOOK_STEPS, 2, 6.0) == 0
    assert steps_with_drafts(gate, LOOK_STEPS, 2, 6.0) == LOOK_STEPS, "a trial may find that they cost less by now"


def test_a_gate_whose_rows_have_no_right_drafts_is_seldom_at_work(monkeypatch):
    gate, decided = gate_of(), []
    monkeypatch.setattr("gapless.pace.draft_gate.kind_of", lambda rows: decided.append(rows) or kind_of(rows))
    for step in range(FIRST_TRIAL + 10 * SELDOM):
        if step == FIRST_TRIAL + 2 * SELDOM:
            decided.clear()
        verify = gate.decide(ALL)
        places = verify.places
        gate.observe(ROW, lines(places, 0), verify)
        gate.learn(kind_of(len(ALL)), places, 0, 1000)
    assert places == 1 and len(decided) == 8


def test_drafts_whose_masks_come_late_end_though_their_steps_are_short():
    gate = gate_of()
    verified = []
    for _ in range(3 * FIRST_TRIAL):
        verify = gate.decide(ALL)
        verified.append(verify.places > 1)
        gate.observe(ROW, lines(verify.places, 2), verify)
        held = 0.9 if verify.places > 1 else 0.0  # nine of ten steps wait for the masks
        gate.learn(kind_of(len(ALL)), verify.places, 0, 1000, held)
    assert all(verified[:LOOK_STEPS]) and not any(verified[FIRST_TRIAL:])


def test_drafts_that_are_never_right_get_no_trials():
    gate = gate_of()
    steps_with_drafts(gate, RETRY, 0, 1.1)
    assert steps_with_drafts(gate, 4 * RETRY, 0, 1.1) == 0


def test_a_head_drafts_once_a_step_without_it_was_measured_and_is_tried_again():
    gate = gate_of(head=object())
    assert steps_with_drafts(gate, LOOK_STEPS, 3, 1.5) == 0
    assert steps_with_drafts(gate, RETRY - LOOK_STEPS, 3, 1.5) == RETRY - 2 * LOOK_STEPS
    steps_with_drafts(gate, RETRY, 0, 1.5)
    assert steps_with_drafts(gate, RETRY, 0, 1.5) == LOOK_STEPS, "its share is known from such steps alone"


def steps_beside(gate: DraftGate, count: int, right: int, ratio: float) -> int:
    """As `steps_with_drafts`, beside 100 prompt tokens."""
    return sum(places > 1 for places in places_beside(gate, count, right, ratio))


def places_beside(gate: DraftGate, count: int, right: int, ratio: float) -> list[int]:
    """Return the places of `count` steps beside 100 prompt tokens, which take `ratio` times as long with drafts."""
    found = []
    for _ in range(count):
        verify = gate.decide_beside(ALL, 100, 1)
        found.append(verify.places)
        if verify.places > 1:
            gate.observe(ROW, lines(verify.places, right), verify)
        gate.learn(kind_of(len(ALL), 100), verify.places, 100, int(1000 * ratio) if verify.places > 1 else 1000)
    return found


def test_steps_beside_chunks_run_drafts_by_times_of_their_own():
    gate = gate_of()
    steps_with_drafts(gate, FIRST_TRIAL, 3, 1.5)
    assert steps_beside(gate, FIRST_TRIAL // LOOK_STEPS, 3, 1.1) == FIRST_TRIAL // LOOK_STEPS - 1
    assert steps_beside(gate, RETRY // LOOK_STEPS, 3, 1.1) == RETRY // LOOK_STEPS - 1, (
        "one is measured without, now and then"
    )
    dear = gate_of()
    steps_with_drafts(dear, FIRST_TRIAL, 3, 1.5)
    steps_beside(dear, FIRST_TRIAL // LOOK_STEPS, 3, 6.0)
    assert steps_beside(dear, RETRY // LOOK_STEPS - 1, 3, 6.0) == 0
    assert steps_with_drafts(dear, LOOK_STEPS, 3, 1.5) == LOOK_STEPS, "without chunks they still pay"


def test_trials_come_as_often_as_the_guide_says_beside_chunks_and_without():
    guide = " ".join((Path(__file__).parents[2] / "docs/guides/speculation.md").read_text().split())
    gate = gate_of()
    found = places_of_steps(gate, FIRST_TRIAL + 4 * RETRY, 4, 1.1)
    trials = [step for step in range(1, len(found)) if found[step] != found[step - 1] == 5]
    assert {later - step for step, later in pairwise(trials)} == {RETRY}
    assert f"Every {RETRY} steps another number than the best runs for four" in guide and LOOK_STEPS == 4
    beside = [step for step, places in enumerate(places_beside(gate, RETRY, 4, 1.1)) if places == 1]
    (apart,) = {later - step for step, later in pairwise(beside)}
    assert f"Beside prompts each step is chosen alone, and another number runs in one of {apart}." in guide


def test_drafts_that_would_not_pay_alone_do_not_run_beside_chunks():
    gate = gate_of()
    steps_with_drafts(gate, FIRST_TRIAL, 2, 6.0)
    assert steps_beside(gate, RETRY, 2, 1.0) == 0


def expected_of(seen: list[list[int]], places: int, begin: list[float]) -> list[float]:
    """What is expected of a row that got these lines, one after the other."""
    keeps = list(begin)
    for tokens in seen:
        if tokens[0] == NO_TOKEN:
            continue
        right = sum(token >= 0 for token in tokens[1:]) if places > 1 else int(tokens[1] == RIGHT)
        ran = max(1, places - 1)
        for place in range(min(right + 1, ran)):
            keeps[place] += LEARNS * ((right > place) - keeps[place])
        for place in range(ran, len(keeps)) if places > 1 and right >= ran - 1 else ():
            keeps[place] += BEYOND * ((right >= ran) - keeps[place])
    return keeps


@pytest.mark.parametrize("places", [1, 3, 5])
def test_steps_taken_in_together_count_as_they_do_one_by_one(places):
    """Rows without a mask, and without drafts, are among them. Means of several steps forget their order alone."""
    made = [line(places, right) for right in range(places)]
    made += [[5] + [NO_TOKEN] * DRAFTS, [NO_TOKEN] * (1 + DRAFTS)]
    if places == 1:
        made.append([NO_TOKEN, RIGHT] + [NO_TOKEN] * (DRAFTS - 1))  # held, and the look was right
    gate = gate_of(len(made))
    begin = gate.beliefs.keeps[1].tolist()
    for _ in range(3):
        gate.observe(np.arange(1, len(made) + 1, dtype=np.int32), np.array(made, np.int32), Verify(places, drafts=True))
    counts = gate.report()
    for row, tokens in enumerate(made, 1):
        assert np.allclose(gate.beliefs.keeps[row], expected_of([tokens] * 3, places, begin)), tokens
    if places > 1:
        assert counts.drafts == 3 * places and counts.draft_tokens == 3 * places * (places - 1)
        assert counts.accepted == tuple(3 * max(0, places - 1 - place) for place in range(DRAFTS))


@pytest.mark.parametrize(
    ("tokens", "verified", "accepted"),
    [
        ([NO_TOKEN, REJECTED, REJECTED, REJECTED, REJECTED], [0, 0, 0, 0], [0, 0, 0, 0]),  # held, all drafts wrong
        ([NO_TOKEN, NO_TOKEN, NO_TOKEN, REJECTED, REJECTED], [0, 0, 0, 0], [0, 0, 0, 0]),  # held, two right
        ([5, NO_TOKEN, NO_TOKEN, NO_TOKEN, REJECTED], [0, 0, 0, 0], [0, 0, 0, 0]),  # ended before its drafts
        ([5, 5, NO_TOKEN, REJECTED, REJECTED], [1, 0, 0, 0], [1, 0, 0, 0]),  # ended with its first draft
        ([5, REJECTED, NO_TOKEN, NO_TOKEN, NO_TOKEN], [1, 0, 0, 0], [0, 0, 0, 0]),
        ([5, 5, REJECTED, REJECTED, REJECTED], [1, 1, 1, 1], [1, 0, 0, 0]),
    ],
)
def test_drafts_of_rows_that_were_held_or_had_ended_do_not_count(tokens, verified, accepted):
    gate = gate_of(1)
    for _ in range(2):
        gate.observe(np.array([1], np.int32), np.array([tokens], np.int32), Verify(1 + DRAFTS, drafts=True))
    counts = gate.report()
    assert counts.verified == tuple(2 * count for count in verified)
    assert counts.accepted == tuple(2 * count for count in accepted)
    assert counts.drafts == 2 * verified[0] and counts.draft_tokens == 2 * sum(verified)


def play(gate: DraftGate, shares: list[float], steps: int, seed: int = 0) -> list[int]:
    """Places of the last half of `steps` steps of rows whose drafts are right with these probabilities; each draft
    adds 8 % to a step's time."""
    rng, drafts, found = random.Random(seed), gate.beliefs.keeps.shape[1], []
    decode = tuple(range(1, len(shares) + 1))
    rows = np.array(decode, np.int32)
    for _ in range(steps):
        verify = gate.decide(decode)
        places = verify.places
        found.append(places)
        rights = [next((n for n in range(drafts) if rng.random() > share), drafts) for share in shares]
        gate.observe(rows, np.array([line(places, right, drafts) for right in rights], np.int32), verify)
        gate.learn(kind_of(len(rows)), places, 0, int(1000 * (1 + 0.08 * (places - 1))))
    return found[steps // 2 :]


def mostly(found: list[int], *places: int) -> bool:
    return sum(one in places for one in found) > 0.8 * len(found)


@pytest.mark.parametrize("head", [None, object()])
@pytest.mark.parametrize(
    ("shares", "places"), [([0.95], (9,)), ([0.3], (1, 3)), ([0.0], (1,)), ([0.95] * 4, (9,)), ([0.6] * 4, (3, 5))]
)
def test_steps_come_to_run_the_drafts_that_pay_best(shares, places, head):
    found = play(gate_of(head=head, drafts=8), shares, 4000)
    assert mostly(found, *places), {place: found.count(place) for place in set(found)}


def test_rows_that_differ_share_the_number_that_gives_most_together():
    found = play(gate_of(drafts=8), [0.9, 0.9, 0.3, 0.3], 4000)
    gains = {1: 1.0} | {p: sum(1 + sum(s**n for n in range(1, p)) for s in (0.9, 0.3)) / 2 for p in (3, 5, 9)}
    best = sorted(gains, key=lambda places: gains[places] / (1 + 0.08 * (places - 1)))[-2:]
    assert mostly(found, *best), {place: found.count(place) for place in set(found)}
    assert best[1] not in (1, 3)


@pytest.mark.parametrize("head", [None, object()])
def test_a_share_that_changes_is_followed(head):
    gate = gate_of(head=head, drafts=8)
    for share, places in ((0.95, (9,)), (0.3, (1, 3)), (0.95, (9,)), (0.0, (1,)), (0.95, (9,))):
        found = play(gate, [share, share], 4000)
        assert mostly(found, *places), (share, {place: found.count(place) for place in set(found)})


def test_a_choice_that_stays_is_made_more_seldom_and_a_trial_is_short():
    gate, found = gate_of(), []
    for _ in range(5 * RETRY):
        verify = gate.decide(ALL)
        found.append(verify.places)
        gate.observe(ROW, lines(verify.places, 4), verify)
        gate.learn(kind_of(len(ALL)), verify.places, 0, 1000)
    assert found.index(1) == FIRST_TRIAL - LOOK_STEPS and found[FIRST_TRIAL] == 5
    assert found.index(3) == FIRST_TRIAL - LOOK_STEPS + RETRY, (
        "as many steps later, of which most are between two decisions"
    )
    assert found[found.index(3) :].index(5) == LOOK_STEPS


@pytest.mark.parametrize("right", [0, DRAFTS])
def test_new_rows_begin_with_what_rows_before_them_got(right):
    """Drafts of the first rows of all run at once; those of later ones only where rows had right ones."""
    first = gate_of()
    assert first.decide(ALL).places > 1
    steps_with_drafts(first, 200, right, 1.1)
    for row in ALL:
        admit(first, row)
    assert first.decide((*ALL,)).places == (1 if right == 0 else 1 + DRAFTS)
    assert steps_with_drafts(first, 200, DRAFTS, 1.1) > 180, "and what they get themselves soon tells"


def test_looks_say_nothing_of_later_drafts_of_new_rows():
    gate = gate_of()
    begin = gate.beliefs.keeps[1].copy()
    for _ in range(100):
        gate.observe(ROW, lines(1, 0), Verify(1, drafts=True))
    admit(gate, 1)
    assert gate.beliefs.keeps[1, 0] < 0.3 * begin[0] and np.array_equal(gate.beliefs.keeps[1, 1:], begin[1:])


def test_drafts_come_back_where_no_step_looks():
    """Rows change so often, or prompts come so steadily, that new rows alone can tell."""
    for beside in (False, True):
        gate, ran = gate_of(), 0
        steps_with_drafts(gate, 2000, 0, 1.1)
        for step in range(2000):
            decode = (*ALL,)
            if step % 3 == 0:
                for row in ALL:
                    admit(gate, row)
            verify = gate.decide_beside(decode, 100, 0) if beside else gate.decide(decode)
            places = verify.places
            gate.observe(ROW, lines(places, DRAFTS), verify)
            prompt = 100 if beside else 0
            gate.learn(kind_of(len(ALL), prompt), places, prompt, 1100 if places > 1 else 1000)
            ran += places > 1 and step > 1000
        assert ran > 800, beside


def test_batches_whose_drafts_are_never_right_run_none_after_the_first():
    gate = gate_of()
    ran = []
    for _ in range(6):
        for row in ALL:
            admit(gate, row)
        decode, found = (*ALL,), 0
        for _ in range(200):
            verify = gate.decide(decode)
            places = verify.places
            found += places > 1
            gate.observe(ROW, lines(places, 0), verify)
            gate.learn(kind_of(len(ALL)), places, 0, 1500 if places > 1 else 1000)
        ran.append(found)
    assert 0 < ran[0] <= 2 * LOOK_STEPS and not any(ran[1:])


@pytest.mark.parametrize("places", [1, 5])
def test_a_step_whose_rows_had_no_drafts_by_our_own_choice_says_nothing_of_drafts(places):
    gate = gate_of()
    before = gate.beliefs.keeps.copy()
    without = [[5] + [NO_TOKEN] * DRAFTS, line(places, DRAFTS), [5] + [NO_TOKEN] * DRAFTS]
    for _ in range(8):
        gate.observe(ROW, lines(1, 0), WITHOUT_DRAFTS)
        gate.observe(ROW, np.array(without, np.int32), Verify(places, drafts=True))
    assert gate.report().drafts == (8 if places > 1 else 0)
    assert np.array_equal(gate.beliefs.keeps[[1, 3]], before[[1, 3]]) and gate.beliefs.keeps[2, 0] > before[2, 0], (
        "a form drafted"
    )


@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("head", [None, object()])
def test_rows_that_may_have_no_drafts_say_nothing_of_new_rows(places, head):
    gate = gate_of(head=head)
    begin = gate.beliefs.keeps[3].copy()
    for row in (1, 2):
        admit(gate, row, speculate=False)
    without = [5] + [NO_TOKEN] * DRAFTS
    for _ in range(200):
        got = np.array([without, without, line(places, DRAFTS)], np.int32)
        gate.observe(ROW, got, Verify(places, drafts=places > 1 or not head))
    admit(gate, 4)
    assert np.all(gate.beliefs.keeps[4] >= begin) and np.array_equal(gate.beliefs.keeps[1:3], np.zeros((2, DRAFTS)))


def test_numbers_of_drafts_are_those_up_to_the_most_and_the_most():
    sizes = [Speculation(drafts, None, ROWS).sizes for drafts in (1, 2, 3, 4, 6, 8)]
    assert sizes == [(2,), (3,), (3, 4), (3, 5), (3, 5, 7), (3, 5, 9)]


def test_more_rows_than_drafts_are_for_have_none():
    gate = gate_of(16)
    assert gate.decide(tuple(range(1, ROWS + 2))).places == 1
    assert gate.decide(tuple(range(1, ROWS + 1))).places == 1 + DRAFTS


@pytest.mark.parametrize("head", [None, "a head"])
def test_a_step_whose_rows_have_all_left_changes_nothing(head):
    gate = gate_of(head=head)
    gate.observe(ROW, lines(3, 1), Verify(3, drafts=True))
    before, keeps = gate.report(), gate.beliefs.keeps.copy()
    for _ in range(2):
        gate.observe(np.empty(0, np.int32), np.empty((0, 1 + DRAFTS), np.int32), Verify(3, drafts=True))
    assert gate.report() == before and np.array_equal(gate.beliefs.keeps, keeps)
