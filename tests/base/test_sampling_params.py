"""SamplingParams: the range of every number, and what a wrong value is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import pytest

from gapless.base.errors import RequestError
from gapless.base.params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    SamplingParams,
    param,
)
from gapless.base.spellings import SAMPLING


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, MAX_N + 1, 1.0, True, "1", None)),
        *(("temperature", value) for value in (-0.1, 100.5, math.nan, math.inf, "hot", True, None)),
        *(("top_p", value) for value in (0, 1.1, math.nan)),
        *(("top_k", value) for value in (-2, 2**31, 0.5)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, 10**1_000)),
        *(("max_tokens", value) for value in (0, -1, 2**31, 1.5)),
        *(("min_tokens", value) for value in (-1, 17, "2")),
        *(
            ("extra_args", value)
            for value in (5, {1: 2.0}, {"a": "b"}, {"a": math.nan}, dict.fromkeys("abcdefghijklmnopq", 1))
        ),
        *(("stop", value) for value in (5, "", [""], [5], {"a"}, ["x"] * (MAX_STOP_STRINGS + 1), "x" * 1_001)),
        *(("stop_token_ids", value) for value in (5, "ab", [-1], [2**31], [1.0], [1] * (MAX_STOP_IDS + 1))),
        *(
            (name, value)
            for name in ("logprobs", "prompt_logprobs")
            for value in (-2, MAX_LOGPROBS + 1, 1.0, True, "1")
        ),
        *(
            (name, 1)
            for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculate", "detokenize")
        ),
    ],
)
def test_a_wrong_value_names_its_field(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 200


def test_the_ends_of_every_range_are_taken():
    low = SamplingParams(n=1, temperature=0, top_p=1e-9, top_k=-1, min_p=0, seed=-(2**63), max_tokens=1, min_tokens=0)
    high = SamplingParams(n=MAX_N, temperature=100, top_p=1, top_k=2**31 - 1, min_p=1, seed=2**63 - 1, max_tokens=None)
    assert (low.top_k, high.max_tokens) == (0, None)
    for top in (0, MAX_LOGPROBS, None):
        assert SamplingParams(logprobs=top, prompt_logprobs=top).logprobs == top


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_whole_vocabulary_is_refused_with_the_mend(name):
    with pytest.raises(RequestError, match=rf"{name} -1.*not supported: ask for 0 to 20") as caught:
        SamplingParams(**{name: -1})
    assert caught.value.param == name


def test_stops_come_out_as_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert (params.stop_strings, params.stop_ids) == (("end",), (3, 4))
    assert SamplingParams(stop=None, stop_token_ids=()) == SamplingParams(stop=[], stop_token_ids=None)


def test_a_copy_is_checked_again():
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams().replace(max_tokens=0)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RequestError, match=r"^unknown sampling parameter 'zzzz'; known: .*temperature"):
        SamplingParams.from_dict({"zzzz": 1.0})
    with pytest.raises(RequestError, match=r"^unknown sampling parameter 'max_token'; did you mean max_tokens\?$"):
        SamplingParams(max_token=5)


def test_names_of_other_engines_change_nothing_at_their_defaults():
    given = {name: values[0] for name, (values, _) in SAMPLING.items() if values}
    kinds = Enum("RequestOutputKind", [("CUMULATIVE", 0), ("DELTA", 1), ("FINAL_ONLY", 2)])
    given |= {"output_kind": kinds.FINAL_ONLY}
    assert SamplingParams(top_k=3, skip_clone=True, **given) == SamplingParams(top_k=3)
    with pytest.raises(RequestError, match="output_kind is not accepted: an output has all of the text so far"):
        SamplingParams(output_kind=kinds.DELTA)


@pytest.mark.parametrize(("name", "entry"), SAMPLING.items())
def test_a_name_of_another_engine_is_answered_with_ours(name, entry):
    with pytest.raises(RequestError, match=f"^{name} is not accepted: ") as caught:
        SamplingParams(**{name: 5})
    assert entry[1] in str(caught.value) and caught.value.param == name
    assert name not in SamplingParams.__dataclass_fields__, "it is here, so take it out of the table"


def test_the_lanes_of_a_row_follow_from_its_values():
    assert not SamplingParams(temperature=0.7, top_k=-1, min_tokens=3, seed=4).needs("cut")
    for asked in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(**asked).needs("cut")
        assert not SamplingParams(temperature=0, **asked).needs("cut"), "a greedy row has no filters"
        assert not SamplingParams(**asked).needs("score")
    for asked in ({"logprobs": 0}, {"prompt_logprobs": 0}):
        params = SamplingParams(temperature=0, **asked)
        assert [one for one in ("mask", "adjust", "cut", "score") if params.needs(one)] == ["score"]


def test_a_field_added_to_the_registry_is_checked():
    @dataclass(frozen=True)
    class Settings(SamplingParams):
        penalty: float = param(0.0, "for this test", low=-2.0, high=2.0, lane="cut")

    assert Settings(penalty=2.0).needs("cut") and not Settings().needs("cut")
    with pytest.raises(RequestError, match=r"penalty must be a number from -2 to 2, got 2\.5"):
        Settings(penalty=2.5)
