"""POST /v1/messages against a running server: whole and streamed messages, counts, and errors in Anthropic's form."""

import json
import re

import pytest
from message_events import assembled, error_of, events_in, events_of
from server_harness import TOKENS, broken_off, fake_core, script, serving, serving_forms

from gapless.server.dialects.messages.errors import ERRORS, error_body
from gapless.server.errors import ApiError, form_of

KEY = "a-key"
ADD = {
    "name": "add",
    "description": "Add two numbers",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REPLIES = {
    "plain": "Forty-two.",
    "silent": "",
    "thoughtful": "<think>\nLet me see.\n</think>\n\nForty-two.",
    "calling": ONE,
    "all": f"<think>hm</think>I add.\n{ONE}\n{ONE.replace('1', '2')}",
    "empty-call": '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "extreme-call": ONE.replace("1", '1.50, "b": 123456789012345678901234567890, "c": "\\ud83d\\ude00"'),
    "broken-call": ONE.replace("1", '"\\ud800"'),
    "wordy": "one two three",
    "repeated": "<think>hm</think>I add.<think>so</think>Done.",
}


def speak(request, count):
    """The reply that the prompt names, then the end of the sequence; else the alphabet."""
    asked = re.search(r"Say ([a-z-]+)", TOKENS.decode(request.tokens.tolist()))
    if asked is None:
        return script(request, count)
    ids = [*TOKENS.encode(REPLIES[asked[1]]), TOKENS.eos_token_id]
    return ids[min(count, len(ids) - 1)]


@pytest.fixture(scope="module")
def server():
    with serving_forms("think", speak, TOKENS, api_key=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client(headers={"x-api-key": KEY}) as client:
        yield client


def body_of(word="plain", **fields):
    messages = [{"role": "user", "content": word if " " in word else f"Say {word}"}]
    return {"model": "tiny", "max_tokens": 200, "messages": messages, "tools": [ADD], **fields}


def post(client, word="plain", **fields):
    return client.post("/v1/messages", json=body_of(word, **fields))


def whole(client, word="plain", **fields):
    response = post(client, word, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client, word="plain", **fields):
    return events_of(post(client, word, stream=True, **fields))


def plain(message):
    """A message without what differs from answer to answer."""
    blocks = [{**block, "id": block["id"][:6]} if "id" in block else block for block in message["content"]]
    kept = {name: value for name, value in message.items() if name not in ("id", "usage")}
    return {**kept, "content": blocks, "output_tokens": message["usage"]["output_tokens"]}


def test_a_message_has_the_fields_of_anthropic(client):
    message = whole(client)
    assert re.fullmatch("msg_[0-9a-f]{24}", message.pop("id"))
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Forty-two."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    prompt = len(TOKENS.encode("[1 tools]<user>Say plain<assistant>"))
    assert usage == {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len("Forty-two.") + 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }


HM = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}


def text(text):
    return {"type": "text", "text": text}


def use(**arguments):
    return {"type": "tool_use", "id": "toolu_", "name": "add", "input": arguments}


@pytest.mark.parametrize(
    ("word", "fields", "content", "reason"),
    [
        ("plain", {}, [text("Forty-two.")], "end_turn"),
        ("silent", {}, [], "end_turn"),
        ("thoughtful", {}, [{**HM, "thinking": "Let me see."}, text("Forty-two.")], "end_turn"),
        ("thoughtful", {"tools": []}, [{**HM, "thinking": "Let me see."}, text("Forty-two.")], "end_turn"),
        ("thoughtful", {"thinking": {"type": "adaptive", "display": "omitted"}}, [text("Forty-two.")], "end_turn"),
        ("calling", {}, [use(a=1)], "tool_use"),
        ("all", {}, [HM, text("I add."), use(a=1), use(a=2)], "tool_use"),
        ("empty-call", {}, [use()], "tool_use"),
        ("calling", {"tool_choice": {"type": "none"}}, [text(ONE)], "end_turn"),
        ("repeated", {}, [HM, text("I add.<think>so\nDone.")], "end_turn"),
        ("wordy", {"stop_sequences": ["z", " three"]}, [text("one two")], "stop_sequence"),
        ("wordy", {"max_tokens": 7}, [text("one two")], "max_tokens"),
        ("wordy", {"max_tokens": 0}, [], "max_tokens"),
    ],
)
def test_a_streamed_message_is_the_whole_one(client, word, fields, content, reason):
    message = whole(client, word, **fields)
    assert plain(message)["content"] == content
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (" three" if reason == "stop_sequence" else None)
    events = streamed(client, word, **fields)
    assert events[0]["message"]["stop_reason"] is None and events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    assert plain(assembled(events)) == plain(message)


def test_text_without_a_parser_is_streamed_token_by_token():
    with serving() as server, server.client() as client:
        body = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": "~"}]}
        assert "output_tokens_details" not in client.post("/v1/messages", json=body).json()["usage"]
        events = streamed(client, messages=body["messages"], max_tokens=6, tools=[])
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(deltas) == "abcdef" and len(deltas) > 1
        assert assembled(events)["stop_reason"] == "max_tokens"
        stopped = assembled(streamed(client, messages=body["messages"], stop_sequences=["ab"], tools=[]))
        assert (stopped["content"], stopped["stop_sequence"]) == ([], "ab")


def test_a_call_that_is_cut_off_is_marked_and_ends_by_max_tokens(client):
    message = whole(client, "calling", max_tokens=len(ONE) - 18)
    (block,) = message["content"]
    assert message["stop_reason"] == "max_tokens"
    assert block["name"] == "add" and set(block["input"]) == {"INVALID_JSON"}
    pieces = [
        event["delta"]["partial_json"]
        for event in streamed(client, "calling", max_tokens=len(ONE) - 18)
        if event["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == block["input"]["INVALID_JSON"]


def test_max_tokens_beyond_the_context_is_lowered_to_it(client):
    message = whole(client, "say hello", max_tokens=64_000)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 1024
    assert message["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("word", ["plain", "calling"])
def test_the_count_of_tokens_is_that_of_the_prompt(client, word):
    body = {name: value for name, value in body_of(word).items() if name != "max_tokens"}
    response = client.post("/v1/messages/count_tokens", json={**body, "system": "Be brief."})
    assert response.json() == {"input_tokens": whole(client, word, system="Be brief.")["usage"]["input_tokens"]}


def test_arguments_of_a_call_are_passed_on_as_the_model_wrote_them(client):
    assert '"input":{"a": 1.50, "b": 123456789012345678901234567890, "c": "' in post(client, "extreme-call").text
    (block,) = whole(client, "broken-call")["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": "\\ud800"}'}


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_has_the_name_of_its_request(client, stream):
    named = {"x-request-id": "mine"}
    for fields in ({}, {"top_p": 2}):
        response = client.post("/v1/messages", json=body_of(stream=stream, **fields), headers=named)
        assert (response.headers["request-id"], response.headers["x-request-id"]) == ("mine", "mine")
        assert len(post(client, stream=stream, **fields).headers["request-id"]) == 32


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_either_header_brings_the_key_and_headers_of_versions_are_not_needed(server, headers):
    headers |= {"anthropic-beta": "anything-2030-01-01"}
    with server.client(headers=headers) as client:
        assert post(client).status_code == 200
        assert client.post("/v1/messages?beta=true", json=body_of()).status_code == 200


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        ("tools[3].function.parameters: add: no", "tools[3].function.parameters", "tools.3.input_schema: add: no"),
        ("tools are too large", "tools", "tools are too large"),
        ("the chat template does not print the final message", "continue_final_message",
         "messages: the chat template does not print the final message"),
        ("messages[0].role: expected a string", "messages[0].role", "messages.0.role: expected a string"),
        ("it is not served", "model", "model: it is not served"),
        ("no", None, "no"),
    ],
)  # fmt: skip
def test_a_fault_is_named_by_the_field_of_this_api(message, param, shown):
    body = json.loads(error_body(ApiError(400, message, param=param), "mine"))
    assert body["error"] == {"type": "invalid_request_error", "message": shown} and body["request_id"] == "mine"


def test_fields_that_change_no_token_are_taken(client):
    fields = {"metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    more = {"context_management": {"edits": []}, "mcp_servers": [], "container": None, "field_of_the_future": 1}
    assert whole(client, **fields, **more)["content"] == [text("Forty-two.")]


def test_a_full_queue_is_an_overload_a_time_limit_a_timeout_and_a_stop_unavailable():
    with serving(core=lambda: fake_core(max_queue=0)) as server, server.client() as client:
        response = post(client, tools=[])
        assert response.status_code == 529 and response.headers["retry-after"]
        error_of(response, "overloaded_error")
    with serving() as server, server.client(headers={"x-request-timeout": "0.05"}) as client:
        response = post(client, "say ~", tools=[], max_tokens=900)
        assert response.status_code == 504
        error_of(response, "timeout_error")
        server.state.stopping = True
        response = post(client, tools=[])
        assert response.status_code == 503 and response.headers["retry-after"]
        error_of(response, "api_error")


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/messages-of-others", "/v2/messages", "/v1/models"])
def test_errors_of_other_paths_have_the_form_of_openai(path):
    assert form_of({"path": path, "headers": []}, [ERRORS]) is None


def test_a_stream_that_fails_ends_with_an_error_event():
    with serving() as server, server.client(headers={"x-request-id": "mine"}) as client:
        last = events_in(broken_off(client, "/v1/messages", body_of("say !", tools=[])))[-1]
    assert last["type"] == "error" and last["request_id"] == "mine"
    assert last["error"]["type"] == "api_error" and "incident" in last["error"]["message"]
