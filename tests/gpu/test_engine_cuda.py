"""The whole engine on CUDA, by both classes of devices: the depth oracle, no hidden syncs, and the CPU's logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from harness import check_at_rest, checksum_loop, run, script, sizes, tokens_of
from tiny_models import tiny_config

from gapless import LLM
from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import device_class, open_device
from gapless.engine.wiring import build_core

GENERAL = "accelerator:cuda"
TINY = tiny_config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
    max_position_embeddings=512, eos_token_id=1,
)  # fmt: skip


@contextmanager
def no_sync() -> Iterator[None]:
    """Torch raises on every synchronising call that it knows; waiting for an event is not one of them."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("reserved_memory")
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("name, seeds", [("cuda", 10), (GENERAL, 6)])
def test_every_depth_equals_the_direct_computation_and_nothing_synchronises(name, seeds, depth):
    for seed in range(seeds):
        shape = sizes(seed)
        jobs = script(seed, shape.max_len)
        device = open_device(name)
        loop = checksum_loop(device, shape, depth)
        device.drain()
        with no_sync():
            run(loop, jobs)
        for job in jobs:
            job.check(f"seed {seed}")
        check_at_rest(loop)
        device.close()


def generate(directory: str, device: str, depth: str, temperature: float, **options) -> tuple[dict, int]:
    """Return the tokens of some requests, and how many steps were replays."""
    config = EngineConfig(model=directory, load_format="dummy", device=device, depth=depth, max_num_seqs=16, **options)
    core = build_core(config)
    rng = np.random.default_rng(0)
    for key in range(12):
        prompt = rng.integers(2, 500, int(rng.integers(1, 60))).astype(np.int32)
        params = SamplingParams(temperature=temperature, top_p=0.9, top_k=0 if key % 2 else 20, max_tokens=None)
        core.submit(Request(key, prompt, params, key * 7919, (1,), 0, len(prompt) + 40))
    tokens = tokens_of(core)
    replays = core.stats().steps.graph_steps
    core.close()
    return tokens, replays


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_gives_the_same_tokens_at_every_depth_and_those_of_the_cpu(tmp_path, temperature):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    torch.backends.cuda.matmul.allow_tf32 = False
    reference, _ = generate(str(tmp_path), "cpu", "1", temperature)
    for depth in ("1", "2", "4", "8", "auto"):
        assert generate(str(tmp_path), "cuda", depth, temperature)[0] == reference


@pytest.mark.usefixtures("reserved_memory")
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_general_class_gives_the_tokens_of_cuda_device_at_every_depth(tmp_path, temperature, eager):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"temperature": temperature, "enforce_eager": eager, "kv_cache_memory_bytes": 64 << 20}
    reference, _ = generate(str(tmp_path), "cuda", "1", **options)
    assert sum(map(len, reference.values())) > 200
    captures = device_class(GENERAL).caps.captures and not eager
    for depth in ("1", "4", "auto"):
        tokens, replays = generate(str(tmp_path), GENERAL, depth, **options)
        assert tokens == reference, f"depth {depth}"
        assert (replays > 10) == captures, f"depth {depth}: {replays} replays"


def test_the_embedded_model_gives_the_same_text_by_both_classes():
    params = [SamplingParams(temperature=t, seed=7, max_tokens=32, ignore_eos=True) for t in (0.0, 0.0, 0.9)]
    prompts = ["Once upon a time", "Mia has 14 pens", "The city is"]
    found = []
    for name in ("cuda", GENERAL):
        with LLM("demo", device=name, dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("asks", [{"top_p": 0.9}, {"logprobs": 20, "top_p": 0.9}], ids=["top-p", "logprobs"])
def test_the_largest_sampled_batch_stays_inside_its_share(tmp_path, asks):
    """256 rows over a real vocabulary, all with filters: captured, and within the memory that was asked for."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 151_936, "dtype": "bfloat16"}))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.1
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cuda", max_num_seqs=256, max_model_len=256,
        gpu_memory_utilization=share,
    )  # fmt: skip
    core = build_core(config)
    rng = np.random.default_rng(0)
    for key in range(256):
        params = SamplingParams(temperature=1.0, max_tokens=None, **asks)
        core.submit(Request(key, rng.integers(2, 500, 9).astype(np.int32), params, key, (), 0, 60))
    least = free
    while core.has_work():
        core.step()
        least = min(least, torch.cuda.mem_get_info()[0])
    stats = core.stats()
    core.close()
    assert stats.steps.captures_refused == stats.allocations == 0 and stats.steps.graph_steps > 20
    assert total - least <= share * total


ASKS = (
    {}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.8}, {"logprobs": 20}, {"prompt_logprobs": 20}, {"min_p": 0.1},
    {"logprobs": 0, "top_k": 3}, {"min_tokens": 3},
)  # fmt: skip


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("tokens", [200, 4096], ids=["chunks", "whole prompts"])
def test_no_step_takes_memory_once_the_engine_is_ready(tmp_path, eager, tokens):
    """Every setting, prompts of any length; a chunk that ends no prompt samples nothing."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 32_000, "dtype": "bfloat16"}))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cuda", max_num_seqs=48, max_num_batched_tokens=tokens,
        kv_cache_memory_bytes=256 << 20, enforce_eager=eager, enable_prefix_caching=False,
    )  # fmt: skip
    core = build_core(config)
    rng, key, turns = np.random.default_rng(0), 0, 0
    while key < 160 or core.has_work():
        if key < 160 and turns % 3 == 0:
            prompt = rng.integers(2, 500, int(rng.choice([1, 7, 60, 450]))).astype(np.int32)
            params = SamplingParams(temperature=float(key % 2), max_tokens=None, **ASKS[key % len(ASKS)])
            length = len(prompt)
            core.submit(Request(key, prompt, params, key, (1,), length + 3, length + int(rng.integers(4, 40))))
            key += 1
        core.step()
        turns += 1
        if not core.has_work():
            core.rest()
    stats = core.stats()
    core.close()
    assert stats.allocations == 0
    assert stats.steps.steps > stats.steps.graph_steps and (stats.steps.graph_steps > 20) == (not eager)


Line = tuple[float, int, list[int]]


def scored(directory: str, device: str, depth: str) -> dict[tuple[int, int], Line]:
    """(request, position) -> log-probability, rank and most likely ids, of prompts and of what was sampled."""
    config = EngineConfig(
        model=directory, load_format="dummy", device=device, depth=depth, max_num_seqs=6, max_num_batched_tokens=24
    )
    core = build_core(config)
    rng = np.random.default_rng(1)
    for key in range(9):
        prompt = rng.integers(2, 500, int(rng.integers(1, 60))).astype(np.int32)
        asks = {"logprobs": (None, 0, 5)[key % 3], "prompt_logprobs": (5, None)[key % 2]}
        params = SamplingParams(temperature=0.0, max_tokens=None, min_tokens=2, **asks)
        core.submit(Request(key, prompt, params, 0, (1,), len(prompt) + 2, len(prompt) + 20))
    found: dict[tuple[int, int], Line] = {}
    with no_sync():
        while core.has_work():
            for settled in core.step()[1]:
                if settled.logprobs is not None:
                    for key, position, *line, tops in zip(*(c.tolist() for c in settled.logprobs), strict=True):
                        assert (key, position) not in found and len(tops) == len(line[2])
                        found[key, position] = (line[0], line[1], line[2])
    core.close()
    return found


def test_log_probabilities_are_those_of_the_cpu_at_every_depth_and_nothing_synchronises(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = scored(str(tmp_path), "cpu", "1")
    assert len(reference) > 200
    for depth in ("1", "2", "4", "8"):
        found = scored(str(tmp_path), "cuda", depth)
        assert found.keys() == reference.keys(), f"depth {depth}"
        for place, (logprob, rank, ids) in found.items():
            expected, place_in_order, best = reference[place]
            assert logprob == pytest.approx(expected, abs=1e-3), place
            # Logits closer than rounding may change places; a line is as wide as its step's widest.
            assert abs(rank - place_in_order) <= 2 and (set(ids[:3]) <= set(best) or len(best) < 5), place
