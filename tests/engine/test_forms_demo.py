"""The demo model under forms of output: whatever ends by itself has its form, beside rows that ask for nothing."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import validate
from sharpest import sharpest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.loop import mask_threads

PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "pens": {"type": "integer", "maximum": 99}},
    "required": ["name", "pens"],
    "additionalProperties": False,
}
RECORD, DATE = StructuredOutputs(json=SCHEMA), StructuredOutputs(regex=r"\d{4}-\d{2}-\d{2}")


@pytest.fixture(scope="module", params=sharpest(["4", "1"]))
def llm(request):
    with LLM("demo", device="cpu", max_num_seqs=8, max_model_len=512, depth=request.param) as one:
        yield one


def asks(form, temperature=1.0, **more):
    return SamplingParams(max_tokens=300, temperature=temperature, structured_outputs=form, **more)


def test_output_that_ends_by_itself_has_its_form(llm):
    outputs = llm.generate([PROMPT] * 24, [asks(form, seed=seed) for seed in range(12) for form in (RECORD, DATE)])
    records, dates = ([output.outputs[0] for output in outputs[first::2]] for first in (0, 1))
    ended = [record for record in records if record.finish_reason == "stop"]
    assert len(ended) >= 10
    for record in ended:
        validate(json.loads(record.text), SCHEMA)
    assert all(re.fullmatch(DATE.regex, date.text) and date.finish_reason == "stop" for date in dates)


def test_rows_beside_forms_get_the_tokens_that_they_get_alone(llm):
    plain = SamplingParams(temperature=0, max_tokens=40)
    (alone,) = llm.generate(PROMPT, plain)
    beside = llm.generate([PROMPT] * 6, [plain, asks(RECORD)] * 3)
    assert [output.outputs[0].token_ids for output in beside[::2]] == [alone.outputs[0].token_ids] * 3


def test_a_form_is_kept_if_nothing_else_would_end_it(llm):
    choice = StructuredOutputs(choice=["Paris", "Rome"])
    for more in ({}, {"ignore_eos": True}, {"n": 3}, {"repetition_penalty": 1.5, "logit_bias": {5: 100}}):
        (output,) = llm.generate("The capital of Italy is ", asks(choice, **more))
        assert {one.text for one in output.outputs} <= {"Paris", "Rome"}
        assert {one.finish_reason for one in output.outputs} == {"stop"}


def test_a_greedy_output_that_has_the_form_by_itself_is_not_changed(llm):
    greedy = SamplingParams(temperature=0, max_tokens=20, stop="\n")
    (free,) = llm.generate(PROMPT, greedy)
    text = free.outputs[0].text
    (formed,) = llm.generate(PROMPT, greedy.replace(structured_outputs=StructuredOutputs(choice=[text, "no answer"])))
    assert formed.outputs[0].text == text


def test_offline_calls_are_held_to_their_schema_and_come_out_parsed(llm):
    city = {"type": "string", "enum": ["Oslo", "Paris"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    messages = [[{"role": "user", "content": text}] for text in ("What is the weather in Paris?", "Hello")]
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=3)
    outputs = llm.chat(messages, params, tools=tools, tool_choice="required", parallel_tool_calls=False)
    for (output,) in (one.outputs for one in outputs):
        (call,) = output.tool_calls
        assert call.function.name == "get_weather" and output.content is None
        assert json.loads(call.function.arguments)["city"] in city["enum"]


FIELDS = {f"measurement_{number}": {"type": "integer", "minimum": 0, "maximum": 99} for number in range(8)}
TABLE = StructuredOutputs(
    json={"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
)


@pytest.mark.seeds
@pytest.mark.parametrize(("method", "natives"), [("grammar", True), ("ngram", False), ("eagle3", True)])
def test_text_that_a_form_leaves_no_choice_about_is_drafted_and_changes_no_token(
    method, natives, free_drafts, monkeypatch
):
    """The expected text comes from threads, or from the attendant."""
    if not natives:
        monkeypatch.setattr(mask_threads, "load", lambda: None)
    params = [asks(TABLE, temperature, seed=1) for temperature in (0, 1)]
    tokens = []
    for config in (None, {"method": method, "num_speculative_tokens": 4}):
        with LLM("demo", device="cpu", max_num_seqs=1, max_model_len=512, speculative_config=config) as llm:
            outputs = llm.generate([PROMPT] * 2, params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            stats = llm.stats()
    assert tokens[0] == tokens[1]
    assert stats.drafts.draft_tokens or method == "eagle3"  # the head knows no such text
