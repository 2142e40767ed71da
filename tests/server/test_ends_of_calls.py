"""`tool_calls` as a reason means calls that have ended, on all three APIs."""

import json

import openai
import pytest
from jsonschema import validate
from message_events import events_of
from server_harness import HI, serving_forms
from server_harness import MARKED as TOKENS
from sharpest import sharpest

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
END = "</tool_call>"
ONE = f'<tool_call>{{"name": "f", "arguments": {{"city": "Oslo"}}}}{END}'
TWO = ONE.replace("Oslo", "Paris, France")
NO_BRACE = ONE.replace(f"}}}}{END}", "}")


@pytest.fixture(scope="module")
def server():
    with serving_forms("think") as running:
        yield running


@pytest.fixture(scope="module")
def quick():
    """A server whose answers do not begin with reasoning, which a random model would not end."""
    with serving_forms("none") as running:
        yield running


@pytest.fixture(scope="module")
def official(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


CUTS = {
    "a second call that is not passed on": (ONE + TWO, {"stop": [", Fr"], "parallel_tool_calls": False},
     "tool_calls", "tool_use"),
    "max_tokens in a call": (ONE, {"max_tokens": 45}, "length", "max_tokens"),
    "whole calls": (ONE + TWO, {}, "tool_calls", "tool_use"),
    "a stop string in a call": (ONE, {"stop": ["slo"]}, "stop", "end_turn"),
    "a stop string in the second call": (ONE + TWO, {"stop": [", Fr"]}, "stop", "end_turn"),
    "a stop string in a name": (ONE + TWO, {"stop": ['me": "f", "arguments": {"city": "P']}, "tool_calls", "tool_use"),
    "a stop token in a call": (ONE, {"stop_token_ids": TOKENS.encode("O")}, "stop", "end_turn"),
    "an end of sequence in a call": (ONE[:-18], {}, "stop", "end_turn"),
    "an end of sequence before the arguments": (ONE[:-35], {}, "stop", "end_turn"),
    "a stop string after a call": (f"{ONE} done", {"stop": ["one"]}, "tool_calls", "tool_use"),
    "a stop string at the end of a call": (ONE, {"stop": [END]}, "tool_calls", "tool_use"),
    "whole arguments without the last brace": (NO_BRACE, {}, "tool_calls", "tool_use"),
}  # fmt: skip
"""The text, the fields, and the reason of the end on OpenAI's APIs and on Anthropic's"""
each = pytest.mark.parametrize("cut", sharpest(CUTS, keep=4))


@each
def test_a_chat_ends_with_tool_calls_only_where_all_have_ended(official, cut):
    said, fields, reason, _ = CUTS[cut]
    own = {name: fields[name] for name in ("stop_token_ids",) if name in fields}
    asks = {
        "model": "tiny", "messages": [{"role": "user", "content": f"SAY[{said}]SAY"}], "tools": [TOOL],
        "max_tokens": 300,
        **{name: value for name, value in fields.items() if name not in own}, "extra_body": own,
    }  # fmt: skip
    choice = official.chat.completions.create(**asks).choices[0]
    chunks = [chunk.choices[0] for chunk in official.chat.completions.create(**asks, stream=True)]
    assert choice.finish_reason == chunks[-1].finish_reason == reason
    calls = [call.function.arguments for call in choice.message.tool_calls or ()]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    joined = [
        "".join(one.function.arguments or "" for one in pieces if one.index == index) for index in range(len(calls))
    ]
    assert calls == joined
    if reason == "tool_calls":
        assert calls
        for arguments in calls:
            validate(json.loads(arguments), PARAMETERS)
    else:
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(calls[-1])


@each
def test_a_message_ends_with_tool_use_only_where_all_have_ended(server, cut):
    said, fields, _, reason = CUTS[cut]
    if "stop_token_ids" in fields:
        return  # which this API has not
    stop = fields.get("stop", [])
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": f"SAY[{said}]SAY"}], "stop_sequences": stop,
        "tools": [{"name": "f", "input_schema": PARAMETERS}], "max_tokens": fields.get("max_tokens", 300),
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": "parallel_tool_calls" in fields},
    }  # fmt: skip
    with server.client() as client:
        message = client.post("/v1/messages", json=asked).json()
        ending = events_of(client.post("/v1/messages", json={**asked, "stream": True}))[-2]["delta"]
    assert message["stop_reason"] == ending["stop_reason"] == ("stop_sequence" if stop else reason)
    used = [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert reason != "tool_use" or all("city" in given for given in used)


@each
def test_the_last_item_of_a_response_is_incomplete_where_it_was_cut(official, cut):
    said, fields, reason, _ = CUTS[cut]
    own = {name: fields[name] for name in ("stop", "stop_token_ids") if name in fields}
    asks = {
        "model": "tiny", "input": f"SAY[{said}]SAY",
        "tools": [{"strict": False, "type": "function", **TOOL["function"]}],
        "max_output_tokens": fields.get("max_tokens", 300), "extra_body": own,
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
    }  # fmt: skip
    response = official.responses.create(**asks)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.status for call in calls[:-1]] == ["completed"] * (len(calls) - 1)
    assert calls[-1].status == ("completed" if reason == "tool_calls" else "incomplete")
    assert response.status == ("incomplete" if reason == "length" else "completed")
    done = [event for event in official.responses.create(**asks, stream=True) if event.type.endswith("item.done")]
    assert [event.item.status for event in done] == [item.status for item in response.output]


def test_a_function_without_parameters_takes_none_on_all_apis(quick):
    flat = [{"type": "function", "name": "now"}, {"type": "function", "name": "now", "parameters": None}]
    flat += [{**one, "strict": False} for one in flat]
    with quick.client() as client:
        for tool in flat:
            function = {name: value for name, value in tool.items() if name != "type"}
            chat = {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"type": "function", "function": function}],
            }
            for choice in ("required", {"type": "function", "function": {"name": "now"}}):
                answer = client.post(
                    "/v1/chat/completions", json={**chat, "tool_choice": choice, "max_tokens": 300}
                ).json()
                calls = answer["choices"][0]["message"]["tool_calls"]
                assert calls and all(json.loads(call["function"]["arguments"]) == {} for call in calls)
            asked = {"input": "hi", "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}
            items = client.post("/v1/responses", json=asked).json()["output"]
            assert items and all(json.loads(item["arguments"]) == {} for item in items)
        schemas = ({"type": "object", "properties": None, "required": None}, {"type": ["object", "null"]}, {})
        for schema in (*schemas, {"properties": {"a": {"type": "null", "enum": None}}, "additionalProperties": None}):
            asked = {"model": "tiny", "messages": HI, "max_tokens": 300, "tool_choice": {"type": "any"}}
            answer = client.post("/v1/messages", json={**asked, "tools": [{"name": "f", "input_schema": schema}]})
            assert answer.json()["content"][-1]["type"] == "tool_use", answer.text


def test_a_schema_whose_spare_keywords_say_nothing_is_kept_to_on_all_apis(quick):
    flags = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    schema = {
        "$schema": "https://example.com/own", "type": "object", "properties": {"flags": {**flags, "maxProperties": 1}},
        "required": ["flags"], "additionalProperties": False, "not": False, "minProperties": 0, "x-order": ["flags"],
    }  # fmt: skip
    chat = {"messages": HI, "model": "tiny", "max_tokens": 300}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    with quick.client() as client:
        for fields in ({"response_format": {"type": "json_schema", "json_schema": form}}, {"guided_json": schema}):
            answer = client.post("/v1/chat/completions", json={**chat, **fields, "chat_template_kwargs": {}}).json()
            assert answer["choices"][0]["finish_reason"] in ("stop", "length"), answer
        answer = client.post("/v1/responses", json={"input": "hi", "text": {"format": form}, "max_output_tokens": 300})
        assert answer.status_code == 200, answer.text
        asked = {**chat, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        assert client.post("/v1/messages", json=asked).status_code == 200
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        asked = {**chat, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["tool_calls"]
        validate(json.loads(call["function"]["arguments"]), {key: schema[key] for key in schema if key != "$schema"})


def test_schemas_are_shown_to_the_model_without_their_nulls(server):
    tool = {
        "name": "f",
        "description": None,
        "parameters": {"type": "object", "required": None, "properties": {"a": {}}},
    }
    with server.client() as client:
        for choice in ("auto", "none", None):
            asked = {
                "messages": [{"role": "user", "content": "SAY[x]SAY"}],
                "tools": [{"type": "function", "function": tool}],
            }
            answer = client.post("/v1/chat/completions", json={**asked, "tool_choice": choice, "max_tokens": 5})
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "x"
