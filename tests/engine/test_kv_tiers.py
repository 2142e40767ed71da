"""The demo model with a host tier: what the device has given up is loaded, and tokens stay the same."""

from __future__ import annotations

import pytest

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError

LONG = "The quick brown fox jumps over the lazy dog near the river bank. "
OPTIONS = {"device": "cpu", "max_model_len": 512, "num_gpu_blocks_override": 40}


def answers(llm, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    return [llm.generate(prompt, params)[0] for prompt in prompts]


def test_prompts_that_the_device_gave_up_are_loaded():
    words = ["one", "two", "six", "ten"]
    with LLM("demo", **OPTIONS) as llm:
        prompts = [word + LONG * 10 for word in words]
        expected = [output.outputs[0].token_ids for output in answers(llm, prompts)]
    with LLM("demo", **OPTIONS, kv_tiers=["host:64MiB"]) as llm:
        first = answers(llm, prompts)
        again = answers(llm, prompts)
    assert [output.outputs[0].token_ids for output in first + again] == expected * 2
    assert not any(output.num_cached_tokens for output in first)
    lengths = [len(output.prompt_token_ids) for output in again]
    assert min(lengths) > 256 and sum(lengths) > 39 * 16, "the device holds one or two of them"
    assert all(output.num_cached_tokens >= length - 17 for output, length in zip(again, lengths, strict=True))


def test_a_tier_too_small_for_a_page_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="kv_tiers: host:100 holds no page"):
        LLM("demo", **OPTIONS, kv_tiers=["host:100"])
