"""EngineCore on a tiny model with random weights: depth, sizes, numbers, the end."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grouped_model import GroupedModel
from harness import tokens_of
from sharpest import sharpest
from tiny_models import tiny_config

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError, EngineDeadError, EngineError, StalledError
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.base.structured import StructuredOutputs
from gapless.device import CpuDevice, CudaDevice
from gapless.engine.sizing import GRAPH_BYTES, SLOT_BYTES, choose_sizes
from gapless.engine.warm_up import WARM_UP_KEY
from gapless.engine.wiring import build_core
from gapless.kernels.tables import Tables, slot_bytes
from gapless.memory.groups import PageGroup
from gapless.model.config import load_config
from gapless.model.spec import ModelSizes
from gapless.step.graphs import buckets_up_to
from gapless.testing.sim import SimDevice

TINY = tiny_config(vocab_size=211, intermediate_size=48, head_dim=8, max_position_embeddings=96, eos_token_id=1)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def config(directory, **fields):
    settings = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 20}
    return EngineConfig(model=directory, **{**settings, "num_gpu_blocks_override": 9, **fields})


def requests(temperature):
    """Twelve prompts, some with a common front, more than the pages can hold at once."""
    rng = np.random.default_rng(0)
    front = rng.integers(2, 200, 20)
    for key in range(12):
        prompt = rng.integers(2, 200, int(rng.integers(1, 40)))
        prompt = np.concatenate([front, prompt]) if key % 3 == 0 else prompt
        settings = {"top_k": (0, 8)[key % 2], "top_p": (1.0, 0.9, 0.9)[key % 3], "min_p": (0.0, 0.02)[key % 2]}
        params = SamplingParams(temperature=temperature, max_tokens=None, min_tokens=key % 5, **settings)
        length = len(prompt)
        yield Request(key, prompt.astype(np.int32), params, key * 7919, (1, 2, 3, 4), length + key % 5, length + 30)


def drive(core, items):
    for item in items:
        core.submit(item)
    return tokens_of(core)


@pytest.mark.parametrize(("temperature", "depth"), sharpest([*product((0.9, 0.0), ("4", "2", "8", "auto"))]))
def test_tokens_are_the_same_at_every_depth(directory, temperature, depth):
    found = []
    for one in ("1", depth):
        core = build_core(config(directory, depth=one))
        found.append(drive(core, requests(temperature)))
        assert core.stats().queue.preemptions, "the pool was meant to be too small"
        core.close()
    assert found[0] == found[1]
    assert len({tuple(t) for t in found[0].values()}) > 8 and sum(map(len, found[0].values())) > 100


@pytest.mark.parametrize("tokens", [0, 100])
def test_measured_times_bound_chunks_unless_a_token_budget_was_chosen(directory, tokens):
    core = build_core(config(directory, max_num_batched_tokens=tokens, num_gpu_blocks_override=60))
    assert (core.loop.planner.limits.chunk_limit is None) == bool(tokens)
    core.close()


def test_a_very_small_model_replays_short_prompts_that_come_alone(directory, monkeypatch, captures_all):
    core = build_core(config(directory, max_num_batched_tokens=200, num_gpu_blocks_override=60))
    missed = []
    greedy = SamplingParams(temperature=0.0, max_tokens=None)
    for key, lengths in enumerate([(5,), (7,), (9,), (16,), (1,), (6, 6)]):
        items = [
            Request(2 * key + k, np.arange(n, dtype=np.int32), greedy, 0, (), 0, n + 2) for k, n in enumerate(lengths)
        ]
        drive(core, items)
        missed.append(core.stats().steps.graph_misses)
        while core.rest():
            core.step()
    # 5 and 7 share a graph, as do 9 and 16; two prompts at once have none to miss.
    assert missed == ([1, 1, 2, 2, 2, 2] if core.loop.device.caps.captures else [0] * 6)
    core.close()


@pytest.mark.seeds
def test_parameters_of_a_request_reach_the_sampler(directory):
    core = build_core(config(directory, depth="4"))
    greedy, hot = drive(core, requests(0.0)), drive(core, requests(0.9))
    other = drive(core, [item._replace(seed=item.seed + 1) for item in requests(0.9)])
    core.close()
    assert all(hot[key] != greedy[key] != other[key] != hot[key] for key in range(12) if len(hot[key]) > 5)
    assert [len(tokens) for tokens in hot.values()].count(30) >= 3


def test_warm_up_leaves_no_trace(directory):
    core = build_core(config(directory, block_size=2, num_gpu_blocks_override=84), SimDevice(3))
    stats = core.stats()
    assert (
        stats.steps.steps
        == stats.steps.prompt_tokens
        == stats.steps.generation_tokens
        == stats.steps.prefix_queries
        == 0
    )
    assert (stats.pages.free, stats.pages.total) == (83, 83) and not list(core.loop.records) and not core.has_work()
    assert WARM_UP_KEY < 0
    core.close()


@pytest.mark.parametrize(
    ("fields", "buckets"),
    sharpest([({"max_cudagraph_capture_size": 2}, (1, 2)), ({}, (1, 2, 3, 4)), ({"enforce_eager": True}, ())]),
)
def test_the_configuration_says_which_steps_are_captured(directory, monkeypatch, captures_all, fields, buckets):
    monkeypatch.setattr("gapless.engine.wiring.TINY_MODEL", 0)  # only steps without chunks
    core = build_core(config(directory, **fields))
    if not core.loop.device.caps.captures:
        buckets = ()
    assert core.loop.launcher.graphs.buckets == buckets
    drive(core, requests(0.0))
    stats = core.stats()
    rows = [record.decode_rows for record in core.loop.records if not record.chunk_tokens]
    assert max(rows) == 4
    assert stats.steps.graph_steps + stats.steps.graph_misses == (len(rows) if buckets else 0)
    assert stats.steps.graph_steps <= sum(count <= max(buckets, default=0) for count in rows)
    assert (stats.steps.graph_steps > 0) == bool(buckets)
    core.close()


def test_counters_and_the_page_map_add_up_after_all_requests(directory):
    core = build_core(config(directory, num_gpu_blocks_override=60, enforce_eager=True), SimDevice(3))
    tokens = drive(core, [*requests(0.0)][:6])
    stats, records, pages = core.stats(), list(core.loop.records), core.page_map()
    assert stats.steps.generation_tokens == sum(map(len, tokens.values()))
    assert stats.steps.prefix_queries == stats.steps.prompt_tokens + stats.steps.prefix_hits, (
        "every prompt token is found or computed"
    )
    assert (stats.queue.running, stats.queue.waiting, stats.queue.in_flight) == (0, 0, 0)
    assert stats.steps.steps == len(records) and stats.steps.dropped_identity == stats.queue.preemptions == 0
    assert len(pages) == stats.pages.total == 59
    counts = {letter: pages.count(letter.encode()) for letter in "fcox"}
    assert counts == {"f": stats.pages.free, "c": stats.pages.cached, "o": 0, "x": 0}
    assert (stats.pages.owned, stats.pages.fenced, stats.pages.free + stats.pages.cached) == (0, 0, 59)
    assert [*core.steps_after(0)] == records and [*core.steps_after(records[-1].step)] == []
    assert [*core.steps_after(records[4].step)] == records[5:]
    assert [*core.steps_after(0, records[7].committed_at)] == records[7:]
    core.close()


def test_pages_add_up_after_every_step_and_times_at_the_end(directory):
    device = SimDevice(3)
    core = build_core(config(directory, depth="4"), device)
    core.stats()
    begin = device.host_now
    for item in requests(0.0):
        core.submit(item)
    while core.has_work():
        core.step()
        stats = core.stats()
        parts = (stats.pages.free, stats.pages.cached, stats.pages.owned, stats.pages.fenced)
        assert sum(parts) == stats.pages.total and min(parts) >= 0
        assert core.page_map().count(b"o") == stats.pages.owned
    assert stats.device.wall_ns == stats.device.busy_ns + sum(stats.device.idle_ns.values())
    assert abs(stats.device.wall_ns - (device.host_now - begin)) < 0.01 * stats.device.wall_ns
    assert min(stats.device.busy_ns, stats.host_ns.copy) > 0 and stats.device.idle_ns["grammar"] == 0
    assert (
        stats.steps.steps == stats.sizes.decode + stats.sizes.prefill + stats.sizes.mixed == sum(stats.sizes.by_tokens)
    )
    assert stats.sizes.tokens == sum(record.decode_rows + record.chunk_tokens for record in core.loop.records)
    prompts = sum(len(item.tokens) for item in requests(0.0))
    assert stats.steps.admitted_tokens == prompts < stats.steps.prefix_queries, "some were preempted and computed again"
    assert stats.queue.preemptions and stats.queue.depth >= 1
    core.close()


@pytest.mark.seeds
def test_pages_of_all_groups_are_forgotten_after_warm_up_counted_and_mapped(directory, monkeypatch):
    made = GroupedModel(211, 96)
    made.config = load_config(EngineConfig(model=str(directory)))
    monkeypatch.setattr("gapless.engine.wiring.load_model", lambda *args: made)
    core = build_core(config(directory, block_size=4, num_gpu_blocks_override=40), SimDevice(7))
    full, window = core.loop.pools
    assert core.stats().pages.total == 78 and core.page_map() == b"f" * 78, "no page of the warm-up is indexed"
    drive(core, requests(0.0))
    assert window.counts().cached and full.counts() != window.counts()
    stats, pages = core.stats(), core.page_map()
    assert stats.pages.cached == full.counts().cached + window.counts().cached == pages.count(b"c")
    assert pages == full.page_map() + window.page_map()
    core.close()


def test_the_facts_about_an_engine_are_those_of_its_config(directory):
    core = build_core(config(directory, max_model_len=50, block_size=8), SimDevice(0))
    info = core.info
    assert (info.vocab_size, info.max_model_len, info.max_num_seqs, info.max_num_batched_tokens) == (211, 50, 4, 20)
    assert (info.pages, info.page_size, info.dtype, info.device) == (9, 8, "float32", "sim")
    layer = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48
    assert info.parameters == pytest.approx(211 * 32 + 2 * layer, rel=0.03)
    assert [what for what, _ in info.startup_seconds] == ["device", "weights", "memory", "warm-up", "graphs"]
    core.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_batched_tokens": 3}, ["max_num_batched_tokens (3)", "max_num_seqs (4)"]),
        ({"max_model_len": 64, "num_gpu_blocks_override": 4}, ["max_model_len is 64", "48 tokens", "lower --max"]),
        ({"num_gpu_blocks_override": 1}, ["0 tokens", "--num-gpu-blocks-override"]),
        ({"kv_cache_memory_bytes": 5, "num_gpu_blocks_override": None}, ["0 tokens", "--kv-cache-memory-bytes"]),
        ({"max_model_len": 97}, ["max_model_len", "97", "96"]),
        ({"max_model_len": 1}, ["max_model_len", "at least 2"]),
        ({"num_gpu_blocks_override": 2, "block_size": 1}, ["max_model_len", "at least 2"]),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_mend(directory, fields, words):
    device = SimDevice(0)
    with pytest.raises(ConfigError) as caught:
        build_core(config(directory, **fields), device)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert device.fault.error is not None, "a device that was not used is closed"


def test_the_context_shrinks_to_the_memory_when_none_is_asked_for(directory):
    core = build_core(config(directory, num_gpu_blocks_override=3, enforce_eager=True), SimDevice(0))
    assert core.info.max_model_len == 32
    core.close()
    core = build_core(config(directory, num_gpu_blocks_override=None, enforce_eager=True), SimDevice(0))
    assert (core.info.max_model_len, core.info.pages) == (96, 4 * 6 + 1), "no more than the rows can ever use"
    core.close()


def model_of(token_bytes, vocab, shape, dtype):
    """As much of a model as its memory takes; `shape`: its layers, and their middle and hidden sizes."""
    layers, middle, hidden = shape
    return SimpleNamespace(
        page_bytes=lambda size: size * token_bytes, vocab_size=vocab, dtype=dtype, groups=lambda: (PageGroup(),),
        config=SimpleNamespace(sizes=ModelSizes(hidden, layers, 0, max(4 * middle, 8 * hidden), 0)), spare_layers=0,
    )  # fmt: skip


def tables_for(sizes):
    return Tables.new(sizes.rows, sizes.max_len, -(-sizes.max_len // sizes.page_size), torch.device("meta"))


def test_the_memory_of_a_gpu_covers_the_tables_too():
    total, model = 1 << 30, model_of(1024, 211, (2, 48, 32), torch.float16)
    device = SimpleNamespace(caps=CudaDevice.caps, memory=lambda: (total, total))
    long = SimpleNamespace(max_position_embeddings=100_000)
    sizes = choose_sizes(EngineConfig(enforce_eager=True), long, model, device)
    tables = tables_for(sizes)
    spent = sum(table.nbytes for table in tables) + sizes.pages * model.page_bytes(sizes.page_size)
    assert 0.8 * total < spent <= 0.9 * total
    assert tables.history.nbytes > 0.09 * total, "large enough to matter"


def test_the_memory_of_a_gpu_covers_the_largest_sampled_batch():
    """80 GB, a 7B model, 256 rows over a vocabulary of 152k: logits, sampling and scores, eager and captured."""
    total, vocab, rows = 80_000_000_000, 151_936, 256
    model = model_of(57_344, vocab, (28, 18_944, 3_584), torch.bfloat16)
    weights = 15_200_000_000
    device = SimpleNamespace(caps=CudaDevice.caps, memory=lambda: (total - weights, total))
    long = SimpleNamespace(max_position_embeddings=32_768)
    sizes = choose_sizes(EngineConfig(), long, model, device)
    kv = sizes.pages * model.page_bytes(sizes.page_size)
    slots = (sizes.slots + 1) * slot_bytes(vocab)
    assert 100 < sizes.slots < rows and 0.9 * SLOT_BYTES < slots <= 1.01 * SLOT_BYTES
    left = 0.9 * total - weights - kv - sum(table.nbytes for table in tables_for(sizes)) - slots
    buffer = rows * vocab * 2
    one_pool = buffer + rows * vocab * 4  # the model's own logits, and a float32 of each
    graphs = len(buckets_up_to(rows)) * GRAPH_BYTES
    activations = sizes.step_tokens * 18_944 * 4 * 2
    assert sizes.rows == rows and left >= buffer + 2 * one_pool + activations + graphs
    assert left < 0.08 * total, "and what is kept back is no more than a step needs"
    eager = choose_sizes(EngineConfig(enforce_eager=True), long, model, device)
    assert eager.pages > sizes.pages, "graphs have a pool of their own"
    prefiller = choose_sizes(EngineConfig(role="prefill"), long, model, device)
    assert (sizes.step_tokens, prefiller.step_tokens) == (8192, 512), "pages leave while later steps compute"


def test_a_user_s_error_on_the_device_is_the_user_s_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(CheckpointError):
        build_core(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_broken_invariant_is_the_end_of_the_engine(directory, monkeypatch):
    core = build_core(config(directory, enforce_eager=True), SimDevice(0))
    monkeypatch.setattr(core.loop.planner, "plan", lambda: 1 // 0)
    core.submit(next(requests(0.0)))
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        core.step()
    core.close()


def test_a_failed_device_ends_the_step_with_the_reason(directory):
    device = CpuDevice(1)
    core = build_core(config(directory), device)
    core.submit(next(requests(0.0)))
    device.fail(StalledError("no step completed"))
    with pytest.raises(EngineError, match="no step completed") as caught:
        while True:
            core.step()
    assert isinstance(caught.value.__cause__, StalledError)
    core.close()


def test_closing_may_be_repeated_and_comes_in_any_state(directory):
    for build in (lambda: SimDevice(0), lambda: CpuDevice(1)):
        core = build_core(config(directory), build())
        core.submit(next(requests(0.0)))
        core.step()
        core.close()
        core.close()
        with pytest.raises(EngineError):
            while True:
                core.step()


def test_memory_that_the_device_takes_counts_once_the_engine_is_ready(directory):
    class Counting(CpuDevice):
        asked = 0

        def allocations(self):
            Counting.asked += 3
            return Counting.asked

    core = build_core(config(directory), Counting())
    assert core.stats().allocations == 3, "what start-up takes is not counted"
    assert core.stats().allocations == 6
    core.close()


def test_a_form_of_output_is_refused_without_a_tokenizer(directory):
    core = build_core(config(directory))
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    core.submit(Request(5, np.ones(3, np.int32), params, 0, (1,), 3, 9))
    failures = []
    while core.has_work():
        started, settled, failed = core.step()
        assert not started and not settled
        failures += failed
    ((key, error),) = failures
    assert key == 5 and isinstance(error, CheckpointError) and "tokenizer" in str(error)
    core.close()
