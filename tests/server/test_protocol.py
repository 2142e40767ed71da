"""From the fields of a request to what its row needs: by the registry of sampling parameters alone."""

import json

import pytest

from gapless.base.params import PARAMS
from gapless.server.dialects.completions import CompletionRequest
from gapless.server.protocol import UNSUPPORTED, parse
from gapless.step.lanes import LANES


@pytest.mark.parametrize(
    ("fields", "lanes"),
    [
        ({}, []),
        ({"temperature": 0, "top_p": 0.5}, []),
        ({"top_k": 3}, ["cut"]),
        ({"top_p": 0.5, "logprobs": 0}, ["score", "cut"]),
        ({"min_p": 0.5, "prompt_logprobs": 0}, ["score", "cut"]),
        ({"logprobs": 0, "echo": True}, ["score"]),
    ],
)
def test_the_fields_of_a_request_say_which_lanes_its_row_needs(fields, lanes):
    params = parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest).sampling({}, 5)
    assert [lane.name for lane in LANES if params.needs(lane.name)] == lanes


def test_a_parameter_of_the_registry_is_not_listed_as_unsupported():
    assert not {entry.name for entry in PARAMS if entry.wire} & UNSUPPORTED.keys()
