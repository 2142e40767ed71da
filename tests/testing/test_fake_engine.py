"""The whole engine on the fake accelerator gives the CPU's tokens: captured and eager, with every part of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from gapless import LLM, SamplingParams
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
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


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
    ],
    ids=str,
)
def test_llm_on_the_fake_gives_the_cpu_s_tokens(how):
    with LLM("demo", device="fake", **{**OPTIONS, **how}) as llm:
        assert tokens(llm) == of_the_cpu()
        assert tokens(llm) == of_the_cpu(), "from pages in the prefix index"
        steps = llm.stats().steps
        assert steps.steps > steps.graph_steps and (steps.graph_steps > 0) != how.get("enforce_eager", False)
        print(steps)
