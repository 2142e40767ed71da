"""Rows of speculation: drafts that are stale, counts that land elsewhere, steps that give more than one token."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import VOCAB, captures_at_once, checksum_loop, model_loop, script, sizes
from oracle_drafter import Oracle, SharingModel, drafted_by_model
from scenes import broken, job, must_fail, one_batch_for_all, play, request, tokens

from gapless.kernels.layout import LENGTH
from gapless.loop.loop import Loop
from gapless.step.executor import Executor
from gapless.step.program import StepProgram
from gapless.step.speculation import Gate, Speculation
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

DRAFTS, DEPTHS, MOODS = 4, (1, 2, 4, 8), (None, "starve", "bursts")


def drafting(seed: int, depth: int = 8, errs: float = 0.3, mood: str | None = None) -> Loop:
    shape = sizes(seed)
    graphs = captures_at_once(shape) if seed % 2 else {}
    speculation = Speculation(DRAFTS, Oracle(VOCAB, DRAFTS, errs), shape.rows)
    return checksum_loop(SimDevice(seed, mood), shape, depth, speculation=speculation, **graphs)


def crowd(depth: int = 8, errs: float = 0.3) -> list[Loop]:
    """Drawn scripts (shared prefixes, stops, aborts, a pool that is too small), whose tokens are all right."""
    return [play(drafting(seed, depth, errs), script(seed, sizes(seed).max_len)) for seed in range(6)]


def shares(loops: list[Loop]) -> np.ndarray:
    """The share of right drafts at each place, of those that were verified there."""
    accepted = sum(loop.launcher.gate.counts.accepted for loop in loops)
    return accepted / accepted[0]


def test_row_009_drafts_have_no_buffer_on_the_host():
    """The drafter's buffer on the host was filled again while a copy read it. Here drafts are written by the device
    into its own history, and what a step with drafts uploads is its packet alone."""
    uploads, upload = [], SimStream.upload

    def noted(stream, destination, source):
        uploads.append(source.numel())
        return upload(stream, destination, source)

    with patch.object(SimStream, "upload", noted):
        for seed in range(4):
            loop = drafting(seed)
            most = loop.launcher.executor.sent.numel()
            play(loop, [job(key, tokens(key, 3), 12) for key in range(3)])
            assert loop.launcher.gate.counts.draft_tokens
            assert max(uploads) <= most and len(uploads) <= loop.counters.steps
            uploads.clear()


def test_row_017_what_a_gate_learns_is_of_the_request_that_has_the_row():
    """Counts landed on rows that were moved. Here rows never move, and what is expected of a row starts over with each
    request: one whose drafts are always wrong leaves its successor no less than it leaves any other row."""

    def scene():
        loop = drafting(1, 1, 1.0)
        play(loop, [job(0, tokens(0, 3), 30)])
        gate = loop.launcher.gate
        left = gate.keeps[1, 0]
        for row in (1, 2):
            gate.admit(row, request(8 + row, tokens(9, 3), 5))
        assert np.allclose(gate.keeps[1], gate.keeps[2], atol=0.01) and gate.keeps[1, 0] > 2 * left

    scene()
    with broken(Gate, "admit", lambda gate, row, request: None):
        scene()


@pytest.mark.seeds
def test_row_021_drafts_are_right_at_every_place_alike():
    """Acceptance died past a position, and only speed told. Here right drafts are counted by place: of an oracle's,
    which are all right, every place keeps its share at every depth."""

    def scene():
        for depth in DEPTHS:
            assert (
                shares(crowd(depth, 0.0)) > (0.9, 0.7, 0.5, 0.3)
            ).all()  # answers end, and their last drafts with them

    scene()
    accept = StepProgram.draw

    def short(program, logits, rows):
        given, finite = accept(program, logits, rows)
        given[:, 3:] = given[:, 3:].clamp(max=-2)
        return given, finite

    with broken(StepProgram, "draw", short):
        scene()


@pytest.mark.seeds
def test_row_022_the_drafter_sees_the_tokens_of_its_own_step():
    """The drafter saw a history without the last tokens. Here it runs at the end of the step that wrote them, on the
    same stream and in the same graph, so that drafts continue what the row has at any depth."""

    def scene():
        for depth in DEPTHS:
            loops = crowd(depth, 0.0)
            drafted = sum(loop.launcher.gate.counts.draft_tokens for loop in loops)
            assert sum(int(loop.launcher.gate.counts.accepted.sum()) for loop in loops) > 0.9 * drafted > 100

    scene()

    def stale(oracle, kernels, rows, tables):
        state = tables.state.clone()
        state[:, LENGTH] -= 1
        draft(oracle, kernels, rows, tables._replace(state=state))
        tables.state.copy_(state)
        tables.state[:, LENGTH] += 1

    draft = Oracle.__call__
    with broken(Oracle, "__call__", stale):
        scene()


@pytest.mark.seeds
def test_row_013_the_passes_of_a_draft_model_are_planned_in_their_own_step():
    """What the host had prepared for the draft loop was rewritten while the loop ran. Here the passes of a draft model
    are part of the step that verifies, and are planned from that step's own frozen shape."""

    def scene(mood, depth):
        verified = 0
        for seed in range(6):
            shape = sizes(seed)
            model = SharingModel(VOCAB, shape.max_len)
            speculation = drafted_by_model(model, DRAFTS, 0.3, shape.rows)
            loop = play(
                model_loop(model, SimDevice(seed, mood), shape, depth, speculation=speculation), script(seed, 48)
            )
            verified += loop.launcher.gate.counts.draft_tokens
        assert verified > 100

    scene("lazy", 8)
    with one_batch_for_all():
        scene("eager", 1)
        with must_fail():
            scene("lazy", 8)


@pytest.mark.seeds
def test_row_023_drafts_are_made_before_the_next_step_begins():
    """The drafter ran beside the preparation of the next step: fewer drafts were right, and any synchronisation cured
    it. Here it is the last part of a step's own program, so the next step's first operation comes after it; drafts of
    an oracle are right in any mood of the device."""

    def scene():
        for mood in MOODS:
            loops = [play(drafting(seed, 8, 0.0, mood), script(seed, sizes(seed).max_len)) for seed in range(6)]
            drafted = sum(loop.launcher.gate.counts.draft_tokens for loop in loops)
            assert sum(int(loop.launcher.gate.counts.accepted.sum()) for loop in loops) > 0.9 * drafted > 100

    def beside(executor, steps):
        enqueue(executor, steps)
        program = executor.program
        rows = torch.arange(len(program.tables.state), dtype=torch.int32)
        executor.device.bulk_out.launch(draft, program.drafter, program.kernels, rows, program.tables)

    scene()
    draft, enqueue = Oracle.__call__, Executor.enqueue
    with patch.object(Oracle, "__call__", lambda *_: None), broken(Executor, "enqueue", beside):
        scene()
