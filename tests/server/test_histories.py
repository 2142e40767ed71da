"""Answers of ours as the history of the next request: wherever they were cut off, on all three APIs, and as one
prompt. Streamed calls are added up as Anthropic's client does."""

import json
import re

import openai
import pytest
from message_events import events_of
from server_harness import MODEL, TOKENS, serving_forms, tokenizer
from sharpest import sharpest

jiter = pytest.importorskip("jiter", reason="comes with openai")

TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra | tojson if extra is defined }}"
)
REPLIES = {
    "call": '<think>\nhm\n</think>\n\nI add. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n'
            "</tool_call>",
    "two": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": {}}'
           "</tool_call>",
    "wrong": '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "plain": "<think>so</think>Done.",
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add", "parameters": SCHEMA}
TOOL = {"type": "function", "function": ADD}
EVERY = sharpest((29, 1))
"""Cuts after every so many tokens"""
prompts = []


def speak(request, count):
    """What the last message asks for, then the end."""
    prompt = TOKENS.decode(request.tokens.tolist(), False)
    if count == 0:
        prompts.append(prompt)
    said = TOKENS.encode(REPLIES[re.findall(r"Say (\w+)", prompt)[-1]])
    return said[count] if count < len(said) else TOKENS.eos_token_id


@pytest.fixture(scope="module")
def server():
    with serving_forms("think", speak, tokenizer(TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def chat(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chatted(client, word, most, **dumped):
    talk = [{"role": "user", "content": f"Say {word}"}]
    asked = {"model": MODEL, "tools": [TOOL]}
    said = client.chat.completions.create(messages=talk, max_tokens=most, **asked).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "none"} for call in said.tool_calls or ()]
    talk += [said.model_dump(**dumped), *results, {"role": "user", "content": "Say plain"}]
    client.chat.completions.create(messages=talk, max_tokens=1, **asked)
    return prompts[-1]


def responded(client, word, most, **dumped):
    talk = [{"role": "user", "content": f"Say {word}"}]
    asked = {"model": MODEL, "tools": [{"type": "function", **ADD, "strict": False}]}
    answer = client.responses.create(input=talk, max_output_tokens=most, **asked)
    talk += [item.model_dump(**dumped) for item in answer.output]
    talk += [{"type": "function_call_output", "call_id": item.call_id, "output": "none"}
             for item in answer.output if item.type == "function_call"]  # fmt: skip
    client.responses.create(input=[*talk, {"role": "user", "content": "Say plain"}], max_output_tokens=1, **asked)
    return prompts[-1]


def messaged(client, word, most, stream=False):
    talk = [{"role": "user", "content": f"Say {word}"}]
    tool = {"name": "add", "description": "Add", "input_schema": SCHEMA}
    asked = {"model": MODEL, "tools": [tool]}
    response = client.post("/v1/messages", json={**asked, "messages": talk, "max_tokens": most, "stream": stream})
    said = added_up(events_of(response)) if stream else response.json()["content"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "none"}
               for block in said if block["type"] == "tool_use"]  # fmt: skip
    again = {"role": "user", "content": [*results, {"type": "text", "text": "Say plain"}]}
    talk += [{"role": "assistant", "content": said}, again]
    response = client.post("/v1/messages", json={**asked, "messages": talk, "max_tokens": 1})
    assert response.status_code == 200, response.text
    return prompts[-1]


def added_up(events):
    """The blocks of a stream, where what there is of a call's arguments is read, as Anthropic's client does."""
    blocks, parts = [event["content_block"] for event in events if event["type"] == "content_block_start"], {}
    for event in events:
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            if kind == "input_json_delta":
                parts[event["index"]] = parts.get(event["index"], "") + event["delta"]["partial_json"]
            elif kind != "signature_delta":
                blocks[event["index"]][kind.removesuffix("_delta")] += event["delta"][kind.removesuffix("_delta")]
    for index, text in parts.items():
        blocks[index]["input"] = jiter.from_json(text.encode(), partial_mode=True)
    return blocks


@pytest.mark.parametrize("word", [word for word in REPLIES if word != "plain"])
@pytest.mark.parametrize("dumped", [{}, {"exclude_none": True}], ids=["nulls", "no nulls"])
@pytest.mark.parametrize("every", EVERY)
def test_an_answer_that_was_cut_off_anywhere_is_the_same_history_on_every_api(chat, client, word, dumped, every):
    for most in range(1, len(REPLIES[word]) + 2, every):
        found = {
            chatted(chat, word, most, **dumped), responded(chat, word, most, **dumped),
            messaged(client, word, most),
        }  # fmt: skip
        # Texts around a call are one text, which the APIs join in their own ways.
        assert len({"".join(prompt.split()) for prompt in found}) == 1, (most, found)
    assert '"arguments": {' in found.pop()


@pytest.mark.parametrize("word", ["call", "two"])
@pytest.mark.parametrize("every", EVERY)
def test_a_streamed_message_that_was_cut_off_anywhere_is_taken_back(client, word, every):
    for most in range(1, len(REPLIES[word]) + 2, every):
        assert messaged(client, word, most, stream=True).endswith("<user>Say plain<assistant>")


VALUES = [None, 3, "text", {"a": [1, None]}, [True, 2.5]]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_variable_reaches_the_template_on_every_api(client, value):
    hello = [{"role": "user", "content": "Say plain"}]
    wanted = {"chat_template_kwargs": {"extra": value, "enable_thinking": None}, "model": MODEL}
    for path, fields in (
        ("/v1/chat/completions", {"messages": hello, "max_tokens": 1}), ("/v1/responses", {"input": hello}),
        ("/v1/messages", {"messages": hello, "max_tokens": 1}),
    ):  # fmt: skip
        response = client.post(path, json={**fields, **wanted})
        assert response.status_code == 200, response.text
        tokens = client.post("/tokenize", json={"messages": hello, **wanted}).json()["tokens"]
        assert prompts[-1] == TOKENS.decode(tokens, False)
        assert json.loads(prompts[-1].removeprefix("<user>Say plain<assistant>")) == value
