"""The field speculative_config as vLLM spells it: names of methods, fields that it leaves out, suffix decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gapless import ConfigError
from gapless.base.speculative import BY_MODEL, SpeculativeConfig
from gapless.kernels.layout import SUFFIX_WORDS
from gapless.kernels.views import Recall
from gapless.model.drafting.suffixes import SuffixLookup


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
        ConfigError, match=r"draft_tensor_parallel_size must be 1, since a drafter has one device here, got 2"
    ):
        parse(draft_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ('"suffix_decoding_max_tree_depth": 5', "must be a whole number from 6 to"),
        ('"suffix_decoding_max_cached_requests": -1', "must be a whole number from 0 to 20000"),
        ('"suffix_decoding_max_cached_requests": true', "must be a whole number"),
        ('"suffix_decoding_max_spec_factor": "1"', "must be a number from 0 to 1000"),
        ('"suffix_decoding_min_token_prob": NaN', "must be a number from 0 to 1"),
        ('"suffix_decoding_min_token_prob": 1.5', "must be a number from 0 to 1"),
        ('"suffix_decoding_max_nodes": 1', "'suffix_decoding_max_nodes' is not known"),
        ('"model": "demo"', "is of no use to suffix"),
    ],
)
def test_a_field_that_is_out_of_range_is_refused_by_name(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        SpeculativeConfig.parse('{"method": "suffix", ' + fields + "}")


def test_fields_bound_the_table_and_its_drafts():
    asked = '{"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_tree_depth": 8, '
    asked += '"suffix_decoding_max_cached_requests": 10, "suffix_decoding_max_spec_factor": 1.5}'
    found, learner = SuffixLookup.make(SpeculativeConfig.parse(asked), torch.device("cpu"))
    assert learner is not None
    assert found.longest == 5 and found.asked == Recall(3, 1500, 100)
    assert found.table.shape == (2, 4096 + 1, SUFFIX_WORDS)


def test_a_table_for_no_answers_has_next_to_nothing():
    config = SpeculativeConfig.parse('{"method": "suffix", "suffix_decoding_max_cached_requests": 0}')
    found, learner = SuffixLookup.make(config, torch.device("cpu"))
    assert found.table.numel() < 100 and learner is None
