"""Rows of speculation: drafts that are stale, counts that land elsewhere, steps that give more than one token."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from harness import VOCAB, captures_at_once, checksum_loop, request, sizes
from oracle_drafter import Oracle
from scenes import broken, job, play, tokens

from gapless.loop.loop import Loop
from gapless.pace.draft_gate import DraftGate
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

DRAFTS, DEPTHS, MOODS = 4, (1, 2, 4, 8), (None, "starve", "bursts")


def drafting(seed: int, depth: int = 8, errs: float = 0.3, mood: str | None = None) -> Loop:
    shape = sizes(seed)
    graphs = captures_at_once(shape) if seed % 2 else {}
    speculation = Speculation(DRAFTS, Oracle(VOCAB, DRAFTS, errs), shape.rows)
    return checksum_loop(SimDevice(seed, mood), shape, depth, speculation=speculation, **graphs)


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
            most = loop.launcher.executor.buffers.sent.numel()
            play(loop, [job(key, tokens(key, 3), 12) for key in range(3)])
            assert loop.launcher.gate.report().draft_tokens
            assert max(uploads) <= most and len(uploads) <= loop.counters.steps
            uploads.clear()


def test_row_017_what_a_gate_learns_is_of_the_request_that_has_the_row():
    """Counts landed on rows that were moved. Here rows never move, and what is expected of a row starts over with each
    request: one whose drafts are always wrong leaves its successor no less than it leaves any other row."""

    def scene():
        loop = drafting(1, 1, 1.0)
        play(loop, [job(0, tokens(0, 3), 30)])
        gate = loop.launcher.gate
        left = gate.beliefs.keeps[1, 0]
        for row in (1, 2):
            gate.admit(row, request(8 + row, tokens(9, 3), 5))
        keeps = gate.beliefs.keeps
        assert np.allclose(keeps[1], keeps[2], atol=0.01) and keeps[1, 0] > 2 * left

    scene()
    with broken(DraftGate, "admit", lambda gate, row, request: None):
        scene()
