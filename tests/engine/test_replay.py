"""Requests that outlive their engine: killed at any point, they end as if nothing had happened."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from adapter_files import write_adapter
from kernels.native_kernels import load_native
from mortal import MortalBackend
from sharpest import sharpest

from gapless import SamplingParams, StructuredOutputs
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.demo import weights_dir
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.core import EngineCore
from gapless.engine.frontdoor import open_assets
from gapless.engine.wiring import build_core
from gapless.model.config import read_model_config

SUM = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:"
REPEAT = "Repeat: ribbons Prague flowers buttons ribbons Prague flowers"
LONG = " ".join(f"{number} + 1 = {number + 1}." for number in range(30))
CITY = {"type": "string", "enum": ["Oslo", "Paris"]}
SCHEMA = {"type": "object", "properties": {"city": CITY, "of": CITY}, "required": ["city", "of"]}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy": (SUM, {"temperature": 0, "ignore_eos": True}, {}),
    "seeded": (SUM, {"temperature": 1.5, "seed": 7, "ignore_eos": True}, {}),
    "unseeded": (SUM, {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "ignore_eos": True}, {}),
    "bytes": (SUM, {"temperature": 8.0, "ignore_eos": True, "skip_special_tokens": False}, {}),
    "penalties": (LONG, {**PENALTIES, "temperature": 1.0, "bad_words": ["the", " 3"], "min_tokens": 20}, {}),
    "scores": (LONG, {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.7, "ignore_eos": True}, {}),
    "form": (SUM, {"structured_outputs": StructuredOutputs(regex=r"( [A-Z][a-z]{2,6}){12}"), "temperature": 3}, {}),
    "schema": (SUM, {"structured_outputs": StructuredOutputs(json=SCHEMA), "temperature": 2}, {}),
    "n": ("Tell me about ribbons and Prague.", {"n": 3, "temperature": 1.2, "prompt_logprobs": 1}, {}),
    "stop": (REPEAT, {"temperature": 0, "stop": ["uttons ribb", "no such text"]}, {}),
    "biases": (SUM, {"logit_bias": {65: 5.0, 70: -5.0}, "temperature": 1, "ignore_eos": True}, {}),
    "allowed": (SUM, {"allowed_token_ids": [*range(60, 120)], "temperature": 1, "ignore_eos": True}, {}),
    "processor": (SUM, {"logits_processors": ({"qualname": "both", "args": [1.25, 0.5]},), "temperature": 1}, {}),
    "adapter": (SUM, {"temperature": 0, "ignore_eos": True}, {"adapter": "a"}),
    "salted": (
        LONG,
        {"temperature": 1, "stop": ["7"], "include_stop_str_in_output": True},
        {"salt": "s", "priority": 2},
    ),
    "one": (SUM, {"max_tokens": 1}, {}),
    "words": (SUM, {"temperature": 1, "ignore_eos": True}, {"interval": 5}),
}
"""What is said, sampling parameters beside the usual ones, and what else `AsyncLLM.open` is given."""
TOKENS = 40


class Got(NamedTuple):
    """What the reader of one completion got, Delta by Delta."""

    text: str
    tokens: list[int]
    logprobs: list[Any]
    end: tuple[Any, ...]
    prompt_logprobs: list[Any] | None


ENGINES: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": {"method": "ngram"}},
    "plain": {},
    "one step": {"depth": "1", "enforce_eager": True, "max_num_batched_tokens": 64},
    "adapters": {"batch_invariant": False},
}
WITH_ADAPTERS = ("adapter", "greedy", "form")


def core_of(name: str, folder: Path) -> tuple[EngineConfig, EngineCore]:
    options: dict[str, Any] = {
        **{"device": "cpu", "dtype": "float32", "depth": "4", "max_num_seqs": 24, "max_model_len": 512},
        **{"logits_processors": ("both=torch_processors:counts_both",), "batch_invariant": True},
        **ENGINES[name],
    }
    if name == "adapters":
        options["lora_modules"] = (f"a={write_adapter(folder, read_model_config(weights_dir()), 8, size=0.05)}",)
    config = EngineConfig("demo", **options)
    return config, build_core(config)


async def read(llm: AsyncLLM, name: str) -> list[Got]:
    text, sampling, more = ASKED[name]
    params = SamplingParams(**{"max_tokens": TOKENS} | sampling)
    stream = await llm.open(text, params, name, **more)
    deltas = []
    while not stream.finished:
        deltas += await stream.next()
    found = []
    for index in range(params.n):
        own = [delta for delta in deltas if delta.index == index]
        assert not any(delta.finish_reason for delta in own[:-1])
        tokens = [token for delta in own for token in delta.token_ids]
        logprobs = [entry for delta in own for entry in delta.logprobs or ()]
        end = own[-1].finish_reason, own[-1].stop_reason
        found.append(Got("".join(delta.text for delta in own), tokens, logprobs, end, stream.prompt_logprobs))
    return found


class Played(NamedTuple):
    """What each reader got of an engine, and the engine."""

    found: dict[str, list[Got]]
    backend: MortalBackend


class Engine:
    """An engine that is asked for all at once, and may die meanwhile."""

    def __init__(self, name: str, folder: Path) -> None:
        load_native()
        self.config, self.core = core_of(name, folder)
        self.names = WITH_ADAPTERS if name == "adapters" else tuple(one for one in ASKED if one != "adapter")

    async def play(self, *dies_after: int) -> Played:
        backend = MortalBackend(self.core, dies_after)
        async with AsyncLLM(backend, open_assets(self.config), seed=self.config.base_seed) as llm:
            found = await asyncio.gather(*[read(llm, name) for name in self.names])
        return Played(dict(zip(self.names, found, strict=True)), backend)


@pytest.fixture(scope="module", params=sharpest(ENGINES))
def engine(request, tmp_path_factory):
    """An engine, and what everybody gets when it does not die."""
    one = Engine(request.param, tmp_path_factory.mktemp("adapters") / "a")
    yield one, asyncio.run(one.play())
    one.core.close()


@pytest.mark.parametrize("every", sharpest([9, 2]))
async def test_a_request_ends_as_if_no_engine_had_died(engine, every):
    one, wanted = engine
    for death in itertools.count(1, every):
        played = await one.play(death)
        for name, got in played.found.items():
            assert got == wanted.found[name], f"{name}, whose engine died after {death} deliveries"
        if not played.backend.deaths:
            break
    assert death > 30


async def test_a_request_that_was_open_at_two_deaths_ends_with_the_cause_and_later_ones_go_on(engine):
    one, wanted = engine
    backend = MortalBackend(one.core, (8, 20))
    async with AsyncLLM(backend, open_assets(one.config), seed=one.config.base_seed) as llm:
        first = await llm.open(SUM, SamplingParams(**ASKED["greedy"][1], max_tokens=TOKENS))
        while not backend.deaths:
            await first.next()
        later = asyncio.create_task(read(llm, "greedy"))
        with pytest.raises(EngineDeadError, match="killed on purpose"):
            while True:
                await first.next()
        assert await later == wanted.found["greedy"]
        assert backend.deaths == 2 and first.deaths == 2
        tokens = wanted.found["greedy"][0].tokens
        assert len(tokens) > len(first.completions[0].token_ids) > 0
        assert first.completions[0].token_ids == tokens[: len(first.completions[0].token_ids)]


async def test_requests_that_end_by_abort_while_no_engine_runs_are_not_asked_for_again(engine):
    one, wanted = engine
    backend = MortalBackend(one.core, (6,))
    async with AsyncLLM(backend, open_assets(one.config), seed=one.config.base_seed) as llm:
        left, kept = llm.open(SUM, SamplingParams(max_tokens=400, ignore_eos=True), "left"), read(llm, "greedy")
        stream, reading = await left, asyncio.create_task(kept)
        backend.at_death = lambda: stream.close()
        assert await reading == wanted.found["greedy"]
        assert backend.deaths == 1 and stream.completions[0].finish_reason == "abort" and not llm.open_requests
