"""Rows of the class grammar: tokens that no mask allowed, masks of another token, masks that others undo."""

from __future__ import annotations

from unittest.mock import patch

from automaton import ASKED, Automaton
from harness import VOCAB, Job, sizes
from scenes import broken, must_fail, request, tokens
from test_draft_lanes_oracle import Scripted
from test_sampling_oracle import Varied, answers_to, run_directly

from gapless.kernels.layout import LATE
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.step import packet, speculation
from gapless.step.program import StepProgram
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice

MOODS = (None, "lazy")


def asking(key: int, **sampling: object) -> Job:
    asked = request(key, tokens(key, 3), 12, structured_outputs=ASKED, **sampling)
    return Job(asked._replace(matcher=Automaton(key, VOCAB)), 0, None)


def play(loop: Loop, jobs: list[Job]) -> Loop:
    return run_directly(loop, jobs)


def engine(seed: int, mood: str | None = None, **options: object) -> Loop:
    return build_loop(SimDevice(seed, mood), Varied(VOCAB, 48), sizes(9), 4, patience=16, **options)


def test_row_072_a_row_whose_mask_is_late_gets_no_token():
    """Rows without a mask were sampled unconstrained. Here the device looks for the mask of the very next token, by
    owner and length, and a row whose mask is not there is held for that step, and delays no other one."""

    def scene():
        for mood in MOODS:
            play(engine(1, mood), [asking(key) for key in range(4)])

    scene()
    adjust = StepProgram.adjust

    def unheld(program, key, at):
        adjust(program, key, at)
        program.tables.state[:, LATE].zero_()

    with broken(StepProgram, "adjust", unheld):
        scene()


def test_row_073_a_row_with_a_matcher_has_no_drafts_beside_rows_that_have():
    """Draft ids of before a preemption met the masks of after it. Here a row whose matcher must see each token has no
    drafts, beside rows that have some, and its mask names the length that it was made for."""

    def scene():
        for mood in MOODS:
            jobs = [asking(key) for key in range(3)] + [Job(request(7, tokens(7, 3), 20), 0, None)]
            answers = answers_to(jobs)
            drafts = Speculation(4, Scripted.new(answers, 0.2), sizes(9).rows)
            play(engine(2, mood, speculation=drafts), jobs)

    scene()
    with must_fail(), patch.object(packet, "most_drafts", lambda asked: speculation.MAX_DRAFTS):
        scene()


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

    def mask_first(program, key, at):
        if key.masked:
            adjust(program, key, at)
            adjust(program, key._replace(masked=False), at)
        else:
            adjust(program, key, at)

    with broken(StepProgram, "adjust", mask_first):
        scene()
