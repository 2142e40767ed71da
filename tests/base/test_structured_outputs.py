"""The record of a form of output: exactly one kind, of the right type, within its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.structured import GRAMMAR_OF_PARTS, MAX_FORM_BYTES, StructuredOutputs, Thinking, as_form
from gapless.text.tools import check_tools


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, structural_tag; found none"),
        ({"json_object": False}, "found none"),
        ({"json": {}, "regex": "a"}, "found json and regex"),
        ({"json_object": True, "choice": ["a"]}, "found json_object and choice"),
        ({"json": ""}, "json must be a text"),
        ({"json": {"a": {1, 2}}}, "no JSON"),
        ({"json": {"a": float("nan")}}, "no JSON"),
        ({"regex": ""}, "regex must be a text"),
        ({"regex": 5}, "regex must be a text"),
        ({"grammar": ["a"]}, "grammar must be a text"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": [1]}, "choice must be a list"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "disable_any_whitespace must be true or false"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern must be a text"),
        ({"regex": "a", "whitespace_pattern": " "}, "do not go with regex"),
        ({"choice": ["a"], "disable_additional_properties": True}, "do not go with choice"),
        ({"regex": "a" * (MAX_FORM_BYTES + 1)}, "larger than 131,072 bytes"),
        ({"choice": ["ä" * 1_000] * 70}, "larger than"),
        ({"json": {"a": "x" * MAX_FORM_BYTES}}, "larger than"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"choice": ["\udfff"]}, "half a surrogate pair"),
        ({"json": {}, "whitespace_pattern": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_a_wrong_form_is_refused_by_field(fields, text):
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        StructuredOutputs(**fields)
    assert text in str(caught.value)
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(**fields, source="response_format")
    assert (caught.value.param, "response_format" in str(caught.value)) == ("response_format", True)


def test_a_circle_and_great_depth_are_no_json():
    circle: dict = {}
    circle["a"] = circle
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for schema in (circle, deep):
        with pytest.raises(RequestError, match="no JSON"):
            StructuredOutputs(json=schema)


def test_forms_of_the_same_content_are_equal():
    schema = {"type": "object", "properties": {"größe": {}}}
    text = StructuredOutputs(json=schema)
    assert text == StructuredOutputs(json=text.text, source="guided_json")
    assert hash(text) == hash(StructuredOutputs(json=schema))
    assert "größe" in text.text
    assert StructuredOutputs(choice=["a", "b"]) == StructuredOutputs(choice=("a", "b"))


@pytest.mark.parametrize("given", [5, "json", ["json"], {"jsn": {}}, {"json": {}, "backend": "x"}])
def test_a_value_that_is_no_form_is_refused(given):
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.param == "structured_outputs"


def test_a_mapping_is_a_form():
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")
    assert as_form(None) is None


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("allowed_token_ids", [1, 2])])
def test_a_parameter_that_decides_about_tokens_too_is_refused(name, value):
    form = StructuredOutputs(json_object=True, source="response_format")
    with pytest.raises(RequestError, match=f"{name} does not go with response_format") as caught:
        SamplingParams(structured_outputs=form, **{name: value})
    assert caught.value.param == name


def test_a_form_of_lists_from_another_process_is_the_same_form():
    form = StructuredOutputs(choice=["a"], thinking=Thinking("<t>", "</t>"), marks=("<t>",))
    sent = StructuredOutputs(choice=["a"], thinking=["<t>", "</t>", "", ""], marks=["<t>"])  # type: ignore[arg-type]
    assert sent == form and hash(sent) == hash(form) and sent.thinking.end == "</t>"


def test_the_manual_states_the_limit_of_forms_and_tools_that_the_code_has():
    guides, limit = Path(__file__).parents[2] / "docs" / "guides", f"{MAX_FORM_BYTES >> 10} KiB"
    assert f"| a form as text | {limit} |" in (guides / "structured.md").read_text()
    tools = (guides / "tools.md").read_text()
    assert f"functions, {limit} in all" in tools
    assert f"may have {MAX_FORM_BYTES * GRAMMAR_OF_PARTS >> 10:,} KiB" in tools
    StructuredOutputs(grammar="a" * (MAX_FORM_BYTES + 1), parts=("tools[0].function.parameters",), source="tools")
    tool = {"type": "function", "function": {"name": "f", "description": "x" * MAX_FORM_BYTES}}
    with pytest.raises(RequestError, match=f"tools are larger than {MAX_FORM_BYTES:,} bytes"):
        check_tools([tool], None, None)
