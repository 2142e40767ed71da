"""A matcher that does not come back ends its own request, and a mask never reaches another row than its own."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from automaton import Automaton, NativeAutomaton
from direct import Varied, direct_run
from harness import VOCAB, check_at_rest, sizes
from test_mask_oracle import Loose, asking

from gapless.base.errors import RequestError
from gapless.base.records import NO_TOKEN
from gapless.device import CpuDevice, Ring
from gapless.loop import mask_threads, masks
from gapless.loop.masks import MOST_NS, Waits
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.step.mail import Mail, mail_bytes, tag_of
from gapless.testing.loops import loop_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice

WAIT = 20.0
"""Seconds after which a test gives up."""


class Stuck(Automaton):
    """Does not come back from its `at`-th mask before it is let go."""

    def __init__(self, at: int = 1) -> None:
        super().__init__(7, VOCAB)
        self.at = at
        self.reached, self.free = threading.Event(), threading.Event()

    def write_mask(self, words):
        super().write_mask(words)
        if len(self.states) == self.at:
            self.reached.set()
            assert self.free.wait(WAIT)


class NativeStuck(Stuck, NativeAutomaton):
    """A matcher that blocks like `Stuck`, and is called as C functions."""


@contextmanager
def threaded_loop(rows: int = 4, polls: bool = True):
    shape = sizes(0)._replace(rows=rows, pages=60, step_tokens=20, slots=rows)
    device = CpuDevice(threads=1)
    loop = loop_of(device, Varied(VOCAB, 48), shape, 4, mask_polls=polls)
    yield loop
    loop.close()
    device.close()


def play(loop, jobs):
    """Submit these jobs and run them to their ends; returns those that failed."""
    for job in jobs.values():
        loop.submit(job.request)
    return finish(loop, jobs)


def finish(loop, jobs):
    failed, end = [], time.monotonic() + WAIT
    while loop.has_work():
        turn = loop.turn()
        failed += turn.failed
        for settled in turn.tokens:
            deliver(settled, jobs)
        assert time.monotonic() < end, "requests do not end"
    return failed


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize("kind", [Stuck, NativeStuck])
def test_a_matcher_that_does_not_come_back_ends_its_request_and_others_run_on(kind, polls, monkeypatch):
    """One of the others is native as well: a machine of few cores has one thread for both."""
    monkeypatch.setattr(masks, "LATE_SECONDS", 0.2)
    stuck = kind(at=2)
    beside = [stuck, NativeAutomaton(3, VOCAB), None]
    beside += [Automaton(5, VOCAB)] if kind is NativeStuck else []
    jobs = {key: asking(key, matcher) for key, matcher in enumerate(beside)}
    with threaded_loop(polls=polls) as loop:
        ((key, error),) = play(loop, jobs)
        assert key == 0 and str(error) == "structured_outputs: the mask of a token took longer than 10 s"
        assert not stuck.free.is_set(), "it is at work still"
        assert [job.tokens for job in [*jobs.values()][1:]] == [direct_run(jobs[i].request) for i in jobs if i]
        check_at_rest(loop)
        stuck.free.set()
        later = {9: asking(9, NativeAutomaton(4, VOCAB))}
        assert play(loop, later) == [] and later[9].tokens == direct_run(later[9].request)
    wait_until(lambda: not NativeAutomaton.owned, "every matcher is freed")


def test_a_matcher_whose_request_has_left_holds_no_other_up_either(monkeypatch):
    monkeypatch.setattr(masks, "LATE_SECONDS", 0.2)
    stuck = NativeStuck()
    jobs = {0: asking(0, stuck), 1: asking(1, NativeAutomaton(3, VOCAB))}
    with threaded_loop() as loop:
        for job in jobs.values():
            loop.submit(job.request)
        while not stuck.reached.is_set():
            assert not loop.turn().failed
        loop.abort(0)
        assert finish(loop, jobs) == [] and jobs[1].tokens == direct_run(jobs[1].request)
        stuck.free.set()


def test_closing_does_not_wait_for_a_matcher_for_ever():
    stuck = NativeStuck()
    with threaded_loop() as loop:
        loop.submit(asking(0, stuck).request)
        while not stuck.reached.is_set():
            loop.turn()
        loop.abort(0)
    stuck.free.set()
    wait_until(lambda: not NativeAutomaton.owned, "the matcher is freed when it is done")


def wait_until(true, what):
    end = time.monotonic() + WAIT
    while not true():
        gc.collect()
        assert time.monotonic() < end, what
        time.sleep(0.01)


def begin(threads, key, matcher):
    threads.begin(key, matcher.lexer, *matcher.give_away(), 1, [], 0)


@pytest.mark.parametrize("polls", [True, False])
def test_a_mask_that_is_made_when_its_slot_has_gone_to_another_row_is_never_posted(polls):
    module = mask_threads.load()
    mail = Mail(Ring(3, mail_bytes(VOCAB), pin=False), VOCAB)
    threads = module.MaskThreads(2, *mask_threads.geometry(mail), polls)
    slow, quick = NativeStuck(), NativeAutomaton(8, VOCAB)
    begin(threads, 0, slow)
    begin(threads, 1, quick)
    known = np.array([1], np.int32)
    threads.admit(0, 1, 5, known)
    assert slow.reached.wait(WAIT), "the first row's mask is being made"
    threads.admit(1, 1, 6, known)
    wait_until(lambda: mail.tags[1, 0] == tag_of(6, 1), "the second row waits for none but its own mask")
    expected = mail.new_mask()
    quick.write_mask(expected)
    found = mail.words.numpy()[1].copy()
    assert expected.tobytes() in found.tobytes()
    slow.free.set()
    threads.close()
    assert (mail.words.numpy()[1] == found).all(), "the first row's mask came too late"
    assert threads.written == 1 and not NativeAutomaton.owned


@pytest.mark.parametrize("given", [True, False])
def test_a_mask_of_python_is_posted_only_while_its_row_has_the_slot(given):
    """Without the check of the key, the second row's mail would be overwritten."""
    mail = Mail(Ring(3, mail_bytes(VOCAB), pin=False), VOCAB)
    threads = mask_threads.start(mail, polls=False)
    threads.give_slot(1, 0)
    if given:
        threads.give_slot(1, 1)
    threads.post(0, 1, tag_of(5, 1), ~mail.new_mask(), 0, NO_TOKEN)
    assert bool(mail.words[1].any()) is not given


class Panic(BaseException):
    """What a library of Rust raises when it breaks."""


class Panicking(Loose):
    def advance(self, tokens):
        raise Panic("index out of bounds")


@pytest.mark.parametrize("depth", [1, 4])
def test_a_panic_of_a_matcher_ends_its_request_alone(depth):
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    loop = loop_of(SimDevice(depth), Varied(VOCAB, 48), shape, depth)
    jobs = {0: asking(0, Panicking()), 1: asking(1, Automaton(3, VOCAB))}
    ((key, error),) = play(loop, jobs)
    assert key == 0 and str(error) == "structured_outputs: the matcher failed: Panic: index out of bounds"
    assert jobs[1].tokens == direct_run(jobs[1].request)


class NotGiven(NativeAutomaton):
    def give_away(self):
        raise RuntimeError("no more threads")


def test_a_matcher_that_cannot_be_taken_over_leaves_nothing_in_the_queue():
    with threaded_loop() as loop:
        with pytest.raises(RequestError, match="could not be taken over: RuntimeError: no more threads"):
            loop.submit(asking(0, NotGiven(1, VOCAB)).request)
        assert not loop.has_work() and not loop.requests
        check_at_rest(loop)
        again = {0: asking(0, NativeAutomaton(1, VOCAB))}
        assert play(loop, again) == [] and again[0].tokens == direct_run(again[0].request)
        with pytest.raises(RequestError, match="could not be taken over"):  # now that there are threads
            loop.submit(asking(1, NotGiven(1, VOCAB)).request)


def test_python_makes_no_masks_where_the_processor_reorders_stores(monkeypatch):
    monkeypatch.setattr(masks, "IN_ORDER", False)
    with threaded_loop() as loop, pytest.raises(RequestError, match="they need a GPU, and a C"):
        loop.submit(asking(0, NativeAutomaton(1, VOCAB)).request)


def test_the_time_that_a_process_was_stopped_is_not_a_matchers():
    table = RowTable(2, 8, Ledger())
    row = table.take(7, np.array([1], np.int32))
    rows, waits, now = np.array([row], np.int32), Waits(3), 10**12
    for _ in range(11):
        assert not len(waits.held(table, rows, now))
        now += 3_600 * 10**9
    assert waits.held(table, rows, now + MOST_NS).tolist() == [row], "eleven times a second, at most"
    table.length[row] += 1
    assert not len(waits.held(table, rows, now + 2 * MOST_NS)), "a token has come in between"
