"""Answers that the last message has begun: thinking, a call, a form go on over HTTP."""

import json

import openai
import pytest
from jsonschema import validate
from message_events import assembled, events_of
from server_harness import MARKED as TOKENS
from server_harness import events, serving_forms

SPLIT = "|"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
REPLIES = {
    "<think>\nLet me see, |ok</think>\n\nHi": {"reasoning": "ok", "content": "Hi"},
    "<think>hm</think>|Hi": {"content": "Hi"},
    "<think>hm</think>\n\nHello| you": {"content": " you"},
    "<think>|a</think>b": {"reasoning": "a", "content": "b"},
    "Hello| you": {"content": " you"},
    CALL.replace("Os", "Os|"): {"calls": ['{"city": "Oslo"}']},
    CALL.replace('"name": ', '"name": |'): {"calls": ['{"city": "Oslo"}']},
    CALL.replace('": {"', '|": {"'): {"calls": ['{"city": "Oslo"}']},
    f"{CALL}{CALL[:50]}|{CALL[50:]}{CALL}": {"calls": ['{"city": "Oslo"}'] * 2},
    f"<think>a</think>{CALL[:50]}|{CALL[50:]}": {"calls": ['{"city": "Oslo"}']},
}  # fmt: skip


def script(request, count):
    """The rest of the reply that the end of the prompt begins."""
    prompt = TOKENS.decode(request.tokens.tolist(), skip_special_tokens=False)
    found = [one.split(SPLIT) for one in REPLIES if prompt.endswith(one.split(SPLIT)[0])]
    _, rest = max(found, key=lambda one: len(one[0]))
    said = TOKENS.encode(rest, False)
    return said[count] if count < len(said) else TOKENS.eos_token_id


@pytest.fixture(scope="module")
def server():
    with serving_forms("think", script) as running:
        yield running


def messages_of(reply):
    user = {"role": "user", "content": "Write <think> first, or <tool_call>"}
    return [user, {"role": "assistant", "content": reply.split(SPLIT)[0]}]


GO_ON = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("reply", REPLIES)
def test_a_chat_goes_on_where_its_last_message_ends(server, reply):
    asked = {"messages": messages_of(reply), "tools": [TOOL], "max_tokens": 200, **GO_ON}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        chunks = events(client.post("/v1/chat/completions", json={**asked, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    means = {"reasoning": "", "content": "", "calls": [], **REPLIES[reply]}
    assert (message.get("reasoning") or "", message["content"] or "") == (means["reasoning"], means["content"])
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == means["calls"]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == means[name]
    pieces = [(c["index"], c["function"]) for delta in deltas for c in delta.get("tool_calls", ())]
    joined = ["".join(f["arguments"] for i, f in pieces if i == index) for index in range(len(means["calls"]))]
    assert joined == means["calls"]
    assert [f["name"] for _, f in pieces if "name" in f] == ["f"] * len(joined)


@pytest.mark.parametrize("reply", REPLIES)
def test_a_message_goes_on_where_the_last_turn_ends(server, reply):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {"model": "tiny", "messages": messages_of(reply), "tools": tools, "max_tokens": 200}
    means = {"reasoning": "", "content": "", "calls": [], **REPLIES[reply]}
    with server.client() as client:
        whole = client.post("/v1/messages", json=asked).json()
        streamed = assembled(events_of(client.post("/v1/messages", json={**asked, "stream": True})))
    for message in (whole, streamed):
        blocks = message["content"]
        assert "".join(block["text"] for block in blocks if block["type"] == "text") == means["content"]
        assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == means["reasoning"]
        assert [b["input"] for b in blocks if b["type"] == "tool_use"] == [json.loads(one) for one in means["calls"]]


SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("begun", ['{"city": "', '{"city":"Os', "{", "<think>hm</think>\n\n{", "Here: {"])
def test_a_form_goes_on_where_the_last_message_ends(server, begun):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asks = {"model": "tiny", "messages": messages_of(begun), "response_format": form, "extra_body": GO_ON}
        said = client.chat.completions.create(**asks, max_tokens=200).choices[0].message.content
        validate(json.loads(begun[begun.index("{") :] + said), SCHEMA)
        asks["messages"] = messages_of('{"town": "')
        with pytest.raises(openai.BadRequestError, match="the final message begins an output that is not of this form"):
            client.chat.completions.create(**asks, max_tokens=200)
