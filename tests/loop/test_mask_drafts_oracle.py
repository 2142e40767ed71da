"""Rows whose matchers decide have drafts like others, and get the tokens of a direct computation.

The adversary moves the attendant as it moves streams, so the masks after drafts come as late as it likes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from automaton import FORCING, allowed_after
from harness import VOCAB, captures_at_once, kernels_for, sizes
from scripted_drafter import MOST, Scripted
from test_mask_oracle import masked_jobs
from test_sampling_oracle import Varied, answers_to, run_directly

from gapless.base.records import Int32s
from gapless.device import CpuDevice, Device, build
from gapless.loop import mask_threads
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.step.speculation import Speculation, Verify
from gapless.testing.sim import SimDevice


class Played(NamedTuple):
    """What became of the drafts of rows with matchers."""

    loop: Loop
    drafted: int
    accepted: int
    certain: int
    """Of those that were accepted, how many stand where their matcher allows one token alone"""


class Drafts:
    """Counts the drafts of rows with matchers that were verified."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.drafted, self.accepted, self.certain = loop, 0, 0, 0
        self._observe = loop.launcher.gate.observe
        loop.launcher.gate.observe = self.observe

    def observe(self, rows: Int32s, tokens: Int32s, verify: Verify) -> None:
        if verify.places > 1:
            masked = np.array([self._masked(row) for row in rows.tolist()], bool) & (tokens[:, 0] != -1)  # no held ones
            self.drafted += int(np.count_nonzero(tokens[masked, 1:] != -1))
            self.accepted += int(np.count_nonzero(tokens[masked, 1:] >= 0))
            self.certain += sum(map(self._certain, rows[masked].tolist(), tokens[masked].tolist()))
        self._observe(rows, tokens, verify)

    def _certain(self, row: int, tokens: list[int]) -> int:
        """How many of a row's accepted drafts its automaton leaves no choice about, by definition."""
        request = self.loop.requests[int(self.loop.rows.key[row])]
        output = self.loop.rows.settled(row)[len(request.tokens) :].tolist()
        given = [token for token in tokens if token >= 0]
        seed = request.matcher.seed
        return sum(len(allowed_after(seed, [*output, *given[:at]], VOCAB)) == 1 for at in range(len(given) - 1))

    def _masked(self, row: int) -> bool:
        request = self.loop.requests.get(int(self.loop.rows.key[row]))
        return request is not None and request.matcher is not None


@cache
def answers_of(seed: int, natives: bool) -> list[list[int]]:
    return answers_to(masked_jobs(seed, 48, natives))


def play(
    seed: int, device: Device, depth: int | None, errs: float | None, chain: int | None = None,
    polls: bool | None = None,
) -> Played:  # fmt: skip
    """`errs` None: a drafter that has no drafts, and matchers that mostly allow one token."""
    first = FORCING if errs is None else 0
    shape, jobs = sizes(seed), masked_jobs(seed, 48, polls is not None, first)
    graphs = captures_at_once(shape) if seed % 3 else {}
    kernels = kernels_for(seed)
    answers = [] if errs is None else answers_of(seed, polls is not None)
    speculation = Speculation(MOST, Scripted.new(answers, errs or 0.0), shape.rows)
    loop = build_loop(
        device, Varied(VOCAB, 48), shape, depth, chain=chain, kernels=kernels, speculation=speculation, **graphs
    )
    if polls is not None:
        loop.masks.threads = mask_threads.start(loop.masks.mail, polls)
    drafts = Drafts(loop)
    run_directly(loop, jobs)
    return Played(loop, drafts.drafted, drafts.accepted, drafts.certain)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
def test_masked_rows_with_drafts_get_the_tokens_of_a_direct_computation(depth, errs, raced, guarded_steps):
    seeds = range(105, 107) if raced else range(100, 108)
    with guarded_steps.rest():
        played = [play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth, errs) for seed in seeds]
    drafted, accepted = sum(one.drafted for one in played), sum(one.accepted for one in played)
    # Of most wrong drafts the masks say so before: these are not verified. What the matchers expect is right.
    if errs == 1.0:
        assert drafted > accepted == sum(one.certain for one in played)
    else:
        assert drafted > 50 and (accepted < drafted) == (errs > 0)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_tokens_that_a_matcher_leaves_no_choice_about_are_drafts_and_always_right(depth, raced, guarded_steps):
    seeds = range(104, 107) if raced else range(100, 108)
    with guarded_steps.rest():
        played = [play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth, None) for seed in seeds]
    assert expected_drafts(played) > 30


def expected_drafts(played: list[Played]) -> int:
    """How many drafts there were of which a matcher left no choice; there are no others, and all of them are right."""
    drafted = sum(one.drafted for one in played)
    assert drafted == sum(one.accepted for one in played) == sum(one.certain for one in played)
    return drafted


@pytest.mark.parametrize("polls", [None, True, False])
def test_threads_expect_the_tokens_that_a_matcher_leaves_no_choice_about(polls, guarded_steps):
    played = []
    for seed in range(300, 306):
        device = CpuDevice(threads=1)
        with guarded_steps.rest():
            played.append(play(seed, device, 1, None, polls=polls))
        device.close()
    assert expected_drafts(played)


@pytest.mark.parametrize("mood", ["lazy", "eager", "starve", "bursts", "single"])
def test_masks_after_drafts_come_as_late_as_the_adversary_likes(mood, guarded_steps):
    with guarded_steps.rest():
        played = [play(seed, SimDevice(seed, mood), 4, 0.2) for seed in range(400, 404)]
    assert sum(one.accepted for one in played) or mood != "eager"
    assert sum(one.loop.counters.held_rows for one in played) or mood != "lazy"


@pytest.mark.parametrize("chain", [2, 8])
def test_masked_rows_with_drafts_run_in_chains(chain, guarded_steps):
    with guarded_steps.rest():
        played = [play(seed, SimDevice(seed), 4, 0.2, chain) for seed in range(200, 204)]
    assert sum(one.loop.counters.chained_steps for one in played) and sum(one.accepted for one in played)


@pytest.mark.parametrize("polls", [None, True, False])
@pytest.mark.parametrize("depth", [1, 4, None])
def test_masks_after_drafts_are_made_by_threads_too(depth, polls, guarded_steps):
    assert mask_threads.load() is not None, build.outcomes[mask_threads.MASKS_EXTENSION].reason
    accepted = 0
    for seed in range(300, 304):
        device = CpuDevice(threads=1)
        with guarded_steps.rest():
            accepted += play(seed, device, depth, 0.2, polls=polls).accepted
        device.close()
    assert accepted
