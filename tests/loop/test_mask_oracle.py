"""Rows whose matchers decide get the tokens of a direct computation, however late their masks are; so do the others.

The simulator's adversary moves the attendant as it moves streams, so masks come as late as it likes.
"""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
from automaton import ASKED, Automaton, NativeAutomaton
from harness import VOCAB, Job, captures_at_once, check_at_rest, kernels_for, script, sizes
from test_sampling_oracle import ASKS, SETTINGS, Varied, bad_words, direct_run, run_directly

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import Cause, Request
from gapless.device import CpuDevice, Device, build
from gapless.loop import mask_threads
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice

BESIDE = [*[{}] * 4, *(asks for asks in ASKS if "allowed_token_ids" not in asks)]
"""What else is asked: allowed ids might leave no token."""


def masked_jobs(seed: int, max_len: int, natives: bool, first: int = 0) -> list[Job]:
    """The script of a seed, in which about half the requests have a matcher, whose seeds begin with `first`."""
    rng, jobs = random.Random(seed), script(seed, max_len)
    for job in jobs:
        masked = rng.random() < 0.6
        asks = {"structured_outputs": ASKED} if masked else {}
        params = SamplingParams(**rng.choice(SETTINGS), **rng.choice(BESIDE), **asks, max_tokens=None)
        words = bad_words(rng, params) if params.bad_words else ()
        kind = NativeAutomaton if natives and rng.random() < 0.6 else Automaton
        matcher = kind(first + rng.randrange(1000), VOCAB) if masked else None
        job.request = job.request._replace(params=params, bad_words=words, matcher=matcher)
    return jobs


def play(seed: int, device: Device, depth: int | None, chain: int | None = None, polls: bool | None = None) -> Loop:
    shape, jobs = sizes(seed), masked_jobs(seed, 48, natives=polls is not None)
    graphs = captures_at_once(shape) if seed % 3 else {}
    kernels = kernels_for(seed)
    loop = build_loop(device, Varied(VOCAB, 48), shape, depth, chain=chain, kernels=kernels, **graphs)
    if polls is not None and loop.masks is not None:
        loop.masks.threads = mask_threads.start(loop.masks.mail, polls)
    return run_directly(loop, jobs)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_masked_rows_and_their_neighbours_get_the_tokens_of_a_direct_computation(depth, raced, guarded_steps):
    preempted = cached = captured = held = 0
    # A race is seen in whatever order the streams moved: there, fewer seeds do.
    seeds = 4 if raced else 16
    with guarded_steps.rest():
        for seed in range(100, 100 + seeds):
            loop = play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth)
            preempted += loop.planner.preemptions
            cached += loop.counters.prefix_hits
            captured += loop.counters.graph_steps
            held += loop.counters.held_rows
    assert preempted and cached and captured and (held or seeds < 16)


@pytest.mark.parametrize("mood", ["lazy", "eager", "starve", "bursts", "single"])
def test_masks_come_as_late_as_the_adversary_likes(mood, guarded_steps):
    with guarded_steps.rest():
        loops = [play(seed, SimDevice(seed, mood), 4) for seed in range(400, 404)]
    held, written = (sum(numbers) for numbers in zip(*map(counts, loops), strict=True))
    assert written and (held > written or mood != "lazy")
    timelines = [loop.account() for loop in loops]
    assert mood != "lazy" or sum(timeline.idle[Cause.GRAMMAR] for timeline in timelines), (
        "a step in which all rows are held is idle time of grammar"
    )
    for timeline in timelines:
        assert timeline.busy + sum(timeline.idle.values()) == timeline.covered - timeline.start


def counts(loop: Loop) -> tuple[int, int]:
    assert loop.masks is not None
    return loop.counters.held_rows, loop.masks.written


@pytest.mark.parametrize("chain", [2, 8])
def test_masked_rows_run_in_chains(chain, raced, guarded_steps):
    seeds = range(200, 203 if raced else 208)
    with guarded_steps.rest():
        chained = sum(play(seed, SimDevice(seed), 4, chain).counters.chained_steps for seed in seeds)
    assert chained > 2.5 * len(seeds)


@pytest.mark.parametrize("depth", [1, 4, None])
def test_masked_rows_on_threads_get_the_tokens_of_a_direct_computation(depth):
    for seed in range(300, 306):
        device = CpuDevice(threads=1)
        play(seed, device, depth)
        device.close()
    assert not [thread for thread in threading.enumerate() if "attendant" in thread.name]


def test_a_step_with_masked_rows_reads_nothing_on_the_host(guarded_steps):
    for seed in (500, 501):
        play(seed, SimDevice(seed), 4)


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize(("depth", "chain"), [(1, None), (None, None), (4, 8)])
def test_native_matchers_give_the_tokens_of_a_direct_computation(depth, chain, polls, guarded_steps):
    """Some of them, beside others; with threads that look for tokens, and with threads that are rung."""
    assert mask_threads.load() is not None, build.outcomes[mask_threads.MASKS_EXTENSION].reason
    written = preempted = 0
    for seed in range(300, 306):
        device = CpuDevice(threads=1)
        with guarded_steps.rest():
            loop = play(seed, device, depth, chain, polls)
        assert loop.masks is not None
        written += loop.masks.threads.written
        preempted += loop.planner.preemptions
        device.close()
        del loop
        gc.collect()
        assert not NativeAutomaton.owned, "every matcher is freed, and once"
    assert written > 50 and preempted


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
    params = SamplingParams(temperature=0.0, max_tokens=None, **asks)
    return Job(Request(key, np.array([key, 1], np.int32), params, 0, (), 0, 10, matcher=matcher))


def played(matcher: Automaton, depth: int, threads: bool = False) -> tuple[Job, list[tuple[int, RequestError]]]:
    """One row with this matcher beside two that must not notice."""
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    loop = build_loop(CpuDevice(threads=1) if threads else SimDevice(depth), Varied(VOCAB, 48), shape, depth)
    if threads and loop.masks is not None:
        loop.masks.threads = mask_threads.start(loop.masks.mail, polls=True)
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


def test_a_matcher_is_refused_where_several_devices_take_part():
    shape = sizes(0)._replace(rows=3, pages=60, slots=3)
    loop = build_loop(SimDevice(1), Varied(VOCAB, 48), shape, 2, follow=lambda order: None)
    with pytest.raises(RequestError, match="structured_outputs"):
        loop.submit(asking(0, Automaton(1, VOCAB)).request)
    assert not loop.has_work()


def test_threads_end_with_their_engine_and_an_end_token_beyond_the_vocabulary_writes_nothing():
    shape = sizes(0)._replace(rows=3, pages=60, step_tokens=20, slots=3)
    device = CpuDevice(threads=1)
    loop = build_loop(device, Varied(VOCAB, 48), shape, 4)
    assert loop.masks is not None
    loop.masks.threads = mask_threads.start(loop.masks.mail, polls=True)
    before = loop.launcher.executor.mail.words.clone()
    job = asking(0, NativeAutomaton(1, VOCAB))
    loop.submit(job.request._replace(stop_ids=(VOCAB + 700, 2**30)))
    while loop.has_work():
        loop.turn()
    after = loop.launcher.executor.mail.words
    changed = (after != before).any(1).nonzero()[:, 0].tolist()
    assert len(changed) <= 2, "the row's own slot, and the null row's"
    loop.masks.close()
    assert loop.masks.threads.written and not NativeAutomaton.owned
    loop.masks.end(0)
    device.close()
