"""The whole engine on the fake accelerator gives the CPU's tokens: captured and eager, with every part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from adapter_files import write_adapter
from harness import tokens_of
from loops_under_guard import loops_under_no_race
from other_weights import checkpoint
from tiny_models import tiny_config
from waiting import until

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineError
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.testing import fake

pytestmark = pytest.mark.fake

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 256, "num_gpu_blocks_override": 40}
PROMPTS = ["Mia has 17 pens. She buys 25 more. How many?", "The sun", "Say hello to everyone there", "One day a little"]
ASKS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]{5,30}"}},
)
EAGLE = {"method": "eagle3", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def eager_core() -> EngineCore:
    return build_core(EngineConfig("demo", device="fake", **OPTIONS, enforce_eager=True))


def tokens(llm: LLM) -> list[list[int]]:
    asked = [SamplingParams(max_tokens=16, ignore_eos=True, **asks) for asks in ASKS]
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, asked, use_tqdm=False)]


@cache
def of_the_cpu(model: str = "demo") -> list[list[int]]:
    with LLM(model, device="cpu", **OPTIONS, enforce_eager=True) as llm:
        return tokens(llm)


@pytest.fixture(autouse=True)
def delays() -> Iterator[None]:
    fake.delays(7)
    yield
    fake.delays(None)


LATER = pytest.mark.seeds


@pytest.mark.parametrize(
    "how",
    [
        {},
        *(pytest.param({"depth": depth}, marks=LATER) for depth in ("1", "8")),
        pytest.param({"enforce_eager": True}, marks=LATER),
        pytest.param({"speculative_config": NGRAM}, marks=LATER),
        pytest.param({"kv_tiers": ["host:4MiB"], "num_gpu_blocks_override": 17}, marks=LATER),
        pytest.param({"max_num_batched_tokens": 8}, marks=LATER),
        pytest.param({"speculative_config": EAGLE}, marks=LATER),
    ],
    ids=str,
)
def test_llm_on_the_fake_gives_the_cpu_s_tokens(how):
    with LLM("demo", device="fake", **{**OPTIONS, **how}) as llm:
        assert tokens(llm) == of_the_cpu()
        assert tokens(llm) == of_the_cpu(), "from pages in the prefix index"
        steps = llm.stats().steps
        assert steps.steps > steps.graph_steps and (steps.graph_steps > 0) != how.get("enforce_eager", False)
        assert steps.captures_refused == 0
        if not how:
            greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            passes = [(llm.generate(PROMPTS, greedy, use_tqdm=False), llm.stats().steps)[1] for _ in range(3)]
            assert passes[2].graph_misses == passes[1].graph_misses
            assert passes[2].graph_steps >= passes[1].graph_steps + 14


@pytest.mark.seeds
def test_adapters_and_new_weights_on_the_fake(tmp_path):
    config = read_model_config(resolve_model_dir("demo"))
    paths = {name: write_adapter(tmp_path / name, config, seed) for seed, name in enumerate("ab")}
    modules = tuple(f"{name}={path}" for name, path in paths.items())
    other = checkpoint(tmp_path / "other")

    def found(device: str) -> list[list[int]]:
        with LLM("demo", device=device, lora_modules=modules, **OPTIONS, enforce_eager=device == "cpu") as llm:
            asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            names = ["a", "", "b", "a"]
            given = llm.generate(PROMPTS, asked, use_tqdm=False, adapter=names)
            llm.update_weights(str(other))
            given += llm.generate(PROMPTS, asked, use_tqdm=False, adapter=names)
            return [list(one.outputs[0].token_ids) for one in given]

    assert found("fake") == found("cpu")


@pytest.mark.seeds
def test_pages_from_the_host_and_from_a_disk_give_the_cpu_s_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    monkeypatch.setattr("gapless.pace.load_gate.LoadGate.pays", lambda *_: True)
    prompts = [f"{word} jumps over the lazy dog near the river bank. " * 14 for word in ("A fox", "A cat", "A cow")]
    options = {**OPTIONS, "max_model_len": 512}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [list(llm.generate(one, greedy, use_tqdm=False)[0].outputs[0].token_ids) for one in prompts]

    with LLM("demo", device="cpu", **options, enforce_eager=True) as llm:
        expected = answers(llm)
    for turns in (2, 1):  # the second engine has nothing but the disk
        with LLM("demo", device="fake", **options, kv_tiers=["host:1MiB", f"disk:{tmp_path}:16MiB"]) as llm:
            assert [answers(llm) for _ in range(turns)] == [expected] * turns
            assert llm.stats().steps.admitted_loaded > 0


@pytest.mark.seeds
@pytest.mark.parametrize("depth", ["1", "2", "4", "8", "auto"])
def test_a_small_model_gives_the_cpu_s_tokens_at_every_depth(tmp_path, depth):
    """Prompts in chunks, rows that are preempted, and every way of sampling."""
    fields = tiny_config(vocab_size=128, intermediate_size=48, head_dim=8, max_position_embeddings=256, eos_token_id=1)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected = generate(str(tmp_path), "cpu", "1")
    assert generate(str(tmp_path), "fake", depth) == expected


def generate(directory: str, device: str, depth: str) -> dict[int, list[int]]:
    config = EngineConfig(
        model=directory, load_format="dummy", device=device, depth=depth, max_num_seqs=6, max_model_len=96,
        max_num_batched_tokens=24, num_gpu_blocks_override=12,
    )  # fmt: skip
    core, rng = build_core(config), np.random.default_rng(0)
    for key in range(12):
        prompt = rng.integers(2, 120, int(rng.integers(1, 50))).astype(np.int32)
        params = SamplingParams(temperature=float(key % 3 > 0), top_p=0.9, top_k=5 * (key % 2), max_tokens=None)
        core.submit(Request(key, prompt, params, key * 7919, (1,), 0, len(prompt) + 30))
    found = tokens_of(core)
    preempted = core.stats().queue.preemptions
    core.close()
    assert preempted and len(found) == 12
    return found


@pytest.mark.raced
def test_no_buffer_of_an_engine_on_the_fake_is_used_without_an_order():
    """Eager steps: a graph declares all lines of which its kernels choose some by numbers on the device."""
    fake.load()
    with loops_under_no_race(), LLM("demo", device="fake", **OPTIONS, enforce_eager=True) as llm:
        assert tokens(llm) == of_the_cpu()


@pytest.mark.raced
def test_a_host_that_does_not_wait_for_the_token_copy_is_a_race_on_the_fake(monkeypatch):
    fake.load()
    with loops_under_no_race("record") as checker, LLM(core=(core := eager_core())) as llm:
        launcher = core.loop.launcher
        enqueue = launcher.enqueue

        def with_the_wrong_fence(*args: Any) -> Any:
            flight = enqueue(*args)
            return flight._replace(on_host=flight.started)

        monkeypatch.setattr(launcher, "enqueue", with_the_wrong_fence)
        with suppress(EngineError):  # what it reads may be wrong
            tokens(llm)
    assert any("outbox" in race.buffer and "token_out" in race.missing for race in checker.races), checker.races


def out_of_range(at: torch.device) -> None:
    """Launch a kernel that fails when its stream gets there."""
    numbers = torch.arange(4, device=at)
    numbers.index_select(0, numbers + 2)


def test_a_kernel_that_fails_ends_the_engine_with_its_text():
    with LLM(core=(core := eager_core())) as llm:
        device = core.loop.device
        device.compute.launch(out_of_range, device.torch_device)
        with pytest.raises(EngineError, match="index out of range"):
            tokens(llm)
    fake.delays(None)
    until(is_reset)


def is_reset() -> bool:
    """Whether the device could forget its error: all that was launched has ended."""
    try:
        fake.reset()
    except RuntimeError:
        return False
    return True
