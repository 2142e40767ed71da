"""The fields of suffix decoding, as vLLM spells them."""

from __future__ import annotations

import pytest
import torch

from gapless import ConfigError
from gapless.base.speculative import SpeculativeConfig
from gapless.kernels.layout import SUFFIX_WORDS
from gapless.kernels.views import Recall
from gapless.step.speculation import SuffixLookup


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
    found = SuffixLookup.of(SpeculativeConfig.parse(asked), torch.device("cpu"))
    assert found.longest == 5 and found.asked == Recall(3, 1500, 100)
    assert found.table.shape == (2, 4096 + 1, SUFFIX_WORDS)


def test_a_table_for_no_answers_has_next_to_nothing():
    config = SpeculativeConfig.parse('{"method": "suffix", "suffix_decoding_max_cached_requests": 0}')
    assert SuffixLookup.of(config, torch.device("cpu")).table.numel() < 100
