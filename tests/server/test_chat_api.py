"""POST /v1/chat/completions against a running server."""

import re

import pytest
from server_harness import ALPHABET, TOKENS, error_of, events, listening_core, serving

from gapless.engine.frontdoor import ModelAssets

HELLO = [{"role": "user", "content": "hello"}]


def post(client, **fields):
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **fields})


@pytest.fixture
def prompts():
    """A server whose core keeps the prompts that it was given."""
    seen = []

    core = listening_core(lambda request: seen.append(TOKENS.decode(request.tokens.tolist(), False)))
    with serving(core=core) as server, server.client() as client:
        client.seen = seen
        yield client


def test_a_chat_answer_has_the_fields_of_openai(client):
    body = post(client, max_tokens=5).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "abcde"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt = len(TOKENS.encode("<user>hello<assistant>"))
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}


def test_without_a_limit_it_goes_on_to_the_end_of_the_context(client):
    body = post(client).json()
    assert body["usage"]["total_tokens"] == 1024
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_beats_max_tokens(client):
    assert post(client, max_completion_tokens=3, max_tokens=9).json()["choices"][0]["message"]["content"] == "abc"
    error = error_of(post(client, max_completion_tokens=0))
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("max_completion_tokens must be")


def test_several_answers_come_in_their_order(client):
    body = post(client, n=3, max_tokens=2).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "ab"), (1, "ab"), (2, "ab")]


def test_a_streamed_chat_comes_in_order(client):
    messages = [{"role": "user", "content": "~"}]
    found = events(post(client, messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}))
    first, *middle, usage = found
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in middle) == "abcdef"
    assert all("role" not in event["choices"][0]["delta"] for event in middle)
    assert [event["choices"][0]["finish_reason"] for event in middle] == [None] * (len(middle) - 1) + ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    same = {(event["id"], event["object"], event["created"], event["model"]) for event in found}
    assert len(same) == 1
    assert first["object"] == "chat.completion.chunk"


def test_each_choice_of_a_stream_opens_and_ends_once(client):
    found = events(post(client, n=3, max_tokens=4, stream=True))
    for index in range(3):
        mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abcd"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"


def test_the_stop_reason_is_in_the_last_chunk(client):
    found = events(post(client, stop=["cd"], stream=True))
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["choices"][0]["stop_reason"] == "cd"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in found) == "ab"


def test_a_stream_that_ends_at_once_is_still_whole(client):
    """The stop string swallows every token: role, end and [DONE] still come, and no text between them."""
    found = events(post(client, stop=["ab"], stream=True))
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta == {"content": ""} for delta in deltas[1:-1])  # a token that is held back, on its own
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>hello<assistant>"),
        ({"messages": [{"role": "developer", "content": "be"}, *HELLO]}, "<system>be<user>hello<assistant>"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "<user>ab<assistant>",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "[1 tools]<user>hello<assistant>"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "[1 tools]<user>hello"),
        (
            {
                "tools": [{"type": "function", "function": {"name": name}} for name in "fgh"],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}, {"name": "f"}]},
            },
            "[2 tools]<user>hello<assistant>",
        ),
        ({"reasoning_effort": "low"}, "<user>hello<assistant>low "),
        ({"add_generation_prompt": False}, "<user>hello"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<user>hello<assistant>hm "),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "we"}], "continue_final_message": True},
            "<user>hello<assistant>we",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": None, "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}
                    ]},
                    {"role": "tool", "tool_call_id": "1", "content": "7", "name": "f"},
                ]
            },
            "<user>hello<assistant><tool>7<assistant>",
        ),
    ],
)  # fmt: skip
def test_the_model_sees_the_prompt_that_the_template_makes(prompts, fields, prompt):
    response = post(prompts, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    assert prompts.seen[-1].startswith(prompt)
    assert len(prompts.seen[-1]) == len(prompt) or "tool_choice" in fields


def test_text_of_tool_replies_is_content(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    message = post(client, tools=tools, max_tokens=4).json()["choices"][0]["message"]
    assert message["content"] == "abcd"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], None),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (["hello"], "messages[0]"),
        ("hello", "messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], None),
    ],
)
def test_wrong_messages_are_named(client, messages, param):
    response = post(client, messages=messages)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("messages")
    if param:
        assert error["param"] == param


def test_a_model_without_a_template_says_so():
    from server_harness import tokenizer

    front = ModelAssets(tokenizer(template=None), (), {})
    with serving(front=front) as server, server.client() as client:
        response = post(client)
        assert response.status_code == 400
        assert error_of(response)["code"] == "no_chat_template"
        assert client.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == ALPHABET[:16]
