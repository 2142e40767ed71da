"""/v1/responses over HTTP: items and events in the official client's own types, and what is refused, by its field."""

import json
import re
import threading
from typing import Any

import pytest
from jsonschema import validate
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_harness import ALPHABET, MODEL, RESPONSES, broken_off, error_of, serving_forms
from server_harness import MARKED as TOKENS

from gapless.server.dialects.responses import input as conversation
from gapless.server.dialects.responses.request import ResponsesRequest
from gapless.server.protocol import parse

EVENT = TypeAdapter(ResponseStreamEvent)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather", "parameters": CITY}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files"}
LOOSE = {**WEATHER, "strict": False}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
PATCHED = '<tool_call>{"name": "apply_patch", "arguments": {"input": "+ \\"a\\"\\n"}}</tool_call>'


@pytest.fixture(scope="module")
def client():
    with serving_forms("think") as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def formed():
    """A client of a server whose answers never begin with reasoning, which a random model would not end."""
    with serving_forms("none") as server, server.client() as client:
        yield client


def ask(client: Any, said: str | None = None, **fields: Any) -> dict[str, Any]:
    response = client.post(RESPONSES, json={"input": said if said is None else f"SAY[{said}]SAY", **fields})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def streamed(client: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of the type that the official client has for its name."""
    response = client.post(RESPONSES, json={"stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    *blocks, rest = text.split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert rest == "" and [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def names(events: list[dict[str, Any]]) -> list[str]:
    """Types of events without their prefix, those of a row of deltas once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [one for one, before in zip(types, ["", *types], strict=False) if one != before]


def bare(value: Any) -> Any:
    """Without ids and times, which differ between two answers."""
    if isinstance(value, dict):
        drawn = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: bare(one) for name, one in value.items() if name not in drawn}
    return [bare(one) for one in value] if isinstance(value, list) else value


def test_a_text_is_answered_by_a_message(client):
    body = ask(client, "Hello", instructions="Be short.", metadata={"a": "b"}, temperature=0.5, store=True)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert body["id"].startswith("resp_") and item["id"].startswith("msg_") and body["model"] == MODEL
    assert (body["status"], body["metadata"], body["temperature"]) == ("completed", {"a": "b"}, 0.5)
    assert body["store"] is False and body["instructions"] == "Be short." and body["tool_choice"] == "auto"
    prompt = len(TOKENS.encode("<system>Be short.<user>SAY[Hello]SAY<assistant>"))
    used = {"input_tokens": prompt, "output_tokens": 6, "total_tokens": prompt + 6}
    assert {name: body["usage"][name] for name in used} == used
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert body["usage"]["input_tokens_details"]["cached_tokens"] >= 0


def test_an_answer_that_is_cut_off_is_incomplete(client):
    body = ask(client, input="hi", max_output_tokens=5)
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete" and body["output"][0]["content"][0]["text"] == "abcde"
    events = streamed(client, input="hi", max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_the_events_of_a_message_come_in_openais_order(client):
    events = streamed(client, input="SAY[Hello]SAY")
    assert names(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "Hello"
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


THOUGHT = f"<think>So.</think>\n\nI look. {CALL}\n{PATCHED}"


def test_reasoning_text_and_calls_are_items_in_their_order(client):
    body = ask(client, THOUGHT, tools=[LOOSE, PATCH])
    thought, message, call, patch = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "So."}] and thought["summary"] == []
    assert message["content"][0]["text"].strip() == "I look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", '{"city": "Oslo"}')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", '+ "a"\n')
    assert call["call_id"].startswith("call_") and call["call_id"] != patch["call_id"] and call["id"] != patch["id"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("So.") + 1


def test_a_stream_ends_with_the_response_that_comes_whole(client):
    fields = {"input": f"SAY[{THOUGHT}]SAY", "tools": [LOOSE, PATCH]}
    events = streamed(client, **fields)
    assert bare(events[-1]["response"]) == bare({**ask(client, **fields), "usage": events[-1]["response"]["usage"]})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert {event["item"].get("status") for event in added} == {"in_progress"}
    assert {item.get("status") for item in done} == {"completed"}
    assert names(events)[2:8] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert names(events)[14:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for stem, field in (("output_text", "text"), ("function_call_arguments", "arguments")):
        pieces = "".join(event["delta"] for event in events if event["type"] == f"response.{stem}.delta")
        assert [event[field] for event in events if event["type"] == f"response.{stem}.done"] == [pieces]


def test_the_input_of_a_custom_tool_is_kept_when_it_has_another_form(client):
    said = PATCHED.replace('"input"', '"patch"')
    (call,) = ask(client, said, tools=[PATCH])["output"]
    assert json.loads(call["input"]) == {"patch": '+ "a"\n'}


def test_an_answer_without_a_text_is_an_empty_message(client):
    (item,) = ask(client, "")["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_are_those_of_the_text(client, fields):
    body = ask(client, "<think>So.</think>Hello", **fields)
    scores = body["output"][1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in scores).endswith("Hello")
    events = streamed(client, input="SAY[Hello]SAY", **fields)
    pieces = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert [one["token"] for one in pieces] == list("Hello")
    assert {len(one["top_logprobs"]) for one in pieces} == {fields.get("top_logprobs", 0)}
    (message,) = ask(client, "ok ", **fields)["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["o", "k", " "]


def test_log_probabilities_end_where_a_stop_string_cuts_the_text(client):
    events = streamed(client, input="SAY[Hello END]SAY", stop=["END"], top_logprobs=1)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert (part["text"], "".join(one["token"] for one in part["logprobs"])) == ("Hello ", "Hello ")


def test_an_output_has_the_form_that_is_asked_for(formed):
    form = {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}
    body = ask(formed, input="hi", text={"format": form}, max_output_tokens=300)
    validate(json.loads(body["output"][-1]["content"][0]["text"]), CITY)
    assert body["text"] == {"format": form}
    free = ask(formed, input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert isinstance(json.loads(free["output"][-1]["content"][0]["text"]), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_required_keeps_to_its_schema(formed, choice):
    body = ask(formed, input="hi", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    assert len(calls) == 1 and body["tool_choice"] == choice and body["parallel_tool_calls"] is False
    validate(json.loads(calls[0]["arguments"]), CITY)


@pytest.mark.parametrize("hosted", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
def test_tools_that_run_on_openais_servers_are_left_out(formed, hosted):
    tools = [hosted, WEATHER, {**hosted, "type": "x"}, PATCH]
    body = ask(formed, input="hi", tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert body["output"][-1]["type"] in ("function_call", "custom_tool_call")
    assert body["tools"] == [WEATHER, PATCH]
    assert ask(formed, input="hi", tools=[hosted], max_output_tokens=3)["tools"] == []


def test_the_input_of_a_custom_tool_keeps_to_its_regex(formed):
    dated = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"}}
    body = ask(formed, input="hi", tools=[dated], tool_choice={"type": "custom", "name": "apply_patch"})
    assert body["output"]
    for call in body["output"]:
        assert call["type"] == "custom_tool_call" and re.fullmatch(r"[0-9]{4}-[0-9]{2}", call["input"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": "hi"}, "<user>hi"),
        ({"input": "hi", "instructions": "Be."}, "<system>Be.<user>hi"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, "<user>hi"),
        ({"instructions": "Be.", "input": [{"type": "message", "role": "developer", "content": "Do."}]},
         "<system>Be.\n\nDo."),
        ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "<user>a<system>b"),
        ({"input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "status": "completed"},
            {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "y"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
            {"role": "assistant", "content": "c"}, {"role": "assistant", "content": "d"}]},
         "<user>a<assistant:t>bf{\"x\": 1};g{'input': 'y'};<tool>r<tool>s<assistant>c<assistant>d"),
        *(({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], **content},
                      {"role": "user", "content": "a"}]}, "<assistant:t><user>a")
          for content in ({}, {"content": None}, {"content": []})),
    ],
)  # fmt: skip
def test_items_become_the_messages_of_the_template(fields, text):
    said = ""
    for message in parse(json.dumps(fields).encode(), ResponsesRequest).messages():
        thought = f":{message['reasoning_content']}" if "reasoning_content" in message else ""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said += f"<{message['role']}{thought}>{message.get('content', '')}"
        said += "".join(f"{call['name']}{call['arguments']};" for call in calls)
    assert said == text


def test_the_client_that_sends_everything_is_answered(client):
    """What Codex sends, whose fields mostly change nothing."""
    fields = {
        "model": MODEL, "instructions": "Be.", "tools": [LOOSE, PATCH], "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "client_metadata": {"session": "1"}, "text": {"verbosity": "low"}, "stream_options": {},
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "SAY[ok]SAY"}]}],
    }  # fmt: skip
    ended = streamed(client, **fields)[-1]["response"]
    assert ended["output"][0]["content"][0]["text"] == "ok" and ended["reasoning"]["effort"] == "medium"


def test_a_failure_before_the_first_event_is_a_status_and_a_later_one_an_event(client):
    response = client.post(RESPONSES, json={"input": "!"})
    assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
    events = events_of(broken_off(client, RESPONSES, {"input": "!"}, until="response.output_text.delta"))
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    (item,) = events[-1]["response"]["output"]
    assert item["status"] == "incomplete" and ALPHABET.startswith(item["content"][0]["text"][:26])
    early = client.post(RESPONSES, json={"input": "x" * 5000, "stream": True})
    assert early.status_code == 400 and error_of(early)["param"] == "input"


class Grown(str):
    """A text that may be joined, but not be added to."""

    def __add__(self, other: str) -> str:
        raise AssertionError("a text of the input is copied for each that joins it")

    __radd__ = __format__ = __add__


def test_texts_that_become_one_message_are_joined_once(monkeypatch):
    systems = [{"role": "system", "content": text} for text in "abc"]
    thoughts = [{"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "t"}]}] * 3
    monkeypatch.setattr(conversation, "text_of", lambda content, where: Grown("t"))
    first, second = conversation.messages_of(None, [*systems, *thoughts])
    assert first == {"role": "system", "content": "t\n\nt\n\nt"}
    assert second == {"role": "assistant", "reasoning_content": "ttt", "content": ""}


def test_the_input_is_read_on_a_thread_of_the_text(client, monkeypatch):
    threads = []
    read = ResponsesRequest.messages

    def messages(request):
        threads.append(threading.current_thread().name)
        return read(request)

    monkeypatch.setattr(ResponsesRequest, "messages", messages)
    assert ask(client, "Hello")["output"]
    assert [name.startswith("gapless-text") for name in threads] == [True]


def test_nothing_is_stored_and_nothing_embeds(client):
    for method in ("GET", "DELETE"):
        response = client.request(method, f"{RESPONSES}/resp_1")
        assert response.status_code == 404 and "not stored" in error_of(response)["message"]
    assert "not stored" in error_of(client.post(f"{RESPONSES}/resp_1/cancel"))["message"]
    for path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
        response = client.post(path, json={"model": MODEL, "input": "x"})
        assert response.status_code == 404 and "generates text" in error_of(response)["message"]
