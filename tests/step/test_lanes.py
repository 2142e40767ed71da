"""What one row asks for costs its own lane: every step of its batch stays a replay, and its neighbours' tokens stay."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from direct import Varied
from harness import VOCAB, Job, capture_all, capturing_cpu, checksum_loop, run
from sharpest import sharpest
from step_harness import request

from gapless.kernels import native
from gapless.loop.spec import Sizes
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.step.keys import ForwardKey
from gapless.step.listing import Lanes, filled
from gapless.testing.sim import SimDevice

ASKS = {
    "logprobs": {"logprobs": 0},
    "many logprobs": {"logprobs": 20, "temperature": 0.7},
    "top-p": {"top_p": 0.9, "temperature": 0.7},
    "top-k": {"top_k": 5, "temperature": 0.7},
    "min-p": {"min_p": 0.1, "temperature": 0.7},
    "min_tokens": {"min_tokens": 9},
    "stop ids": {},
    "everything": {"logprobs": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "min_tokens": 3, "temperature": 1.1},
}


def device_of(kind):
    if kind != "cpu":
        return SimDevice(1, "eager", maps_host=kind == "mapped")
    return capturing_cpu()


def batch(rows, asks):
    """One row that asks, among greedy ones."""
    for key in range(rows):
        params = {"temperature": 0.0, **(asks if key == rows // 2 else {})}
        stops = (3, 4) if key == rows // 2 else ()
        yield request(
            key=key, tokens=(key % VOCAB, 7), max_len=24, seed=key, stop_ids=stops,
            min_len=2 + params.get("min_tokens", 0), **params,
        )  # fmt: skip


def kernels_of(asks):
    """Plain PyTorch where a row asks for everything; the C++ operations elsewhere take a quarter of the time."""
    return None if asks is ASKS["everything"] else native.load()


def tokens_of(rows, asks, kind="sim", **options):
    device = device_of(kind)
    shape = Sizes(rows, 32, 1 + rows * 4, 8, 4 * rows, queue=rows)
    loop = checksum_loop(device, shape, options.pop("depth", 2), Varied, kernels=kernels_of(asks), **options)
    if loop.launcher.graphs.buckets:
        capture_all(loop)
    jobs = [Job(item, 0, None) for item in batch(rows, asks)]
    run(loop, jobs, check=False)
    device.close()
    return [job.tokens for job in jobs], loop.counters


@functools.cache
def eager_tokens(asks):
    return tokens_of(8, ASKS[asks], "sim", depth=1, buckets=())[0]


@functools.cache
def tokens_without_asks(kind):
    return tokens_of(8, {}, kind, buckets=(1, 4, 8))


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("kind", sharpest(["sim", "mapped", "cpu"]))
def test_all_steps_are_replays_whatever_one_row_asks_for(asks, kind):
    tokens, counters = tokens_of(8, ASKS[asks], kind, buckets=(1, 4, 8))
    plain, alone = tokens_without_asks(kind)
    assert tokens == eager_tokens(asks) and [*tokens[:4], *tokens[5:]] == [*plain[:4], *plain[5:]]
    # Prompts run eagerly here, and in one step.
    assert counters.graph_misses == 0 and counters.graph_steps == counters.steps - 1
    assert counters.steps <= alone.steps + 1 and counters.graph_steps >= 20


@pytest.mark.parametrize("rows", sharpest([32, 256]))
def test_steps_of_many_rows_are_replays_whatever_they_ask_for(rows):
    for asks in ("logprobs", "everything"):
        _, counters = tokens_of(rows, ASKS[asks], buckets=(rows,))
        assert (counters.graph_misses, counters.graph_steps) == (0, counters.steps - 1)


@pytest.mark.parametrize("asks", ASKS)
def test_the_lanes_of_one_row_are_captured_at_start(asks):
    device, later = SimDevice(1, "eager"), []
    loop = checksum_loop(device, Sizes(8, 32, 33, 8, 32, 8), 2, Varied, patience=1, kernels=kernels_of(ASKS[asks]))
    loop.capture()
    capture = device.capture
    device.capture = lambda key, *rest: (later.append(key), capture(key, *rest))[1]
    run(loop, [Job(item, 0, None) for item in batch(8, ASKS[asks])], check=False)
    assert later and {type(key) for key in later} == {ForwardKey}, "forwards have bounds here, and come when missed"


def scored(chain, buckets):
    loop = checksum_loop(SimDevice(1, "lazy"), Sizes(4, 32, 17, 8, 32, 8), 1, Varied, chain=chain, buckets=buckets)
    if buckets:
        capture_all(loop)
    for item in batch(4, ASKS["everything"]):
        loop.submit(item)
    found = []
    while loop.has_work():
        for settled in loop.turn().tokens:
            if settled.logprobs is not None:
                found += zip(*(column.tolist() for column in settled.logprobs), strict=True)
    return found, loop.counters


def test_a_chain_scores_every_step_of_it():
    alone, _ = scored(1, ())
    chained, counters = scored(4, (4,))
    assert counters.chained_steps > 8 and counters.graph_misses == 0
    assert chained == alone and len(alone) > 5
    assert [line[1] for line in alone] == list(range(2, 2 + len(alone))), "one line a token, in order"


def test_a_list_is_filled_up_with_its_last_entry():
    lanes = Lanes(RowTable(40, 16, Ledger()))
    assert [lanes.size(count) for count in (1, 2, 4, 5, 17, 40)] == [1, 4, 4, 16, 40, 40]
    assert filled((3, 9), 4).tolist() == [3, 9, 9, 9] and filled((3,), 1).tolist() == [3]


def test_a_list_is_in_front_of_the_packet_and_travels_when_there_is_one():
    loop = checksum_loop(SimDevice(0, "eager"), Sizes(20, 32, 90, 8, 64, 32), 1, Varied, buckets=())
    executor, sizes = loop.launcher.executor, []
    upload = loop.device.compute.upload
    loop.device.compute.upload = lambda dst, src: (sizes.append(len(dst)), upload(dst, src))[1]
    jobs = [Job(request(key=key, tokens=(key, 2), max_len=6, temperature=0.0, **asks), 0, None) for key, asks in
            enumerate(({}, {"logprobs": 1}))]  # fmt: skip
    run(loop, jobs[:1])
    steady = sizes[-1]
    run(loop, jobs[1:])
    assert sizes[-1] == steady + 2 * executor.layout.size == steady + 64, "its list, and the one behind it"
    assert np.array_equal(executor.buffers.lists[-2][0][:1].numpy(), [0])
