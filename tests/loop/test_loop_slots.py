"""A made-up parameter leases a slot whose shift, added to each token, grows by one with it: only the lease orders the
host's write of a slot behind the steps in flight."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from harness import VOCAB, Job, check_at_rest, checksum_loop, run
from mutation.tools import replaced
from sharpest import sharpest

from gapless.base.params import SamplingParams, Words, columns, param, registry
from gapless.base.records import Request
from gapless.kernels import layout, plain
from gapless.kernels.layout import ACTIVE
from gapless.loop.spec import Sizes
from gapless.memory.slots import NO_SLOT, Slots
from gapless.step import packet
from gapless.step.program import StepProgram
from gapless.testing.checksum import continue_prompt
from gapless.testing.sim import SimDevice

SLOTS = 2
RELEASES = {
    "behind the last step": lambda retire, self, slot, last_step: retire(self, slot, last_step),
    "at once": lambda retire, self, slot, last_step: retire(self, slot, 0),
    "one step early": lambda retire, self, slot, last_step: retire(self, slot, last_step - 1),
}


@dataclass(frozen=True)
class Settings(SamplingParams):
    shift: int | None = param(None, "for this test", low=0, high=VOCAB, words=Words.SLOT)


ENTRIES = registry(Settings)
PLACES = columns(ENTRIES, layout.FIRST_PARAM)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Every module sees the registry, and the columns that follow from it, with the made-up parameter at its end."""
    wider = {"PARAMS": ENTRIES, "PARAM_OF": PLACES, "PARAM_COLUMNS": layout.PARAM_COLUMNS + 1}
    wider |= {"ADMISSION_WORDS": packet.ADMISSION_WORDS + 1}
    for module in [module for name, module in sys.modules.items() if name.startswith("gapless.")]:
        for name in wider.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, wider[name])
    packet.offsets.cache_clear()  # it holds the offsets of the engine's own columns
    yield
    packet.offsets.cache_clear()


class Shifting(StepProgram):
    """Rows that lease a slot get shifted tokens."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.memory = np.zeros(SLOTS + 1, np.int64)
        """Of host and device both."""
        self.shifts = torch.from_numpy(self.memory)

    def draw(self, logits, rows):
        tokens, finite = super().draw(logits, rows)
        slot = self.tables.params.index_select(0, rows)[:, PLACES["shift"]].long()
        shifted = (slot != NO_SLOT) & self.tables.state.index_select(0, rows)[:, ACTIVE].bool()
        shift = torch.where(shifted, self.shifts.index_select(0, slot), 0)
        self.shifts.index_add_(0, slot, shifted.long())
        return (tokens + shift[:, None]) % VOCAB, finite


class ShiftedJob(Job):
    def expected(self):
        """As the job's own, with the shift."""
        tokens, shift = self.request.tokens.tolist(), self.request.params.shift
        first = len(tokens)
        while len(tokens) < self.request.max_len:
            moved = 0 if shift is None else shift + len(tokens) - first
            tokens.append((continue_prompt(tokens, 1, VOCAB)[0] + moved) % VOCAB)
            if tokens[-1] in self.request.stop_ids:
                break
        return tokens[first:]


def shifting_loop(device, shape, depth, **options):
    """A loop whose rows may lease slots, and the slots that its rows got, in order."""
    loop = checksum_loop(device, shape, depth, program=Shifting, kernels=plain.KERNELS, **options)
    loop.rows.slots["shift"] = Slots(SLOTS, loop.planner.ledger)
    memory, launch, given = loop.launcher.executor.program.memory, loop.launcher.launch, []

    def write_and_launch(plan, requests):
        for admission, asked in zip(plan.admissions, requests, strict=True):
            for slot in loop.rows.leased[admission.row].values():
                memory[slot] = asked.params.shift + admission.length - len(asked.tokens)
                given.append(slot)
        return launch(plan, requests)

    loop.launcher.launch = write_and_launch
    return loop, given


def asking(key, shift, tokens, max_len, stops=()):
    """A request for shifted tokens, or for its own where `shift` is None."""
    params = Settings(temperature=0.0, max_tokens=None, shift=shift)
    return Request(key, np.array(tokens, np.int32), params, 0, stops, 0, max_len)


def jobs_of(seed):
    """More requests that want a slot than there are; some leave while steps with them are in flight."""
    rng = random.Random(seed)
    for key in range(10):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        stops, shift = tuple(rng.sample(range(VOCAB), 4)), rng.choice((None, 0, 5, 50))
        asked = asking(key, shift, tokens, len(tokens) + rng.randrange(1, 12), stops)
        yield ShiftedJob(asked, rng.randrange(6), rng.choice((None, None, 0, 2)))


def play(seed, depth, pages=60, order="random"):
    """Returns the slots that were given, and how many rows were preempted. Raises AssertionError for a wrong token."""
    jobs = list(jobs_of(seed))
    loop, given = shifting_loop(SimDevice(seed, order), Sizes(6, 24, pages, 4, 24, 32), depth)
    run(loop, jobs)
    for job in jobs:
        job.check()
    check_at_rest(loop)
    return given, loop.planner.preemptions


@pytest.mark.parametrize("depth", sharpest([4, 1, 8]))
def test_tokens_are_those_of_the_row_s_own_slot_at_any_depth(depth):
    played = [play(seed, depth, pages) for seed in (1, 3) for pages in (7, 60)]
    assert all(len(given) > 2 * SLOTS for given, _ in played), "slots are used again"
    assert sum(preempted for _, preempted in played) > 0, "rows that come back lease anew"


@pytest.mark.parametrize("release", RELEASES)
def test_a_slot_that_is_given_away_before_its_last_step_has_run_is_noticed(release):
    failed = 0
    with replaced(Slots, "retire", RELEASES[release]):
        for seed in range(4):
            try:
                play(seed, 4, order="lazy")
            except AssertionError:
                failed += 1
    assert failed == 0 if release == "behind the last step" else failed > 1


def test_requests_that_wait_for_a_slot_let_others_pass_and_keep_their_order():
    loop, given = shifting_loop(SimDevice(1, "eager"), Sizes(6, 32, 60, 4, 64, 32), 2)
    for key, shift in enumerate((1, 2, 3, 4, None, None)):
        loop.submit(asking(key, shift, [key, 1], 12))
    started = []
    while loop.has_work():
        started += [key for key, _ in loop.turn().started]
    assert started[:4] == [0, 1, 4, 5] and started[4:] == [2, 3] and sorted(given) == [1, 1, 2, 2]
    check_at_rest(loop)
