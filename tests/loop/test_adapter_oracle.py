"""Rows of more adapters than there are slots get the tokens of a direct computation, whatever the streams do."""

from __future__ import annotations

import random

import numpy as np
import pytest
from adapted_checksum import NUMBERS, adapted_loop, expected
from harness import captures_at_once, check_at_rest, kernels_for, run, script, sizes
from mutation.tools import replaced

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.memory.adapters import AdapterSlots
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Clock
from gapless.step.adapters import AdapterLoader
from gapless.testing.sim import SimDevice


def adapted_jobs(seed):
    rng, jobs = random.Random(seed), script(seed, 48)
    for job in jobs:
        job.request = job.request._replace(adapter=rng.choice(("", *NUMBERS)))
    return jobs


def play(seed, device, depth, chain=None):
    shape, jobs = sizes(seed), adapted_jobs(seed)
    graphs = captures_at_once(shape) if seed % 3 else {}
    kernels = kernels_for(seed)
    loop = adapted_loop(device, shape, depth, chain=chain, kernels=kernels, **graphs)
    run(loop, jobs)
    for job in jobs:
        tokens = expected(job.request)
        assert job.tokens == (tokens[: len(job.tokens)] if job.flag == -1 else tokens), job.request
    device.drain()
    loop.adapters.poll()  # a load whose request was aborted
    check_at_rest(loop)
    return loop


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_rows_of_several_adapters_get_the_tokens_of_a_direct_computation(depth, raced, guarded_steps):
    preempted = cached = captured = loads = 0
    seeds = 6 if raced else 24
    with guarded_steps.rest():
        for seed in range(500, 500 + seeds):
            loop = play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth)
            preempted += loop.planner.preemptions
            cached += loop.counters.prefix_hits
            captured += loop.counters.graph_steps
            loads += loop.adapters.slots.loads
    assert preempted and cached and captured
    assert loads > 3 * seeds, "more adapters were meant to be asked for than there are slots"


@pytest.mark.parametrize("chain", [2, 8])
def test_they_run_in_chains(chain, raced, guarded_steps):
    seeds = range(600, 603 if raced else 608)
    with guarded_steps.rest():
        chained = sum(play(seed, SimDevice(seed), 4, chain).counters.chained_steps for seed in seeds)
    assert chained > 2 * len(seeds)


@pytest.mark.parametrize("depth", [1, 4, None])
def test_they_run_on_threads(depth):
    for seed in range(700, 703):
        device = CpuDevice(threads=1)
        play(seed, device, depth)
        device.close()


def test_a_step_with_adapters_reads_nothing_on_the_host(guarded_steps):
    for seed in (800, 801):
        play(seed, SimDevice(seed), 4)


def disturbed(mutation):
    """Whether one of some seeds gives other tokens, or trips over a lease that is broken."""
    with mutation:
        for seed in range(900, 912):
            try:
                play(seed, SimDevice(seed), 4)
            except AssertionError:
                return True
    return False


@pytest.mark.usefixtures("guarded_steps")
def test_a_slot_that_is_loaded_while_steps_read_it_is_noticed():
    def retire(original, self, adapter, last_step):
        original(self, adapter, 0)

    assert disturbed(replaced(AdapterSlots, "retire", retire))


def test_pages_shared_between_adapters_are_noticed():
    def chain(original, self, tokens, salt, adapter=""):
        return original(self, tokens, salt)

    assert disturbed(replaced(PrefixIndex, "chain", chain))


def test_an_adapter_that_is_taken_before_its_load_has_ended_is_noticed():
    def done(original, self):
        if self._load is not None:
            load, self._load = self._load[0], None
            self._ledger.advance(Clock.ADAPTERS, load.number)
        original(self)

    assert disturbed(replaced(AdapterLoader, "poll", done))


def asking(key, adapter, length=8):
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return Request(key, np.array([key, 1], np.int32), params, 0, (), 0, length, adapter=adapter)


def test_requests_that_wait_for_an_adapter_hold_up_no_others():
    shape = sizes(0)._replace(rows=4, pages=400, step_tokens=200, queue=400)
    loop = adapted_loop(SimDevice(1, "eager"), shape, 2)
    names = ["ann", "bob", "cem", "dov", "", ""]
    ends = {}
    for key, name in enumerate(names):
        loop.submit(asking(key, name, 40 if key < 2 else 8))
    turns = 0
    while loop.has_work():
        for settled in loop.turn().tokens:
            ends |= dict.fromkeys(settled.keys[settled.flags != 0].tolist(), turns)
        turns += 1
    assert max(ends[4], ends[5]) < min(ends[0], ends[1]) < min(ends[2], ends[3])


def test_an_adapter_that_everybody_asks_for_makes_way_for_another():
    shape = sizes(0)._replace(rows=4, pages=400, step_tokens=200, queue=400)
    loop = adapted_loop(SimDevice(1, "eager"), shape, 2)
    for key in range(4):
        loop.submit(asking(key, ("ann", "bob")[key % 2], 40))
    ended, key, late = [], 4, asking(1_000, "cem")
    for turn in range(400):
        if turn == 10:
            loop.submit(late)
        for settled in loop.turn().tokens:
            for done in settled.keys[settled.flags != 0].tolist():
                ended.append(done)
                loop.submit(asking(key, ("ann", "bob")[key % 2], 40))
                key += 1
        if late.key in ended:
            break
    assert late.key in ended and len(ended) < 12


def test_an_adapter_that_is_not_there_is_refused():
    loop = adapted_loop(SimDevice(1), sizes(0), 2)
    with pytest.raises(RequestError, match="no adapter 'eve'"):
        loop.submit(asking(1, "eve"))
    assert not loop.requests and not loop.has_work()
