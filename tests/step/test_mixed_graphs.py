"""Captured steps with chunks, which hold null rows, null chunks and tokens of no row beside the live ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mixed_harness import LONGEST, REQUESTS, SETTINGS, SHAPE, dense_model, drive, engine
from sharpest import sharpest

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CudaDevice
from gapless.engine import wiring
from gapless.kernels.layout import ACTIVE, LENGTH
from gapless.step import graphs
from gapless.step.keys import ForwardKey, SampleKey
from gapless.testing.sim import SimDevice


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dense_model(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("mixed, apart", sharpest([(graphs.ON_GPU, 4), (graphs.ALONE, 16)]))
@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_padded_steps_give_the_tokens_of_eager_ones(model, depth, mixed, apart):
    tokens = []
    for buckets in ((), None):
        device = SimDevice(depth)
        loop = engine(device, model, depth, mixed, buckets=buckets, patience=1)
        tokens.append(drive(loop, SETTINGS, apart))
        assert loop.counters.dropped_identity == 0, "the line of a null row counts as one that was dropped"
        tables = loop.launcher.executor.program.tables
        assert not tables.state[0].any() and not tables.params[0].any() and not tables.pages[0].any()
        known = loop.launcher.graphs.known
        captured = [key for key in known if isinstance(key, ForwardKey) and key.batch.chunks]
    assert len(captured) > 2 and loop.counters.graph_steps > 50
    assert len(tokens[0]) == REQUESTS - 1 and tokens[0] == tokens[1]


@pytest.mark.parametrize("mixed, apart", sharpest([(graphs.ON_GPU, 4), (graphs.ALONE, 16)]))
@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_steps_after_which_a_prompt_goes_on_are_replays_with_the_same_tokens(model, depth, mixed, apart):
    tokens, shape = [], SHAPE._replace(step_tokens=16)
    for buckets in ((), None):
        device = SimDevice(depth)
        loop = engine(device, model, depth, mixed, shape, buckets=buckets, patience=1)
        leader, replays = loop.launcher.leader, []

        def watch(plan, decide=leader.decide, replays=replays):
            decision = decide(plan)
            if plan.chunks and not plan.chunks[-1].last:
                replays.append((decision.captured, len(plan.chunks) > 1))
            return decision

        leader.decide = watch
        tokens.append(drive(loop, SETTINGS, apart))
        assert loop.counters.dropped_identity == 0, "the line of a null row counts as one that was dropped"
    several = [captured for captured, beside in replays if beside]
    assert sum(captured for captured, _ in replays) > 3 and (mixed is graphs.ALONE or sum(several) > 10)
    assert len(tokens[0]) == REQUESTS - 1 and tokens[0] == tokens[1]


def test_every_step_that_fits_a_bucket_is_a_replay_or_a_miss(model):
    """Also one that scores a prompt; and every step without chunks, also one with more rows than any bucket."""
    device = SimDevice(1)
    loop = engine(device, model, buckets=(1, 2), patience=1)
    leader, scored, others = loop.launcher.leader, [], 0
    decide = leader.decide

    def watch(plan):
        nonlocal others
        decision = decide(plan)
        if plan.chunks and leader.wanted(plan) is None:
            others += 1
        elif decision.prompt:
            scored.append(decision.missed)
        return decision

    leader.decide = watch
    drive(loop, (*SETTINGS, {"temperature": 0.0, "prompt_logprobs": 1}))
    counters = loop.counters
    # Others are steps that exceed each bucket.
    assert min(counters.graph_misses, counters.graph_steps, others) >= 20 and scored and all(scored)
    assert counters.graph_steps + counters.graph_misses + others == counters.steps


@pytest.mark.parametrize("budget", sharpest([SHAPE.step_tokens, 16]))
@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_from_the_first_step_on_prompts_replay_graphs_that_are_larger(model, depth, budget):
    """They are captured at start. A bucket gets its own at rest only: nobody waits for it."""
    device = SimDevice(depth)
    loop = engine(device, model, depth, shape=SHAPE._replace(step_tokens=budget), buckets=None, patience=1)
    loop.capture()
    ready = set(loop.launcher.graphs.known)
    tokens = drive(loop, SETTINGS[:1])
    counters = loop.counters
    assert counters.graph_misses == 0 and counters.graph_steps == counters.steps > 100
    misses = dict(loop.launcher.graphs.misses)
    assert ready == set(loop.launcher.graphs.known) and counters.declined_capture == 0
    assert misses and max(misses.values()) < 1
    while loop.rest():
        loop.turn()
    assert not loop.launcher.graphs.misses and set(misses) <= set(loop.launcher.graphs.known)
    own = [key for key in loop.launcher.graphs.known if key not in ready]
    assert {type(key) for key in own} == {ForwardKey, SampleKey}
    assert tokens == drive(loop, SETTINGS[:1]) == drive(engine(SimDevice(1), model, buckets=()), SETTINGS[:1])
    assert counters.graph_misses == 0 and counters.graph_steps == counters.steps


@pytest.mark.parametrize("depth, chain", sharpest([(4, 4), (1, 1)]))
def test_captures_on_the_way_change_no_token_when_rows_are_preempted_and_aborted(model, depth, chain):
    """The device is at rest for each: what was in flight has ended, and the next step starts from a new packet."""
    tokens, shape = [], SHAPE._replace(pages=10, queue=REQUESTS)
    for buckets in ((), None):
        device = SimDevice(depth)
        loop = engine(device, model, depth, shape=shape, buckets=buckets, patience=2, chain=chain)
        capture, flying = device.capture, []

        def watched(key, program, buffers, capture=capture, flying=flying, loop=loop):
            flying.append(len(loop.flights))
            return capture(key, program, buffers)

        device.capture = watched
        tokens.append(drive(loop, SETTINGS))
        assert bool(flying) == (buckets is None) and not any(flying)
    assert loop.planner.preemptions
    assert len(tokens[0]) == REQUESTS - 1 and tokens[0] == tokens[1]


@pytest.mark.parametrize("beside", [False, True])
def test_a_row_that_finds_many_pages_is_replayed(model, beside):
    """More than the packet of its bucket has room for: those come before it. Two prompts take turns on one row."""
    tokens, mixed = [], graphs.ON_GPU._replace(tokens=(4, 64), stand_ins=())
    for buckets in ((), None):
        device = SimDevice(2)
        shape = SHAPE._replace(page_size=1, pages=150)
        loop = engine(device, model, mixed=mixed, shape=shape, buckets=buckets, patience=1)
        prompts = [np.arange(first, first + LONGEST - 3, dtype=np.int32) for first in (0, 40)]
        greedy, found, loads, before = SamplingParams(temperature=0.0, logprobs=1), {}, watched_loads(loop), 0
        for key in range(6):
            prompt = prompts[key % 2]
            if beside:
                loop.submit(Request(10 + key, prompt[5:9], greedy, 9, (), 4, 34))
                while not found.get(10 + key):
                    collect(loop, found)
            before = loop.counters.steps - loop.counters.graph_steps
            loop.submit(Request(key, prompt, greedy, key, (), len(prompt), LONGEST))
            while loop.has_work():
                collect(loop, found)
        if buckets is None:
            assert loop.counters.steps - loop.counters.graph_steps == before > 0 and loads[-1] > 20
        else:
            assert not any(loads), "an eager step's packet is as large as it has to be"
        tokens.append(found)
    eager, replayed = tokens
    assert eager.keys() == replayed.keys()
    for key, values in eager.items():
        assert replayed[key] == pytest.approx(values, abs=1e-4), "log-probabilities, which other pages would change"


def watched_loads(loop):
    """The page table entries that are written before steps."""
    written, program = [0], loop.launcher.program
    load = program.load

    def watch(key, at):
        written.append(key.pages)
        load(key, at)

    program.load = watch
    return written


def collect(loop, found):
    """Run a turn, and keep the log-probabilities of each request."""
    for step in loop.turn().tokens:
        if step.logprobs is not None:
            for key, _, value in zip(*(column.tolist() for column in step.logprobs[:3]), strict=True):
                found.setdefault(key, []).append(value)


def test_a_larger_graph_adds_few_tokens(model):
    """Otherwise a step runs eagerly until its bucket has a graph; and always in an engine without stand-ins."""
    alone = graphs.ON_GPU._replace(stand_ins=())
    for mixed, missed in ((graphs.ON_GPU, False), (graphs.ON_GPU._replace(filling=0), True), (alone, True)):
        device = SimDevice(1)
        loop = engine(device, model, mixed=mixed, patience=1)
        found = loop.launcher.graphs
        large, small = found.mixed_key(0, 4, 64), found.mixed_key(0, 1, 10)
        assert not found.capture((large,))
        assert (found.larger(small) is None) == missed
        assert found.larger(found.mixed_key(1, 1, 10)) is None, "it has no row that decodes"
        assert found.larger(found.mixed_key(0, 5, 10)) is None, "it has fewer prompts"
        assert found.larger(found.mixed_key(0, 1, 10, going_on=1)) is None, "each of its prompts ends"


def test_graphs_that_are_captured_at_start_hold_as_many_prompts_as_there_are_and_some_that_go_on(model):
    device = SimDevice(1)
    loop = engine(device, model, shape=SHAPE._replace(rows=20, pages=100, step_tokens=256), buckets=None)
    loop.capture()
    found = loop.launcher.graphs
    for chunks, going_on in ((1, 0), (1, 1), (20, 0), (20, 1), (36, 16)):
        assert found.larger(found.mixed_key(0, chunks, 100, going_on=going_on)) in found.stand_ins, (chunks, going_on)
    assert found.mixed_key(0, 20, 100, going_on=17) is None and found.mixed_key(0, 65, 100) is None


def test_the_larger_graph_that_adds_least_serves(model):
    for step in (1, -1):
        device = SimDevice(1)
        found = engine(device, model, patience=1).launcher.graphs
        sizes = [found.mixed_key(4, 4, 64), found.mixed_key(0, 4, 64), found.mixed_key(0, 4, 256)]
        assert not found.capture(tuple(sizes[::step]))
        assert found.larger(found.mixed_key(0, 1, 10)) == sizes[1]


def test_graphs_that_serve_other_buckets_are_kept(model, monkeypatch):
    """Nothing would ask for them again."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 13)
    device = SimDevice(1)
    loop = engine(device, model, buckets=(5,), patience=1)
    loop.capture()
    found = loop.launcher.graphs
    assert len(found.stand_ins) == 11, "those that this engine's packets hold"
    before = set(found.known)
    drive(loop, SETTINGS)
    assert before - set(found.known), "some were dropped"
    assert all(map(found.has, found.stand_ins))


@pytest.mark.parametrize("budget, most", [(200, 256), (256, 256), (300, 512), (4000, 4096), (8192, 4096)])
def test_no_graph_serves_more_than_the_budget_of_a_step(budget, most):
    assert max(wiring._mixed(CudaDevice.caps, 600_000_000, budget).stand_ins) == most


@pytest.mark.parametrize("parameters, filling", [(600_000_000, 1024), (8_000_000_000, 256), (70_000_000_000, 64)])
def test_a_larger_model_is_padded_less(parameters, filling):
    assert wiring._mixed(CudaDevice.caps, parameters, 8192).filling == filling


def test_a_capture_touches_no_row_but_the_null_row(model):
    """Its bucket may hold more tokens than the longest sequence."""
    device = SimDevice(0)
    loop = engine(device, model, buckets=None)
    tables, found = loop.launcher.executor.program.tables, loop.launcher.graphs
    for table in tables:
        table[1:] = 3
    tables.state[1:, ACTIVE], tables.state[1:, LENGTH] = 1, 2
    before = [table[1:].clone() for table in tables]
    for decode in (0, 3):
        key = found.mixed_key(decode, 2, LONGEST + 10)
        assert key is not None and key.packet.chunk_tokens > LONGEST
        assert not found.capture((key, SampleKey(key.batch.rows, key.samples, True)))
    assert len(found) == 4
    for table, kept in zip(tables, before, strict=True):
        assert torch.equal(table[1:], kept)
    assert not tables.state[0].any()


def watch_drops(found, executor):
    """Checks that graphs leave in the order in which they were last wanted, or captured; those that have left."""
    last, moments, dropped = {}, itertools.count(), []
    find, capture = found.find, executor.capture

    def find_and_note(keys):
        last.update({key: next(moments) for key in keys})
        return find(keys)

    def check_and_capture(order):
        kept = executor.graphs.keys() - set(order.drop)
        assert all(last[gone] < last[stays] for gone in order.drop for stays in kept)
        dropped.extend(order.drop)
        last.update({key: next(moments) for key in order.capture})
        return capture(order)

    found.find, executor.capture = find_and_note, check_and_capture
    return dropped


def test_there_is_a_most_of_graphs_and_the_longest_unused_go(model, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 6)
    device = SimDevice(1)
    loop = engine(device, model, patience=1)
    found, executor = loop.launcher.graphs, loop.launcher.executor
    dropped = watch_drops(found, executor)
    tokens = drive(loop, SETTINGS)
    assert len(dropped) > 20 and len({type(key) for key in dropped}) > 2
    assert len(found) == len(executor.graphs) <= 6 and loop.counters.graph_misses > 20
    assert {key for key, captured in found.known.items() if captured} == set(executor.graphs)
    eager = engine(SimDevice(1), model, buckets=())
    assert tokens == drive(eager, SETTINGS)
