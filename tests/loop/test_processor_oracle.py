"""Rows that ask for logits processors get the tokens of a direct computation, and so do their neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest
from automaton import ASKED, Automaton
from harness import VOCAB, captures_at_once, kernels_for, script, sizes
from mutation.tools import replaced
from scripted_drafter import MOST, Scripted
from test_sampling_oracle import ASKS, SETTINGS, Varied, answers_to, bad_words, run_directly
from torch_processors import PROCESSORS

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice, Device
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.step import program
from gapless.step.keys import AdjustKey
from gapless.step.processors import ProcessorTables, slots_of
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice

NAMES = [processor.name for processor in PROCESSORS]


def processed_jobs(seed, max_len):
    """The script of a seed, in which about half the requests have processors, some of them with other wishes."""
    rng, jobs = random.Random(seed), script(seed, max_len)
    for job in jobs:
        wanted = rng.sample(range(3), rng.choice((0, 0, 1, 1, 2, 3)))
        calls = [{"qualname": NAMES[number], "args": [rng.choice((8.0, 2.5, 0.0)), 1.5]} for number in wanted]
        asks = rng.choice(({}, {}, *(one for one in ASKS if "allowed_token_ids" not in one)))
        masked = {"structured_outputs": ASKED} if rng.random() < 0.2 else {}
        params = SamplingParams(**rng.choice(SETTINGS), **asks, **masked, max_tokens=None, logits_processors=calls)
        words = bad_words(rng, params) if params.bad_words else ()
        job.request = job.request._replace(
            params=params,
            bad_words=words,
            matcher=Automaton(rng.randrange(1000), VOCAB) if masked else None,
            processors=tuple((number, call["args"]) for number, call in zip(wanted, calls, strict=True)),
        )
    return jobs


def play(seed: int, device: Device, depth: int | None, chain: int | None = None, drafts: bool = False) -> Loop:
    shape, jobs = sizes(seed), processed_jobs(seed, 48)
    graphs = captures_at_once(shape) if seed % 3 else {}
    if drafts:
        answers = answers_to(jobs)
        graphs["speculation"] = Speculation(MOST, Scripted.new(answers, 0.2), shape.rows)
    kernels = kernels_for(seed)
    model = Varied(VOCAB, 48)
    loop = build_loop(device, model, shape, depth, chain=chain, kernels=kernels, processors=PROCESSORS, **graphs)
    return run_directly(loop, jobs)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_processed_rows_and_their_neighbours_get_the_tokens_of_a_direct_computation(depth, raced, guarded_steps):
    preempted = cached = captured = 0
    # A race is seen in whatever order the streams moved: there, fewer seeds do.
    seeds = 3 if raced else 8
    with guarded_steps.rest():
        for seed in range(100, 100 + seeds):
            loop = play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth)
            preempted += loop.planner.preemptions
            cached += loop.counters.prefix_hits
            captured += sum(isinstance(key, AdjustKey) and bool(key.processors) for key in loop.launcher.graphs.known)
    assert captured and ((preempted and cached) or seeds < 8), (preempted, cached, captured)


@pytest.mark.parametrize("depth", [1, 4])
def test_processed_rows_have_no_drafts_and_go_beside_rows_that_have(depth, guarded_steps):
    with guarded_steps.rest():
        gates = [play(seed, SimDevice(seed), depth, drafts=True).launcher.gate for seed in range(500, 506)]
    assert sum(int(gate.counts.accepted.sum()) for gate in gates) > 10


def test_processed_rows_run_in_chains(guarded_steps):
    with guarded_steps.rest():
        chained = sum(play(seed, SimDevice(seed), 4, chain=8).counters.chained_steps for seed in range(200, 204))
    assert chained > 10


@pytest.mark.parametrize("depth", [1, 4, None])
def test_processed_rows_on_threads_get_the_direct_tokens(depth):
    for seed in range(300, 303):
        device = CpuDevice(threads=1)
        play(seed, device, depth)
        device.close()


def test_a_step_with_processed_rows_reads_nothing_on_the_host(guarded_steps):
    for seed in (400, 401):
        play(seed, SimDevice(seed), 4)


def test_a_processor_that_ran_for_rows_that_do_not_ask_would_be_noticed(guarded_steps):
    def everywhere(original, processors, numbers, rows, tables, adjustments):
        own, logits = slots_of(rows.long(), tables), adjustments.adjusted[0]
        for number in numbers:
            given = ProcessorTables(tables, adjustments, rows.long(), number)
            logits.index_copy_(0, own, processors[number](logits.index_select(0, own), given))

    noticed = 0
    with replaced(program, "process", everywhere), guarded_steps.rest():
        for seed in range(106, 112):
            try:
                play(seed, SimDevice(seed), 4)
            except AssertionError:
                noticed += 1
    assert noticed


def test_a_step_in_which_no_row_asks_runs_without_processors():
    shape = sizes(0)._replace(rows=3, pages=60, slots=3)
    loop = build_loop(SimDevice(1), Varied(VOCAB, 48), shape, 2, patience=1_000, processors=PROCESSORS)
    keys = []
    for key, asks in enumerate(({}, {"presence_penalty": 1.0}, {"logits_processors": ["favours"]})):
        params = SamplingParams(temperature=0.0, max_tokens=None, **asks)
        processors = ((0, (3.0,)),) if params.logits_processors else ()
        loop.submit(Request(key, np.array([key, 1], np.int32), params, 0, (), 0, 9, processors=processors))
        while loop.has_work():
            loop.turn()
        keys.append({key for key in loop.launcher.graphs.misses if isinstance(key, AdjustKey)})
    assert keys == [set(), {AdjustKey(1, None)}, {AdjustKey(1, None), AdjustKey(1, None, processors=(0,))}]
