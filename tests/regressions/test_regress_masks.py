"""Rows of the class grammar: tokens that no mask allowed, masks of another token, masks that others undo."""

from __future__ import annotations

from automaton import ASKED, Automaton
from harness import VOCAB, Job, sizes
from scenes import broken, request, tokens
from scripted_drafter import Scripted
from test_sampling_oracle import Varied, answers_to, run_directly

from gapless.kernels.layout import DRAFTED, LATE
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.step.mail import Mail
from gapless.step.program import StepProgram
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice

MOODS = (None, "lazy")


def asking(key: int, new: int = 12, **sampling: object) -> Job:
    asked = request(key, tokens(key, 3), new, structured_outputs=ASKED, **sampling)
    return Job(asked._replace(matcher=Automaton(key, VOCAB)), 0, None)


def play(loop: Loop, jobs: list[Job]) -> Loop:
    return run_directly(loop, jobs)


def engine(seed: int, mood: str | None = None, **options: object) -> Loop:
    return build_loop(SimDevice(seed, mood), Varied(VOCAB, 48), sizes(9), 4, patience=16, **options)


def test_row_072_a_row_whose_mask_is_late_gets_no_token():
    """Rows without a mask were sampled unconstrained. Here the device looks for the mask of the very next token, by
    generation and length, and a row whose mask is not there is held for that step, and delays no other one."""

    def scene():
        for mood in MOODS:
            play(engine(1, mood), [asking(key) for key in range(4)])

    scene()
    mask = StepProgram.mask

    def unheld(program, key, at):
        mask(program, key, at)
        program.tables.state[:, LATE].zero_()

    with broken(StepProgram, "mask", unheld):
        scene()


def draft_scene() -> None:
    """Rows with matchers and one without, in a pool that is too small for all, have drafts that are mostly right."""
    accepted = preempted = 0
    for mood in MOODS:
        jobs = [asking(key, 40) for key in range(4)] + [Job(request(7, tokens(7, 3), 20), 0, None)]
        speculation = Speculation(4, Scripted.new(answers_to(jobs), 0.2), sizes(9).rows)
        loop = play(engine(2, mood, speculation=speculation), jobs)
        accepted += int(loop.launcher.gate.counts.accepted.sum())
        preempted += loop.planner.preemptions
    assert accepted and preempted


def test_row_071_each_mask_is_of_the_drafts_that_the_row_has():
    """Host and worker had different ideas of how many drafts a row has, and masks shifted to other places and rows.
    Here a mask says after which drafts of which row it comes, the device compares that with what the row has, and a
    draft without its mask is not verified."""
    draft_scene()
    post, last = Mail.post, {}

    def shifted(mail, slot, tag, words, place=0, draft=0):
        if place:
            words, last[slot] = last.get(slot, words), words.copy()
        post(mail, slot, tag, words, place, draft)

    with broken(Mail, "post", shifted):
        draft_scene()


def test_row_073_drafts_of_before_a_preemption_get_no_mask_of_after_it():
    """Draft ids of before a preemption met the masks of after it. Here drafts belong to the row's tokens, and what has
    no mask of its own, such as those that a row comes back with, is cut from them before any is verified."""
    draft_scene()
    mask = StepProgram.mask

    def uncut(program, key, at):
        drafted = program.tables.state[:, DRAFTED].clone()
        mask(program, key, at)
        program.tables.state[:, DRAFTED].copy_(drafted)

    with broken(StepProgram, "mask", uncut):
        draft_scene()


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
