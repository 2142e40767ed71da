"""Replies of /v1/chat/completions that have reasoning and calls, whole and streamed."""

import pytest
from form_core import FormCore
from server_harness import TOKENS, events, serving

from gapless.server.config import ServerConfig

CALLS = [f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2)]
SAID = [*TOKENS.encode(f"<think>hm</think>I add.{''.join(CALLS)}"), TOKENS.eos_token_id]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "max_tokens": 200}


@pytest.fixture(scope="module")
def client():
    config = ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="think", disable_uvicorn_access_log=True)

    def core():
        return FormCore(TOKENS, lambda _, count: SAID[min(count, len(SAID) - 1)])

    with serving(config, core=core) as server, server.client() as client:
        yield client


def said(client, **fields):
    """Texts and arguments of the message, by field: of a whole answer, and the same of a stream's deltas joined."""
    response = client.post("/v1/chat/completions", json={**BODY, **fields})
    choice = response.json()["choices"][0]
    whole = {name: choice["message"].get(name, "") for name in ("reasoning", "reasoning_content", "content")}
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    response = client.post("/v1/chat/completions", json={**BODY, **fields, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events(response)]
    assert whole == {name: "".join(delta.get(name) or "" for delta in deltas) for name in whole}
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [
        "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == i) for i in range(len(calls))
    ]
    assert {piece["index"] for piece in pieces} == set(range(len(calls)))
    return whole, calls


def test_reasoning_has_both_names_and_is_no_content(client):
    whole, calls = said(client)
    assert whole == {"reasoning": "hm", "reasoning_content": "hm", "content": "I add."}
    assert calls == ['{"a": 1}', '{"a": 2}']


def test_reasoning_that_is_not_wanted_is_left_out_under_both_names(client):
    whole, calls = said(client, include_reasoning=False)
    assert whole == {"reasoning": "", "reasoning_content": "", "content": "I add."} and len(calls) == 2


def test_a_second_call_is_left_out_where_calls_are_not_parallel(client):
    assert said(client, parallel_tool_calls=False)[1] == ['{"a": 1}']
