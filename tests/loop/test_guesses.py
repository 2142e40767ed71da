"""What a matcher does along drafts and expected tokens is a guess: it ends no request, and delays no other mask."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from automaton import Automaton, NativeAutomaton, allowed_after
from direct import Varied, answers_to, run_directly
from harness import VOCAB, sizes
from scripted_drafter import MOST, Scripted
from test_mask_oracle import asking

from gapless.device import CpuDevice, Ring
from gapless.kernels.layout import MAIL_DRAFTED, MAIL_DRAFTS, MAIL_TOKENS
from gapless.loop import mask_threads
from gapless.loop.attendant import MaskAttendant, MaskedRow
from gapless.step.mail import Mail, mail_bytes, tag_of
from gapless.step.speculation import Speculation
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

WAIT = 20.0
"""Seconds after which a test gives up"""
SEED = 0


class Brittle(Automaton):
    """Breaks for good at the first guess: where it takes a token that does not come, makes the mask after it, or is to
    go back."""

    broke = 0

    def __init__(self, seed: int, answer: list[int], where: str) -> None:
        super().__init__(seed, VOCAB)
        self.answer, self.where, self.broken, self.taken = answer, where, False, []

    def advance(self, tokens):
        taken = [*self.taken, *tokens]
        self._break_if(self.where == "advance" and self.answer[: len(taken)] != taken)
        super().advance(tokens)
        self.taken = taken

    def rollback(self, count):
        self._break_if(self.where == "rollback")
        super().rollback(count)
        self.taken = self.taken[: len(self.taken) - count]

    def write_mask(self, words):
        self._break_if(self.where == "write_mask" and self.answer[: len(self.taken)] != self.taken)
        super().write_mask(words)

    def _break_if(self, now):
        Brittle.broke += now
        self.broken |= now
        if self.broken:
            raise RuntimeError("a bug of the matcher")


class NativeBrittle(Brittle, NativeAutomaton):
    """A matcher that breaks like `Brittle`, and is called as C functions."""


def wrong_drafts_are_allowed(seed: int, answer: list[int]) -> bool:
    """Whether a wrong draft of `Scripted` passes the mask somewhere in the middle of an answer."""
    places = range(2, len(answer) - 2)
    return any((answer[at] + 1) % VOCAB in allowed_after(seed, answer[:at], VOCAB) for at in places)


@pytest.mark.parametrize("where", ["advance", "write_mask", "rollback"])
@pytest.mark.parametrize(("depth", "polls"), [(1, None), (4, None), (4, True), (4, False)])
def test_a_matcher_that_breaks_along_a_guess_ends_no_request(where, depth, polls):
    answers, jobs, kind = [], [], NativeBrittle if polls is not None else Brittle
    for seed in range(100):
        job = asking(len(jobs), Automaton(seed, VOCAB))
        ((_, _, *answer),) = answers_to([job])
        if wrong_drafts_are_allowed(seed, answer) and len(jobs) < 3:
            job.request = job.request._replace(matcher=kind(seed, answer, where))
            answers.append([*job.request.tokens.tolist(), *answer])
            jobs.append(job)
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    device = SimDevice(depth) if polls is None else CpuDevice(threads=1)
    speculation = Speculation(MOST, Scripted.new(answers, 1.0), shape.rows)
    loop = loop_of(device, Varied(VOCAB, 48), shape, depth, speculation=speculation, mask_polls=polls)
    broke = Brittle.broke
    run_directly(loop, jobs)
    device.close()
    loop.close()
    assert len(jobs) == 3 and Brittle.broke > broke


class Slow(Automaton):
    """Does not come back from its third mask before it is let go, and notes where it made each."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, VOCAB)
        self.made: list[int] = []
        self.reached, self.free = threading.Event(), threading.Event()

    def write_mask(self, words):
        super().write_mask(words)
        self.made.append(len(self.states) - 1)
        if len(self.made) == 3:
            self.reached.set()
            assert self.free.wait(WAIT)


class NativeSlow(Slow, NativeAutomaton):
    """A matcher that is slow like `Slow`, and is called as C functions."""


class Python:
    """Rows with matchers in Python, each in the slot of its key + 1, after one token."""

    def __init__(self, mail: Mail) -> None:
        self.attendant = MaskAttendant(mail)

    def admit(self, key: int, matcher: Automaton) -> None:
        row = MaskedRow(asking(key, matcher).request._replace(tokens=np.array([1], np.int32)), MOST)
        self.attendant.admitted(row, key + 1, key + 5, np.array([1], np.int32))

    def look(self) -> None:
        threading.Thread(target=self.attendant.answer).start()

    def settle(self) -> None:
        self.attendant.answer()

    def close(self) -> None:
        assert not self.attendant.failed


class Native:
    """Rows with matchers that are C functions, called on threads without the interpreter; otherwise as `Python`."""

    def __init__(self, mail: Mail, threads: int = 1, polls: bool = True) -> None:
        self.threads = mask_threads.load().MaskThreads(threads, *mask_threads.geometry(mail), polls)

    def admit(self, key: int, matcher: NativeAutomaton) -> None:
        self.threads.begin(key, matcher.lexer, *matcher.give_away(), 1, [], MOST)
        self.threads.admit(key, key + 1, key + 5, np.array([1], np.int32))

    def look(self) -> None:
        self.threads.ring()

    settle = look

    def close(self) -> None:
        self.threads.close()
        assert not self.threads.failed


def tell(mail: Mail, key: int, length: int, token: int, drafts: list[int]) -> None:
    """Write what the device would: the row of `key` got `token` after `length` others, and has these drafts."""
    record = mail.words.numpy()[key + 1]
    record[MAIL_TOKENS], record[MAIL_DRAFTED] = token, len(drafts)
    record[MAIL_DRAFTS : MAIL_DRAFTS + len(drafts)] = drafts
    mail.told[key + 1] = tag_of(key + 5, length + 1)


@contextmanager
def until(true):
    yield
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def allowed_run(seed: int, count: int) -> list[int]:
    """Tokens that an automaton allows one after the other, each of several."""
    run: list[int] = []
    for _ in range(count):
        run.append(next(t for t in allowed_after(seed, run, VOCAB) if len(allowed_after(seed, [*run, t], VOCAB)) > 1))
    return run


@pytest.mark.parametrize("lane", [Python, Native])
@pytest.mark.parametrize("whose", [0, 1])
def test_masks_of_guesses_wait_for_the_next_mask_of_any_row_of_the_thread(lane, whose):
    """The first row's matcher is at its first guess when a token comes to it, or to another row."""
    mail = Mail(Ring(3, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows, (slow, other) = lane(mail), (NativeSlow, NativeAutomaton) if lane is Native else (Slow, Automaton)
    run, matcher = allowed_run(SEED, 5), slow(SEED)
    with until(lambda: (mail.tags[1:3, 0] == [tag_of(5, 1), tag_of(6, 1)]).all()):
        rows.admit(0, matcher)
        rows.admit(1, other(SEED, VOCAB))
        rows.look()
    tell(mail, 0, 1, run[0], run[1:4])
    rows.look()
    assert matcher.reached.wait(WAIT) and matcher.made == [0, 1, 2], "it is at the mask after the first draft"
    tell(mail, whose, 1 + (whose == 0), run[1 - whose], [])
    expected = tag_of(5 + whose, 2 + (whose == 0))
    with until(lambda: mail.tags[1 + whose, 0] == expected):
        matcher.free.set()
    if whose == 1:  # what was left off is done later
        with until(lambda: (mail.tags[1, :4] == tag_of(5, 2) + np.arange(4)).all()):
            pass
        assert matcher.made == [0, 1, 2, 2, 3, 4]
    else:
        assert matcher.made == [0, 1, 2, 2] and mail.tags[1, 1] != tag_of(5, 2) + 1
    rows.close()


class Counted(Brittle):
    """Counts the tokens that it and its copies have followed since one of them broke."""

    since = 0

    def advance(self, tokens):
        try:
            super().advance(tokens)
        except RuntimeError:
            Counted.since = 0
            raise
        Counted.since += len(tokens)


class NativeCounted(Counted, NativeAutomaton):
    """A matcher that counts like `Counted`, and is called as C functions."""


@pytest.mark.parametrize("lane", [Python, Native])
def test_the_copy_of_a_matcher_that_broke_late_has_nothing_to_make_up_for(lane):
    mail = Mail(Ring(3, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows, run, broke = lane(mail), allowed_run(SEED, 42), Brittle.broke
    wrong = next(token for token in allowed_after(SEED, run[:40], VOCAB) if token != run[40])
    rows.admit(0, (NativeCounted if lane is Native else Counted)(SEED, run, "advance"))
    for length, token in enumerate(run[:41], 1):
        with until(lambda: mail.tags[1, 0] == tag_of(5, length)):  # noqa: B023
            rows.settle()
        if length == 41:
            with until(lambda: Brittle.broke > broke):
                rows.settle()
        tell(mail, 0, length, token, [wrong] if length == 40 else [])
    with until(lambda: mail.tags[1, 0] == tag_of(5, 42)):
        rows.settle()
    rows.close()
    assert Counted.since == 1, "the next token alone"


class SlowCopy(Automaton):
    """A matcher whose copies follow nothing until the test sets `free`."""

    def __init__(self, free: threading.Event) -> None:
        super().__init__(SEED, VOCAB)
        self.free, self.copied, self.is_copy = free, threading.Event(), False

    def copy(self):
        other = super().copy()
        other.is_copy = True
        self.copied.set()
        return other

    def advance(self, tokens):
        if self.is_copy:
            assert self.free.wait(2 * WAIT)
        super().advance(tokens)


class NativeSlowCopy(SlowCopy, NativeAutomaton):
    """A matcher whose copies are slow like those of `SlowCopy`, and is called as C functions."""


@pytest.mark.parametrize("lane", [Python, Native])
def test_the_mask_of_a_row_waits_for_no_copy_of_a_matcher(lane):
    mail = Mail(Ring(3, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows, free = lane(mail) if lane is Python else lane(mail, polls=False), threading.Event()
    matchers = [(NativeSlowCopy if lane is Native else SlowCopy)(free) for _ in range(2)]
    for key, matcher in enumerate(matchers):
        rows.admit(key, matcher)
    rows.settle()
    assert all(matcher.copied.wait(WAIT) for matcher in matchers)
    (token,) = allowed_run(SEED, 1)
    for key in range(2):
        tell(mail, key, 1, token, [])
    with until(lambda: (mail.tags[1:3, 0] == [tag_of(5, 2), tag_of(6, 2)]).all()):
        rows.look()
    free.set()
    rows.close()


class Kept(NativeSlow):
    """A slow matcher that keeps its copies."""

    def __init__(self) -> None:
        super().__init__(SEED)
        self.copies: list[Automaton] = []

    def copy(self):
        self.copies.append(super().copy())
        return self.copies[-1]


def test_a_copy_follows_the_tokens_whose_mask_came_when_the_row_had_lost_its_slot():
    mail = Mail(Ring(3, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows, run, matcher = Native(mail), allowed_run(SEED, 2), Kept()
    with until(lambda: matcher.copies):
        rows.admit(0, matcher)
    for length, token in enumerate(run, 1):
        with until(lambda: mail.tags[1, 0] == tag_of(5, length)):  # noqa: B023
            pass
        tell(mail, 0, length, token, [])
    assert matcher.reached.wait(WAIT)
    rows.threads.give_slot(1, 99)
    with until(lambda: mail.tags[2, 0] == tag_of(6, 3)):
        matcher.free.set()
        rows.threads.admit(0, 2, 6, np.array([1, *run], np.int32))
    with until(lambda: matcher.copies[0].states == matcher.states):
        pass
    assert len(matcher.copies) == 1
    rows.close()


class BrittleCopy(Automaton):
    """A matcher whose copies break when they follow settled tokens."""

    copies = looks = 0
    breaks = False

    def copy(self):
        made = super().copy()
        made.breaks, BrittleCopy.copies = True, BrittleCopy.copies + 1
        return made

    def advance(self, tokens):
        assert not self.breaks, "the copy breaks"
        super().advance(tokens)

    def rollback(self, count):
        BrittleCopy.looks += 1
        super().rollback(count)


def test_a_row_whose_copy_broke_has_no_other_copy_and_no_look_ahead():
    mail = Mail(Ring(3, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows, run = Python(mail), allowed_run(SEED, 2)
    rows.admit(0, BrittleCopy(SEED, VOCAB))
    rows.settle()
    looked = BrittleCopy.copies, BrittleCopy.looks
    assert looked[0] == 1
    tell(mail, 0, 1, run[0], [run[1]])
    rows.settle()
    assert (BrittleCopy.copies, BrittleCopy.looks) == looked


class Traced(NativeAutomaton):
    """Notes which threads use it and its copies."""

    def __init__(self, form: int, number: int = 0) -> None:
        super().__init__(SEED, VOCAB)
        self.lexer, self.users = (form, number), set[int]()

    def write_mask(self, words):
        self.users.add(threading.get_ident())
        super().write_mask(words)


def test_matchers_that_share_a_lexer_are_used_by_one_thread():
    mail = Mail(Ring(5, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows = Native(mail, threads=2)
    matchers = [Traced(form) for form in (6, 6, 7, 7)]
    with until(lambda: (mail.tags[1:5, 0] == [tag_of(key + 5, 1) for key in range(4)]).all()):
        for key, matcher in enumerate(matchers):
            rows.admit(key, matcher)
    rows.close()
    first, second, third, fourth = (matcher.users for matcher in matchers)
    assert first == second != third == fourth and len(first) == len(third) == 1


def test_a_form_goes_to_the_thread_with_the_fewest_rows_and_leaves_it_with_its_last_row():
    mail = Mail(Ring(10, mail_bytes(VOCAB, 1 + MOST), pin=False), VOCAB, 1 + MOST)
    rows = Native(mail, threads=2)

    def thread_of(key: int, form: int, number: int = 0) -> int:
        matcher = Traced(form, number)
        with until(lambda: mail.tags[key + 1, 0] == tag_of(key + 5, 1)):
            rows.admit(key, matcher)
        return next(iter(matcher.users))

    first, second = thread_of(0, 6), thread_of(1, 8)
    assert first != second and thread_of(2, 8) == second and thread_of(3, 10) == first
    for key in (0, 2, 3):
        rows.threads.end(key)
    assert thread_of(4, 12) == thread_of(5, 12) == first
    assert thread_of(6, 6) == second, "its last row had ended"
    assert thread_of(7, 12, 1) == second, "each of a form's lexers has another thread, though that has more rows"
    rows.close()
