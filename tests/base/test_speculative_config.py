"""The field speculative_config as vLLM spells it: other names of methods, and fields that it leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless import ConfigError
from gapless.base.speculative import BY_MODEL, SpeculativeConfig


def parse(**fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse(json.dumps(fields))


@pytest.mark.parametrize(
    ("name", "method"),
    [("ngram_gpu", "ngram"), ("deepseek_mtp", "mtp"), ("mimo_mtp", "mtp"), ("qwen3_next_mtp", "mtp"), (None, "ngram")],
)
def test_other_names_of_a_method_mean_that_method(name, method):
    assert parse(method=name, num_speculative_tokens=2) == SpeculativeConfig(method, 2)


def test_a_model_without_a_method_leaves_it_to_the_checkpoint():
    left = SpeculativeConfig(BY_MODEL, model="/heads/a")
    assert parse(model="/heads/a") == parse(model="/heads/a", method=None) == left
    with pytest.raises(ConfigError, match="of no use to mtp"):
        parse(model="/heads/a", method="deepseek_mtp")


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [({}, (2, 4)), ({"min": 3}, (3, 3)), ({"max": 5}, (5, 5)), ({"max": 1}, (1, 1)), ({"min": 1, "max": 6}, (1, 6))],
)
def test_one_bound_of_a_match_is_taken_for_both(fields, bounds):
    config = parse(method="ngram", **{f"prompt_lookup_{end}": tokens for end, tokens in fields.items()})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds


def test_a_drafter_runs_on_one_device():
    assert parse(draft_tensor_parallel_size=1) == parse(draft_tensor_parallel_size=None) == SpeculativeConfig()
    with pytest.raises(
        ConfigError, match=r"draft_tensor_parallel_size must be 1, since a model has one device here, got 2"
    ):
        parse(draft_tensor_parallel_size=2)
