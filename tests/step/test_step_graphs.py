"""Captured steps: what fills a bucket up is inert, a replay gives an eager step's tokens, and what is missed comes."""

from __future__ import annotations

import itertools
import json
from math import inf

import numpy as np
import pytest
import torch
from grouped_model import GroupedModel
from harness import VOCAB, Job, WaryModel, capture_all, check_at_rest, look_behind_steps, run
from sharpest import sharpest
from simulation.programs import PROGRAMS
from step_harness import request
from tiny_models import tiny_config

from gapless.base.config import EngineConfig
from gapless.base.errors import CaptureError, DeviceError
from gapless.base.records import Flag, PageWrite, StepPlan
from gapless.device import CpuDevice, cpu_native
from gapless.kernels import native
from gapless.kernels.choose import choose
from gapless.kernels.layout import HEADER_WORDS
from gapless.loop.spec import Sizes
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.model.loader import load_model
from gapless.step.graphs import (
    BUCKETS,
    MISSES_BEFORE_CAPTURE,
    ON_GPU,
    GraphShapes,
    StepGraphs,
    bucket_key,
    buckets_up_to,
)
from gapless.step.keys import ForwardKey, SampleKey
from gapless.step.lanes.cut import CutKey
from gapless.step.packet import Packer, PacketShape
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

ROWS = 8
SHAPE = Sizes(rows=ROWS, max_len=40, pages=90, page_size=4, step_tokens=64, queue=64)
TINY = tiny_config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    eos_token_id=1,
)


def device_of(kind):
    device = SimDevice(5, maps_host=kind == "mapped") if kind in ("sim", "mapped") else CpuDevice(threads=1)
    if not device.caps.captures:
        device.close()
        pytest.skip(f"no native streams: {cpu_native.reason()}")
    return device


def of_every_size(*temperatures):
    """Requests that end one after another, so that steps of all numbers of rows run."""
    for key in range(ROWS):
        temperature = temperatures[key % len(temperatures)]
        yield request(
            key=key, tokens=range(key + 3, 2 * key + 5), temperature=temperature, seed=key << 40, max_len=40 - 2 * key
        )


# Buckets.


def test_a_bucket_is_at_most_twice_its_rows():
    for most in (1, 2, 5, 64, 100, 3000):
        buckets = buckets_up_to(most)
        assert buckets[-1] == most == max(buckets) and list(buckets) == sorted(set(buckets))
        for rows in range(1, min(most, BUCKETS[-1]) + 1):
            assert next(bucket for bucket in buckets if bucket >= rows) < 2 * rows or rows == 1


def test_a_shape_wider_than_its_plan_is_filled_up_with_nobody():
    """Whatever lay in the slot before: null rows, and page writes that give the null row its null page."""
    packer, words = Packer(RowTable(6, 24, Ledger()), 6), np.full(99, -99, np.int32)
    shape = PacketShape(5, 5, 0, 0, 0)
    packer.write(StepPlan(7, (4, 2), (), (), (PageWrite(2, 3, 11),), 24), shape, [], words[: shape.words], 1)
    assert words[:HEADER_WORDS].tolist() == [7, 1]
    assert words[HEADER_WORDS:][:5].tolist() == [4, 2, 0, 0, 0]
    assert words[HEADER_WORDS + 5 :][:10].tolist() == [2 * 6 + 3, 11, *[0] * 8]
    assert (words[shape.words :] == -99).all()


@pytest.mark.parametrize("kind", ["sim", "mapped", "cpu"])
def test_lines_of_null_rows_are_inert_and_nobody_reads_them(kind):
    device = device_of(kind)
    loop = loop_of(device, WaryModel(VOCAB, SHAPE.max_len), SHAPE, 2, buckets=(ROWS,))
    capture_all(loop)
    launcher, read, executor = loop.launcher, loop.launcher.read, loop.launcher.executor
    sizes = set()

    def read_beside_liars(flight):
        if flight.decision.captured:
            sizes.add(flight.decision.samples)
            published, home = (
                words[: 4 * (1 + ROWS)].reshape(-1, 4)[1 + flight.decision.samples :]
                for words in (executor.buffers.lines[flight.outbox.index].numpy(), flight.outbox.array.view(np.int32))
            )
            assert published.tolist() == [[0, 0, int(Flag.INERT), -1]] * (ROWS - flight.decision.samples)
            home[:] = (1, 1, int(Flag.LIVE), 5)  # row 1 in its first generation goes on with token 5
        return read(flight)

    launcher.read = read_beside_liars
    jobs = [Job(item, 0, None) for item in of_every_size(0.0)]
    run(loop, jobs, check=False)
    assert [job.tokens for job in jobs] == [job.expected() for job in jobs]
    assert sizes == set(range(1, ROWS + 1))
    tables = executor.program.tables
    assert not tables.state[0].any() and not tables.pages[0].any()
    device.close()


# A replay is its step.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    return str(directory)


def graph_loop(kind, model, folder, depth, buckets):
    """A loop over the checksum model, or over a dense one of that dtype with the device's own kernels."""
    device, kernels = device_of(kind), None
    if model == "checksum":
        made = WaryModel(VOCAB, SHAPE.max_len)
    else:
        kernels = choose(device.caps.kernels, getattr(torch, model))
        if model == "bfloat16" and kernels.name != "native":
            pytest.skip("torch's own products in bfloat16 depend on the number of rows")
        config = EngineConfig(model=folder, load_format="dummy", dtype=model, max_model_len=SHAPE.max_len, seed=3)
        made = load_model(config, device.torch_device, kernels)
        made.embedding.mul_(0.1)  # so that more than the last token decides
    loop = loop_of(device, made, SHAPE, depth, kernels=kernels, buckets=buckets, patience=1000)
    capture_all(loop)
    return look_behind_steps(loop, made)


@pytest.mark.parametrize("greedy", sharpest([False, True]))
@pytest.mark.parametrize(
    "kind, model", [("sim", "checksum"), *(("cpu", m) for m in ("checksum", "float32", "bfloat16"))]
)
def test_tokens_are_those_of_eager_steps_for_every_number_of_rows(kind, model, greedy, folder):
    temperatures = (0.0,) if greedy else (0.0, 0.9)
    told = []
    # Eager, with a graph for every number of rows, and all in one bucket.
    for depth, buckets in ((1, ()), (4, None), (1, (ROWS,)), (4, (ROWS,))):
        loop = graph_loop(kind, model, folder, depth, buckets)
        jobs = [Job(item, 0, None) for item in of_every_size(*temperatures)]
        run(loop, jobs, check=False)
        check_at_rest(loop)
        told.append([job.tokens for job in jobs])
        decode = [record.decode_rows for record in loop.records if record.decode_rows]
        assert set(decode) == set(range(1, ROWS + 1))
        pure = sum(not record.chunk_tokens for record in loop.records)
        assert (loop.counters.graph_steps, loop.counters.graph_misses) == (0 if buckets == () else pure, 0)
        loop.device.close()
    assert told[1:] == told[:1] * 3
    assert len({token for tokens in told[0] for token in tokens}) > 20, "the model says always the same"


# What is missed.

WIDE = SHAPE._replace(page_size=64, pages=20)
"""All lengths lie in one page: one graph for each number of rows."""


def test_a_graph_is_captured_after_enough_misses_and_when_nothing_is_in_flight():
    device = SimDevice(1, mood="lazy")
    loop = look_behind_steps(loop_of(device, model := WaryModel(VOCAB, 40), WIDE, 4, patience=3), model)
    capture, seen = device.capture, []

    def watched(key, program, buffers):
        seen.append(key)
        assert not loop.flights
        return capture(key, program, buffers)

    device.capture = watched
    jobs = [Job(request(tokens=(5, 6, 7), temperature=0.0, max_len=40), 0, None)]
    run(loop, jobs)
    assert jobs[0].tokens == jobs[0].expected() and seen == [bucket_key(1, 64), SampleKey(1, 1, False)]
    assert [record.missed for record in loop.records] == [False] + [True] * 3 + [False] * 33
    counters = loop.counters
    assert (counters.graph_misses, counters.graph_steps) == (3, 33) and counters.declined_capture > 0


def test_at_rest_what_was_missed_is_captured_one_program_a_turn():
    device = SimDevice(1)
    loop = loop_of(device, WaryModel(VOCAB, 40), WIDE, 2, patience=16)
    jobs = [Job(request(key=key, tokens=(5, 6, 7), temperature=0.0, max_len=10), 0, None) for key in range(2)]
    run(loop, jobs[:1])
    assert loop.counters.graph_misses == 6 and not loop.has_work()
    for captured in (1, 2):
        assert loop.rest() and loop.has_work()
        assert not loop.turn().tokens and len(loop.launcher.graphs) == captured and not loop.has_work()
    assert not loop.rest() and not loop.has_work()
    run(loop, jobs[1:])
    assert jobs[1].tokens == jobs[1].expected() == jobs[0].tokens
    assert (loop.counters.graph_misses, loop.counters.graph_steps) == (6, 6)


def test_a_refused_capture_is_logged_once_and_runs_eagerly(monkeypatch, caplog):
    device = SimDevice(1)
    loop = loop_of(device, WaryModel(VOCAB, 40), WIDE, 2, patience=2)
    tried = []

    def refuse(key, program, buffers):
        tried.append(key)
        raise CaptureError("planted")

    monkeypatch.setattr(device, "capture", refuse)
    jobs = [Job(request(tokens=(5, 6, 7), temperature=0.0, max_len=40), 0, None)]
    run(loop, jobs)
    (told,) = [record for record in caplog.records if "runs eagerly" in record.message]
    assert "planted" in str(told.exc_info[1])
    assert jobs[0].tokens == jobs[0].expected() and not len(loop.launcher.graphs)
    assert len(set(tried)) == len(tried) == 2, "each once"
    counters = loop.counters
    assert (counters.graph_misses, counters.graph_steps, counters.captures_refused) == (36, 0, 2)


def test_a_device_that_fails_before_a_capture_fails_the_turn():
    device = SimDevice(1)
    loop = loop_of(device, WaryModel(VOCAB, 40), WIDE, 2, patience=2)
    loop.submit(request(tokens=(5, 6, 7), temperature=0.0, max_len=40))
    while not (loop.launcher.graphs.due and not loop.in_flight):
        loop.turn()
    device.fail(RuntimeError("it fell off the bus"))
    with pytest.raises(DeviceError, match="fell off the bus"):
        loop.turn()
    assert not len(loop.launcher.graphs)


def three_rows(buckets):
    """A loop that has run three requests at once, and one whose prompt is scored; the first is their only decode."""
    loop = loop_of(SimDevice(2), WaryModel(VOCAB, 40), WIDE, 1, buckets=buckets, patience=1)
    asks = [request(key=key, tokens=(5, key), temperature=0.0, max_len=9) for key in range(3)]
    run(loop, [Job(item, 0, None) for item in asks])
    run(loop, [Job(request(key=9, tokens=range(5, 13), temperature=0.0, max_len=9, prompt_logprobs=1), 0, None)])
    return loop


def test_steps_that_exceed_every_bucket_are_misses():
    """There is nothing to capture for them. Steps with chunks have no graphs in this engine, and miss none."""
    loop = three_rows(buckets=(1, 2))
    assert [record.missed for record in loop.records] == [not record.chunk_tokens for record in loop.records]
    assert (loop.counters.graph_misses, loop.counters.graph_steps, len(loop.launcher.graphs)) == (6, 0, 0)
    assert loop.counters.steps == 8


def test_an_engine_without_graphs_misses_none():
    assert three_rows(buckets=()).counters.graph_misses == 0


def test_the_buckets_of_an_engine_are_those_of_its_rows():
    assert loop_of(SimDevice(2), WaryModel(VOCAB, 40), WIDE).launcher.graphs.buckets == (1, 2, 3, 4, 6, 8)
    assert MISSES_BEFORE_CAPTURE > 1


# A start on a slow processor.


class SlowCaptures:
    """Captures that take `row_seconds` for each row of a forward, and no time for anything else."""

    def __init__(self, row_seconds, rows=64, mixed=None):
        self.row_seconds, self.now, self.rows = row_seconds, 0.0, []
        self.graphs = StepGraphs(GraphShapes(buckets_up_to(rows), mixed, False, 16, 1 << 20, 1, 1), self.capture, 2)

    def capture(self, order):
        for key in order.capture:
            if isinstance(key, ForwardKey):
                self.rows.append(key.samples)
                self.now += key.samples * self.row_seconds
        return [True] * len(order.capture)

    def warm(self, seconds, further=0.0):
        self.graphs.warm(seconds, further, lambda: self.now)


@pytest.mark.parametrize(
    ("row_seconds", "seconds", "rows"),
    [
        (0.01, 2.0, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]),
        (0.1, 2.0, [1, 2, 3, 4, 6]),
        (9.0, 2.0, [1]),
        (0.0, 2.0, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        (9.0, inf, [64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]),
    ],
)
def test_a_start_with_bounded_time_captures_the_smallest_forwards_that_fit(row_seconds, seconds, rows):
    slow = SlowCaptures(row_seconds)
    slow.warm(seconds)
    assert slow.rows == rows
    assert slow.now <= max(seconds, row_seconds), "but for one row, without which nothing would be learnt"
    likely = [key for key in slow.graphs.likely() if not isinstance(key, ForwardKey)]
    assert all(map(slow.graphs.has, likely)), "what is small in every model"


def test_a_forward_for_which_a_start_had_no_time_is_captured_when_it_is_missed():
    slow = SlowCaptures(0.1)
    slow.warm(2.0)
    key = slow.graphs.decode_key(60, 1)
    assert not slow.graphs.find((key,)) and not slow.graphs.due
    assert slow.graphs.rest()
    slow.graphs.capture_due()
    assert slow.rows[-1] == 64 and slow.graphs.find((key,)) and not slow.graphs.rest()


@pytest.mark.parametrize(
    ("rows", "order"), [(256, [64, 256, 16]), (512, [64, 256, 512, 16]), (100, [64, 100, 16]), (20, [20, 16]), (3, [3])]
)
def test_stand_ins_come_in_the_order_of_their_use(rows, order):
    """Beside all rows, and few or many; short prompts first."""
    graphs = SlowCaptures(0.0, rows, ON_GPU).graphs
    sizes = [(key.batch.decode, key.packet.chunk_tokens) for key in graphs.stand_ins if isinstance(key, ForwardKey)]
    assert sizes == [(decode, tokens) for decode in order for tokens in ON_GPU.tokens]
    assert len(set(graphs.stand_ins)) == len(graphs.stand_ins)
    likely = graphs.likely()
    assert {SampleKey(key.packet.rows, key.samples, True) for key in likely if key in graphs.stand_ins and
            isinstance(key, ForwardKey)} <= set(likely)  # fmt: skip


def test_every_bucket_with_chunks_has_a_stand_in_that_pads_rows_and_chunks_alone():
    graphs = SlowCaptures(0.0, 512, ON_GPU._replace(filling=256)).graphs
    graphs.warm()
    for decode, ending, going_on, tokens in itertools.product(graphs.beside, (0, 1, 64), (0, 1, 16), ON_GPU.tokens):
        if ending + going_on and (key := graphs.mixed_key(decode, ending + going_on, tokens, going_on=going_on)):
            larger = graphs.larger(key)
            assert larger in graphs.stand_ins and larger.packet.chunk_tokens == tokens
            assert decode <= larger.batch.decode <= max(4 * decode, 16)


def test_stand_ins_for_which_a_start_had_no_time_are_captured_at_rest_after_what_was_missed():
    slow = SlowCaptures(0.01, 256, ON_GPU)
    graphs = slow.graphs
    slow.warm(inf, 12.0)
    captured = [graphs.has(key) for key in graphs.stand_ins]
    first = captured.index(False)
    assert first > 5 and not any(captured[first:]), "as many as there is time for"
    other = SampleKey(7, 7, True)
    assert not graphs.find((other,)) and not graphs.due and graphs.rest() and graphs.due
    graphs.capture_due()
    assert graphs.has(other) and not graphs.has(graphs.stand_ins[first])
    turns = 0
    while graphs.rest():
        graphs.capture_due()
        turns += 1
        assert graphs.has(graphs.stand_ins[min(first + turns - 1, len(captured) - 1)])
    assert all(map(graphs.has, graphs.stand_ins)) and turns > len(captured) - first, "and lanes of many rows"
    wide = {key.rows for key in graphs.known if isinstance(key, CutKey)}
    assert wide == {1, 4, 16, 64, 256}


# Rows that begin several pages in a step.


def steps_of(model, step, page_size, buckets, chain=None):
    """Tokens of eight rows that run alike, and the counters."""
    shape = SHAPE._replace(page_size=page_size, pages=1 + ROWS * (SHAPE.max_len // page_size + 6))
    loop = loop_of(
        SimDevice(1, "eager"), model(VOCAB, SHAPE.max_len), shape, 2, program=PROGRAMS[step], buckets=buckets,
        chain=chain, kernels=None if page_size == 1 else native.load()
    )  # fmt: skip
    if buckets:
        capture_all(loop)
    jobs = [Job(request(key=key, tokens=(key, 7), temperature=0.0, max_len=36), 0, None) for key in range(ROWS)]
    run(loop, jobs, check=False)
    check_at_rest(loop)
    return [job.tokens for job in jobs], loop.counters


@pytest.mark.parametrize("model", [WaryModel, GroupedModel])
@pytest.mark.parametrize("step, page_size", sharpest([("several", 2), ("one", 2), ("several", 1), ("several", 4)]))
def test_rows_that_begin_several_pages_are_replayed(model, step, page_size):
    """In several groups, or for several tokens: a bucket has page writes for all of them."""
    told, counters = steps_of(model, step, page_size, (ROWS,))
    assert (counters.graph_misses, counters.graph_steps) == (0, counters.steps - 1), "all but the step of the prompts"
    assert told == steps_of(model, step, page_size, ())[0]


def test_chains_are_as_long_with_two_page_groups_as_with_one():
    one, two = (steps_of(model, "one", 2, (ROWS,), chain=4)[1].chained_steps for model in (WaryModel, GroupedModel))
    assert one == two > 15


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_bucket_has_page_writes_for_all_of_its_tokens(width):
    """Rows that each get `width` tokens beside chunks that begin wherever they like."""
    program = type("Program", (PROGRAMS["several"],), {"width": width})
    for size in (1, 2, 3, 4, 8, 16):
        shape = Sizes(rows=64, max_len=64, pages=600, page_size=size, step_tokens=1024, queue=64)
        shapes = loop_of(SimDevice(0), GroupedModel(VOCAB, 64), shape, program=program).launcher.graphs.shapes
        graphs = StepGraphs(shapes._replace(mixed=ON_GPU), lambda order: [], 1)
        for chunk in range(1, 40):
            key = graphs.mixed_key(5, 16, 16 * chunk)
            begun = 5 * -(-width // size) + 16 * -(-(chunk + width - 1) // size)
            assert key is not None and key.packet.page_writes >= 2 * begun
