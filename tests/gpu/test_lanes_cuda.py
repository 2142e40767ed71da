"""Engines on a GPU whose rows ask for something: adapters, penalties, masks, processors of logits."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from harness import tokens_of

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from adapter_files import write_adapter
from automaton import ASKED, Automaton

from gapless import LLM, ConfigError, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core
from gapless.model.config import read_model_config, resolve_model_dir

OPTIONS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "batch_invariant": True}
QUESTIONS = [f"Question: {name} has {n} pens and buys 7 more." for n in (14, 25) for name in ("Mia", "Tom", "Ada")]


def test_rows_of_several_adapters_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    config = read_model_config(resolve_model_dir("demo"))
    modules = tuple(f"{n}={write_adapter(tmp_path / n, config, seed, size=0.05)}" for seed, n in enumerate("abc"))
    prompts = [f"Question: {name} has 14 pens and buys 7 more." for name in ("Mia", "Tom", "Ada", "Bo")]
    greedy, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for device, depth in (("cpu", "1"), ("cuda", "1"), ("cuda", "8")):
        options = {"dtype": "float32", "depth": depth, "max_num_seqs": 4, "max_model_len": 128, "max_loras": 2}
        with LLM("demo", device=device, lora_modules=modules, **options) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, adapter=["a", "", "b", "c"])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]


def test_rows_that_ask_get_the_same_tokens_at_every_depth() -> None:
    asks = SamplingParams(
        temperature=0.8, top_p=0.95, seed=5, max_tokens=48, ignore_eos=True, repetition_penalty=1.2,
        presence_penalty=0.4, logit_bias={9: -3.0}, bad_words=["Mia"],
    )  # fmt: skip
    plain = SamplingParams(temperature=0.8, seed=6, max_tokens=48, ignore_eos=True)
    found = []
    for depth in ("1", "8", "auto"):
        with LLM("demo", **OPTIONS, depth=depth) as llm:
            outputs = llm.generate(QUESTIONS, [asks, plain] * 3, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert not any("Mia" in output.outputs[0].text for output in outputs[::2])
    assert found[0] == found[1] == found[2]


class Slow(Automaton):
    """Needs longer than a step of a small model."""

    def write_mask(self, words):
        time.sleep(0.005)
        super().write_mask(words)


def run(core: EngineCore, kind: type[Automaton] | None) -> list[list[int]]:
    """The tokens of eight rows, of which every other one has a matcher of this kind."""
    for key in range(8):
        matcher = kind(key, core.info.vocab_size) if kind and key % 2 else None
        asks = {"structured_outputs": ASKED} if matcher else {}
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=key, max_tokens=None, ignore_eos=True, **asks)
        core.submit(Request(key, np.arange(1, 9, dtype=np.int32), params, key, (), 0, 56, matcher=matcher))
    tokens = tokens_of(core)
    return [tokens[key] for key in range(8)]


def test_masked_rows_get_the_same_tokens_at_every_depth_and_however_late_their_masks_are() -> None:
    found, held = [], 0
    for depth in ("1", "8", "auto"):
        config = EngineConfig("demo", device="cuda", dtype="float32", depth=depth, max_num_seqs=8, batch_invariant=True)
        core = build_core(config)
        plain = run(core, None)
        found += [run(core, Automaton), run(core, Slow)]
        held += core.loop.counters.held_rows
        core.close()
        assert found[-1][::2] == plain[::2], "the neighbours' tokens"
    assert all(tokens == found[0] for tokens in found) and held > 0


def test_processed_rows_get_the_same_tokens_at_every_depth_and_neighbours_theirs() -> None:
    plain = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    asks = plain.replace(logits_processors=[{"qualname": "counts_both", "args": [0.75]}])
    paths, found = ("torch_processors:counts_both", "torch_processors:WithConstants"), []
    for depth in ("1", "8", "auto"):
        with LLM("demo", **OPTIONS, depth=depth, logits_processors=paths) as llm:
            outputs = llm.generate(QUESTIONS, [asks, plain] * 3, use_tqdm=False)
            same = llm.generate(QUESTIONS[::2], plain.replace(frequency_penalty=0.75), use_tqdm=False)
            alone = llm.generate(QUESTIONS[1::2], plain, use_tqdm=False)
            assert llm.stats().steps.captures_refused == 0
        found.append([output.outputs[0].token_ids for output in outputs])
        assert found[-1][::2] == [output.outputs[0].token_ids for output in same]
        assert found[-1][1::2] == [output.outputs[0].token_ids for output in alone]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["syncs", "uploads"])
def test_a_processor_that_waits_for_the_device_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} cannot be captured: .*torch_processors\.py:\d+"):
        LLM("demo", **OPTIONS, logits_processors=(f"torch_processors:{name}",))
