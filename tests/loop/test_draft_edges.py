"""Ends and edges inside a run of right drafts are where they would be without drafts, at every index of the run."""

from __future__ import annotations

from typing import Any

import pytest
from harness import VOCAB, Job, check_at_rest, checksum_loop, request, run
from oracle_drafter import Oracle
from sharpest import sharpest

from gapless.kernels import native
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, Verify
from gapless.step.speculation import Speculation
from gapless.testing.checksum import continue_prompt
from gapless.testing.sim import SimDevice

DRAFTS, MAX_LEN = 4, 40


def new_loop(depth: int, page_size: int = 4, rows: int = 2, pages: int = 60, errs: float = 0.0) -> Loop:
    shape = Sizes(rows, MAX_LEN, pages, page_size, 24, queue=16, slots=0)
    speculation = Speculation(DRAFTS, Oracle(VOCAB, DRAFTS, errs), rows)
    return checksum_loop(SimDevice(depth), shape, depth, kernels=native.load(), speculation=speculation)


def new_job(prompt: list[int], max_len: int, aborts: int | None = None, key: int = 0, stop_ids: Any = ()) -> Job:
    return Job(request(key, prompt, max_len - len(prompt), stop_ids), 0, aborts)


def play(loop: Loop, *jobs: Job) -> Loop:
    run(loop, list(jobs))
    for job in jobs:
        job.check()
    check_at_rest(loop)
    return loop


@pytest.mark.parametrize("depth", sharpest([4, 1, 2, 8]))
def test_a_run_of_drafts_ends_where_its_row_ends(depth):
    prompt, accepted = [3, 1, 4], 0
    answer = continue_prompt(prompt, 14, VOCAB)
    for index in range(1, 14):
        stop = next(token for token in range(VOCAB) if token not in answer) if index > 12 else answer[index]
        stopped = new_job(prompt, MAX_LEN, stop_ids=(stop,))
        for job in (stopped, new_job(prompt, len(prompt) + index)):
            accepted += play(new_loop(depth), job).launcher.gate.report().right
    assert accepted > 60, "ends that no run of drafts reached prove nothing"


@pytest.mark.parametrize("depth", sharpest([4, 1]))
@pytest.mark.parametrize("page_size", [2, 4, 8])
def test_a_run_of_drafts_crosses_page_edges_and_ends_at_the_context(depth, page_size):
    for length in range(1, 10):
        loop = play(new_loop(depth, page_size), new_job(list(range(5, 5 + length)), MAX_LEN))
        assert loop.launcher.gate.report().right > 10


@pytest.mark.parametrize("depth", sharpest([4, 1, 2, 8]))
def test_rows_leave_and_are_preempted_with_drafts_in_flight(depth):
    preempted = 0
    for turn in range(1, 10):
        loop = new_loop(depth, 4, 3, 15)
        jobs = [new_job([7 * key + 2, key], 36, key=key, aborts=turn if key == 1 else None) for key in range(3)]
        preempted += play(loop, *jobs).planner.preemptions
    assert preempted


def counts_of(depth: int, errs: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafts that one row verified, and right ones, by their place."""
    counts = play(new_loop(depth, errs=errs), new_job([9, 9, 2], MAX_LEN)).launcher.gate.report()
    return counts.verified, counts.accepted


def test_right_drafts_keep_their_share_by_place_at_any_depth():
    found = [counts_of(depth, 0.0) for depth in (1, 2, 4, 8)]
    verified, accepted = found[0]
    assert found == found[:1] * 4
    assert verified == accepted and accepted[-1] > 0.5 * accepted[0] > 2


def test_drafts_and_right_ones_are_as_many_at_each_place_at_any_depth(monkeypatch):
    """Every step runs all drafts here, since a gate that decides learns later the more steps are in flight."""
    everything = Verify(1 + DRAFTS, drafts=True)
    monkeypatch.setattr(DraftGate, "decide", lambda gate, decode: everything if decode else WITHOUT_DRAFTS)
    for errs in (0.3, 0.6, 1.0):
        found = [counts_of(depth, errs) for depth in (1, 2, 4, 8)]
        verified, accepted = found[0]
        assert found == found[:1] * 4
        assert verified[0] > 10 and (accepted[0] > accepted[-1] or errs == 1.0)
