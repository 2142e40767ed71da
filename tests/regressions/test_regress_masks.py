"""Rows of the class grammar: tokens that no mask allowed, masks of another token, masks that others undo."""

from __future__ import annotations

import pytest
from automaton import ASKED, Automaton
from direct import Varied, run_directly
from harness import VOCAB, Job, sizes
from scenes import broken, request, tokens

from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.step.program import StepProgram
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded


def asking(key: int, new: int = 12, **sampling: object) -> Job:
    asked = request(key, tokens(key, 3), new, structured_outputs=ASKED, **sampling)
    return Job(asked._replace(matcher=Automaton(key, VOCAB)), 0, None)


def play(loop: Loop, jobs: list[Job]) -> Loop:
    return run_directly(loop, jobs)


def engine(seed: int, mood: str | None = None, **options: object) -> Loop:
    return build_loop(SimDevice(seed, mood), Varied(VOCAB, 48), sizes(9), 4, patience=16, **options)


def test_row_074_a_form_holds_whatever_a_request_asks_beside_it():
    """Constraints were lost with the order of hooks. Here a step's program has one order: biases, penalties, bad words,
    then the mask, then where filters end, then the draw; a bias for a token that the form excludes does nothing."""
    asks = [
        {"logit_bias": {token: 90.0 for token in range(0, VOCAB, 2)}},
        {"temperature": 1.0, "top_k": 3, "presence_penalty": 2.0},
        {"temperature": 2.0, "top_p": 0.6, "repetition_penalty": 0.5, "logit_bias": {3: 100.0}},
    ]

    def scene():
        play(engine(3), [asking(key, **asked) for key, asked in enumerate(asks)])

    scene()
    adjust = StepProgram.adjust

    def biases_last(program, key, at):
        adjust(program, key, at)
        program.tables.masks.fill_(-1)

    with broken(StepProgram, "adjust", biases_last):
        scene()
