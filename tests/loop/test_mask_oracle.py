"""Matchers that fail, and the threads that run matchers: what becomes of their requests, and of no others."""

from __future__ import annotations

import pytest
from automaton import ASKED, Automaton, NativeAutomaton
from direct import Varied, direct_run
from harness import VOCAB, Job, ask, check_at_rest, sizes

from gapless.base.errors import RequestError
from gapless.device import CpuDevice
from gapless.testing.loops import loop_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice


class Loose(NativeAutomaton):
    """Raises at one position, or allows nothing from there on."""

    def __init__(self, raises_at: int = 99, empty_at: int = 99) -> None:
        super().__init__(7, VOCAB)
        self._raises_at, self._empty_at = raises_at, empty_at

    def write_mask(self, words):
        super().write_mask(words)
        if len(self.states) > self._raises_at:
            raise RuntimeError("a bug of the matcher")
        if len(self.states) > self._empty_at:
            words[:] = 0


def asking(key: int, matcher: Automaton | None) -> Job:
    asks = {"structured_outputs": ASKED} if matcher else {}
    return ask(key, [key, 1], new=8, matcher=matcher, **asks)


def played(matcher: Automaton, depth: int, threads: bool = False) -> tuple[Job, list[tuple[int, RequestError]]]:
    """One row with this matcher beside two that must not notice."""
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    device = CpuDevice(threads=1) if threads else SimDevice(depth)
    loop = loop_of(device, Varied(VOCAB, 48), shape, depth, mask_polls=threads or None)
    jobs = {key: asking(key, [matcher, Automaton(3, VOCAB), None][key]) for key in range(3)}
    for job in jobs.values():
        loop.submit(job.request)
    failed = []
    while loop.has_work():
        turn = loop.turn()
        failed += turn.failed
        for settled in turn.tokens:
            deliver(settled, jobs)
    assert [jobs[key].tokens for key in (1, 2)] == [direct_run(jobs[key].request) for key in (1, 2)]
    check_at_rest(loop)
    return jobs[0], failed


@pytest.mark.parametrize(("depth", "threads"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("at", [0, 3])
def test_a_matcher_that_raises_ends_its_request_with_an_error_and_no_other(at, depth, threads):
    job, failed = played(Loose(raises_at=at), depth, threads)
    # Steps in flight are not waited for, as when a request is aborted.
    assert job.tokens == direct_run(job.request)[: len(job.tokens)] and len(job.tokens) <= at and job.flag is None
    ((key, error),) = failed
    assert key == 0 and error.param == "structured_outputs"
    where = "" if threads else "the matcher failed: RuntimeError: "
    assert str(error) == f"structured_outputs: {where}a bug of the matcher"


@pytest.mark.parametrize(("depth", "threads"), [(1, False), (4, False), (4, True)])
def test_a_mask_that_leaves_no_token_ends_its_request_and_says_so(depth, threads):
    job, failed = played(Loose(empty_at=2), depth, threads)
    # As with any failure of a matcher: its KV is not in doubt, so no other row pays for it.
    assert job.tokens == direct_run(job.request)[: len(job.tokens)] and job.flag is None
    ((key, error),) = failed
    assert (key, str(error)) == (0, "structured_outputs: the grammar allows no token")


def test_threads_end_with_their_engine_and_an_end_token_beyond_the_vocabulary_writes_nothing():
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    device = CpuDevice(threads=1)
    loop = loop_of(device, Varied(VOCAB, 48), shape, 4, mask_polls=True)
    before = loop.launcher.executor.buffers.mail.words.clone()
    job = asking(0, NativeAutomaton(1, VOCAB))
    loop.submit(job.request._replace(stop_ids=(VOCAB + 700, 2**30)))
    while loop.has_work():
        loop.turn()
    after = loop.launcher.executor.buffers.mail.words
    changed = (after != before).any(1).nonzero()[:, 0].tolist()
    assert len(changed) <= 2, "the row's own slot, and the null row's"
    loop.close()
    assert loop.parts.masks.threads.written and not NativeAutomaton.owned
    loop.parts.masks.end(job.request)
    device.close()
