"""`tool_calls` as a reason means calls that have ended, on all three APIs."""

import json

import openai
import pytest
from jsonschema import validate
from message_events import events_of
from server_harness import GO_ON, serving_forms
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


def test_an_error_in_mid_stream_is_raised_by_the_official_client(official):
    GO_ON.clear()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "!"}], "stream": True}
    with pytest.raises(openai.APIError, match="incident"):
        for chunk in official.chat.completions.create(**asked):
            if chunk.choices[0].delta.content:
                GO_ON.set()
    assert GO_ON.is_set()
