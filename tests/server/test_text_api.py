"""Completions and chats against a running server: whole, streamed, and the prompts that reach the model."""

import re
import threading

import pytest
from server_harness import (
    ALPHABET,
    BODIES,
    CHAT,
    COMPLETIONS,
    HI,
    TEXT_ROUTES,
    TOKENS,
    VOCAB,
    error_of,
    events,
    listening_core,
    script,
    serving,
    tokenizer,
)

from gapless.engine.frontdoor import ModelAssets
from gapless.testing.core import FakeCore

IDS = TOKENS.encode("hi")
SIXTEEN, LENGTH = ALPHABET[:16], ("length", None)
USAGE = {"stream_options": {"include_usage": True}}
BOTH = [
    ({"max_tokens": 5}, ["abcde"], [LENGTH], 5),
    ({"n": 3, "max_tokens": 2}, ["ab"] * 3, [LENGTH] * 3, 6),
    ({"stop": "de", "max_tokens": 20}, ["abc"], [("stop", "de")], 5),
    ({"stop": ["x", "de"], "max_tokens": 20}, ["abc"], [("stop", "de")], 5),
    ({"stop": ["ab"]}, [""], [("stop", "ab")], 2),
    ({"stop": "de", "include_stop_str_in_output": True, "max_tokens": 20}, ["abcde"], [("stop", "de")], 5),
    ({"stop_token_ids": TOKENS.encode("d"), "max_tokens": 20}, ["abc"], [("stop", *TOKENS.encode("d"))], 4),
    # Fields that adjust logits, with ids as JSON has them: this core samples as ever.
    ({"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": {"5": -100, "6": 1},
      "allowed_token_ids": [5, 6, 7], "bad_words": ["no", "more"], "max_tokens": 4}, ["abcd"], [LENGTH], 4),
]  # fmt: skip
OF_CHATS = [({"max_completion_tokens": 3, "max_tokens": 9}, ["abc"], [LENGTH], 3)]
OF_COMPLETIONS = [
    ({}, [SIXTEEN], [LENGTH], 16),
    ({"prompt": ["hi", "you"], "max_tokens": 3}, ["abc"] * 2, [LENGTH] * 2, 6),
    ({"prompt": IDS, "max_tokens": 3}, ["abc"], [LENGTH], 3),
    ({"prompt": [IDS, TOKENS.encode("you")], "max_tokens": 3}, ["abc"] * 2, [LENGTH] * 2, 6),
    # The end-of-sequence token counts, as it was generated.
    ({"prompt": ["x$", "yy", "z"], "n": 2, "max_tokens": 4}, ["abc"] * 2 + ["abcd"] * 4,
     [("stop", None)] * 2 + [LENGTH] * 4, 24),
    ({"echo": True, "max_tokens": 3}, ["hiabc"], [LENGTH], 3),
    ({"prompt": IDS, "echo": True, "max_tokens": 3}, ["hiabc"], [LENGTH], 3),
    ({"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 1}, ["onea"] * 2 + ["twoa"] * 2, [LENGTH] * 4, 4),
    ({"prompt": "$", "max_tokens": 6}, ["abc"], [("stop", None)], 4),
    ({"prompt": "$", "max_tokens": 6, "ignore_eos": True}, ["abcef"], [LENGTH], 6),
    ({"prompt": "$", "max_tokens": 8, "min_tokens": 6}, ["abc!efgh"], [LENGTH], 8),
    ({"prompt": "+~", "max_tokens": 12}, ["äöüäöü"], [LENGTH], 12),
    # Fields that ask for nothing.
    ({"logprobs": None, "best_of": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0},
     [SIXTEEN], [LENGTH], 16),
    ({"logit_bias": {}, "suffix": None, "user": "me", "response_format": {"type": "text"}, "n": 1, "stop": None},
     [SIXTEEN], [LENGTH], 16),
    ({"temperature": None, "top_p": None, "max_tokens": 16, "stream": None, "seed": None}, [SIXTEEN], [LENGTH], 16),
    ({"response_format": None, "guided_json": None, "guided_regex": None}, [SIXTEEN], [LENGTH], 16),
    ({"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.0, "seed": 7, "priority": 3, "cache_salt": "s"},
     [SIXTEEN], [LENGTH], 16),
    ({"no_such_field": {"deep": [1, 2]}, "another": 1}, [SIXTEEN], [LENGTH], 16),
]  # fmt: skip
ROWS = [*((path, *row) for path in TEXT_ROUTES for row in BOTH), *((COMPLETIONS, *row) for row in OF_COMPLETIONS)]
ROWS += [(CHAT, *row) for row in OF_CHATS]


def post(client, path, **fields):
    response = client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return response


def text_of(choice):
    if "text" in choice:
        return choice["text"]
    return (choice["delta"].get("content") if "delta" in choice else choice["message"]["content"]) or ""


@pytest.mark.parametrize(("path", "fields", "texts", "ends", "tokens"), ROWS, ids=lambda one: str(one)[:50])
def test_an_answer_is_the_same_whole_and_streamed(client, path, fields, texts, ends, tokens):
    whole = post(client, path, **fields).json()
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(texts)))
    assert [text_of(choice) for choice in choices] == texts
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in choices] == ends
    assert whole["usage"]["completion_tokens"] == tokens
    *found, usage = events(post(client, path, **{**fields, "stream": True, **USAGE}))
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(event["usage"] is None and "\ufffd" not in text_of(event["choices"][0]) for event in found)
    for index, (text, end) in enumerate(zip(texts, ends, strict=True)):
        mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == index]
        assert "".join(map(text_of, mine)) == text
        assert [(one["finish_reason"], one["stop_reason"]) for one in mine if one["finish_reason"]] == [end]
        assert mine[-1]["finish_reason"]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in one["delta"] for one in mine[1:])
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in found}) == 1


def test_answers_have_the_fields_of_openai(client):
    body = post(client, COMPLETIONS, model="tiny", max_tokens=5).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", body["id"])
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [
        {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    body = post(client, CHAT, model="tiny", max_tokens=5).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    (choice,) = body["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "abcde")
    assert choice["logprobs"] is None
    prompt = len(TOKENS.encode("<user>hi<assistant>"))
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}


def test_chunks_have_the_type_and_the_parts_of_openai(client):
    response = post(client, COMPLETIONS, max_tokens=30, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response)
    assert {event["object"] for event in found} == {"text_completion"} and all("usage" not in one for one in found)
    assert events(post(client, CHAT, max_tokens=2, stream=True))[0]["object"] == "chat.completion.chunk"


def test_usage_is_in_every_chunk_on_demand(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(post(client, COMPLETIONS, prompt="hi~", max_tokens=6, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in found} == {3}


def test_a_request_has_as_many_choices_as_its_prompts_and_n_multiply_to(client):
    assert len(post(client, COMPLETIONS, prompt=["x"] * 4, n=64, max_tokens=1).json()["choices"]) == 256


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client):
    body = post(client, CHAT).json()
    assert (body["usage"]["total_tokens"], body["choices"][0]["finish_reason"]) == (1024, "length")


def test_the_first_chunk_does_not_wait_for_the_second_token():
    """The second token is held until the client has read the first."""
    seen = threading.Event()

    def gated(request, count):
        assert count == 0 or seen.wait(10)
        return script(request, count)

    with serving(core=lambda: FakeCore(VOCAB, script=gated)) as server, server.client() as client:
        fields = {"prompt": "hi", "max_tokens": 3, "stream": True}
        with client.stream("POST", COMPLETIONS, json=fields) as response:
            lines = response.iter_lines()
            assert '"text":"a"' in next(lines)
            assert not seen.is_set()
            seen.set()
            assert '"finish_reason":"length"' in "".join(lines)


def test_details_and_usage_are_given_by_flag():
    with (
        serving(enable_prompt_tokens_details=True, enable_force_include_usage=True) as server,
        server.client() as client,
    ):
        assert post(client, COMPLETIONS).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        found = events(post(client, COMPLETIONS, stream=True))
        assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_sampling_defaults_of_the_model_are_used():
    taken = []
    core = listening_core(lambda request: taken.append(request.params))
    front = ModelAssets(TOKENS, (), {"temperature": 0.6, "top_k": 20})
    with serving(core=core, front=front) as server, server.client() as client:
        post(client, COMPLETIONS)
        post(client, COMPLETIONS, temperature=0.0)
    assert [(params.temperature, params.top_k) for params in taken] == [(0.6, 20), (0.0, 20)]


# The prompts of chats.

F = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fgh"]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PROMPTS = [
    ({}, "<user>hi<assistant>"),
    ({"messages": [{"role": "developer", "content": "be"}, *HI]}, "<system>be<user>hi<assistant>"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
     "<user>ab<assistant>"),
    ({"tools": [F]}, "[1 tools]<user>hi<assistant>"),
    ({"tools": [F], "tool_choice": "auto"}, "[1 tools]<user>hi<assistant>"),
    ({"tools": TOOLS,
      "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}, {"name": "f"}]}},
     "[2 tools]<user>hi<assistant>"),
    ({"reasoning_effort": "low"}, "<user>hi<assistant>low "),
    ({"add_generation_prompt": False}, "<user>hi"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "<user>hi<assistant>hm "),
    ({"messages": [*HI, {"role": "assistant", "content": "we"}], "continue_final_message": True},
     "<user>hi<assistant>we"),
    ({"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                   {"role": "tool", "tool_call_id": "1", "content": "7", "name": "f"}]},
     "<user>hi<assistant><tool>7<assistant>"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "prompt"), PROMPTS, ids=lambda one: str(one)[:50])
def test_the_model_sees_the_prompt_that_the_template_makes(client, fields, prompt):
    answer = post(client, CHAT, max_tokens=1, return_token_ids=True, **fields).json()
    assert TOKENS.decode(answer["prompt_token_ids"], False) == prompt


def test_text_beside_tools_is_content(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert text_of(post(client, CHAT, tools=tools, max_tokens=4).json()["choices"][0]) == "abcd"


def test_a_model_without_a_template_answers_completions_alone():
    with serving(front=ModelAssets(tokenizer(template=None), (), {})) as server, server.client() as client:
        response = client.post(CHAT, json=BODIES[CHAT])
        assert (response.status_code, error_of(response)["code"]) == (400, "no_chat_template")
        assert text_of(post(client, COMPLETIONS).json()["choices"][0]) == SIXTEEN
