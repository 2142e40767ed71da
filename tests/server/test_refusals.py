"""Requests that are refused, as tables: route and fields, then status, field and words. The forms of output stand in
their own table, since both routes of text take all of them."""

import json
import re

import pytest
from message_events import error_of as message_error_of
from server_harness import (
    BODIES,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    HI,
    MARKED,
    MESSAGES,
    RESPONSES,
    TEXT_ROUTES,
    TOKENIZE,
    VOCAB,
    error_of,
    serving_forms,
)

JSON = {"content-type": "application/json"}
UNIQUE = {"type": "array", "uniqueItems": True}
OBJECT = {"type": "object"}
CITY = {**OBJECT, "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


@pytest.fixture(scope="module")
def formed():
    """A client of a server whose core honours forms and whose replies may have calls."""
    with serving_forms() as server, server.client() as client:
        yield client


def refused(client, path, fields, status=400):
    """The error of a request that must be refused."""
    response = client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == status, (path, response.text)
    return error_of(response)


# Fields of completions and chats alike.

SAMPLING = [
    *(("temperature", value) for value in (-0.1, 101, "hot", [])),
    *(("top_p", value) for value in (0, -1, 1.01, "x")),
    *(("top_k", value) for value in (-2, 2**31, 1.5, True)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("n", value) for value in (0, -1, 65, 10**30, "1")),
    *(("max_tokens", value) for value in (0, -1, 2**31, 1.5)),
    *(("min_tokens", value) for value in (-1, 2**40)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, "s", 0.5)),
    *(("stop", value) for value in ("", [""], ["x"] * 17, ["x" * 1001], 5, [5])),
    *(("stop_token_ids", value) for value in ([-1], [VOCAB], [2**40], list(range(33)), "x", [1.5])),
    *(("ignore_eos", value) for value in ("yes", 1)),
    *(("priority", value) for value in (2**31, "high")),
    *(("stream", value) for value in ("true", 1)),
    *(("stream_options", value) for value in (True, {"include_usage": "yes"}, {"include_usage": True})),
    *(("cache_salt", value) for value in (1,)),
    *(("logprobs", value) for value in ("yes", 1.5, [])),
    *(("prompt_logprobs", value) for value in (-1, 21, True, "1")),
    *((f"{name}_penalty", value) for name in ("presence", "frequency") for value in (-2.01, 2.01, "1", True, [])),
    *(("repetition_penalty", value) for value in (0, -1, 1e-38, 0.009, 101, "1", True)),
    *(("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": "a"}, {"99999999": 1}, [1], 3)),
    ("logit_bias", {str(token): 1 for token in range(1_025)}),
    *(("allowed_token_ids", value) for value in ([], [-1], ["1"], [99_999_999], [1.5], 1, list(range(1_025)))),
    *(("logits_processors", value) for value in ("a", ["a"], [{"qualname": "a"}], ["a"] * 9, [1], [{"args": [1]}])),
    *(("logits_processors", [{"qualname": "a", **part}]) for part in ({"args": [1e39]}, {"kwargs": {"x": 1}})),
    *(("logits_processors", [{"qualname": "a", "args": args}]) for args in ([1] * 9, ["1"], [True], 3)),
    *(("bad_words", value) for value in ("x", [""], [" "], [1], ["x" * 1_001], ["x"] * 129, ["abcdef" * 150] * 9)),
    *(("return_token_ids", value) for value in ("yes", 1)),
    ("model", 7),
]  # fmt: skip
UNSUPPORTED = {
    "functions": [{"name": "f"}], "function_call": {"name": "f"}, "modalities": ["audio"], "use_beam_search": True,
    "chat_template": "{{ x }}", "suffix": "end", "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "logprob_token_ids": [5], "mirostat": 2, "documents": [{"text": "d"}], "prompt_embeds": "AAAA",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_a_field_out_of_range_or_of_the_wrong_type_is_refused(client, name, value):
    for path in TEXT_ROUTES:
        error = refused(client, path, {name: value})
        assert error["type"] == "invalid_request_error"
        assert error["param"].split("[")[0].split(".")[0] == name


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_known_but_not_supported_is_refused(client, name):
    for path in TEXT_ROUTES:
        error = refused(client, path, {name: UNSUPPORTED[name]})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "not supported" in error["message"]


def test_another_model_is_not_found_and_a_wrong_type_names_its_field_first(client):
    for path in TEXT_ROUTES:
        assert refused(client, path, {"model": "gpt-4"}, 404) == {
            "message": "the model is not served here; served as model: tiny",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        error = refused(client, path, {"temperature": "hot", "stream": True})
        assert error["message"] == "temperature: expected `float | null`, got `str`"
        error = refused(client, path, {"stream_options": {"include_usage": 2}, "stream": True})
        assert error["message"] == "stream_options.include_usage: expected `bool | null`, got `int`"


def test_a_prompt_beyond_the_context_is_refused_before_its_tokens_are_made(client):
    for path in TEXT_ROUTES:
        for length in (2_000, 3_000_000):
            text = "x" * length
            long = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
            for more in ({}, {"stream": True}):
                assert refused(client, path, {**long, **more})["code"] == "context_length_exceeded"
        assert refused(client, path, {"max_tokens": 1024})["code"] == "context_length_exceeded"


BOTH = '{"prompt": "x", "messages": [{"role": "user", "content": "x"}], '
BODIES_THAT_ARE_NONE = [
    b"", b"{", b"[]", b"null", b'"x"', b"hello", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"prompt": "x"} {"messages": []}',
    b'{"prompt": "\xff", "messages": "\xff"}', b'{"prompt": "' + b"x" * 200 + b'\\udfff"}',
    b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    *(f"{BOTH}{field}}}".encode() for field in ('"temperature": NaN', '"temperature": Infinity')),
    *(f"{BOTH}{field}}}".encode() for field in ('"temperature": 1e999', '"n": ' + "9" * 5000)),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES_THAT_ARE_NONE)
def test_a_body_that_is_no_json_object_is_refused(client, body):
    for path in TEXT_ROUTES:
        response = client.post(path, content=body, headers=JSON)
        assert response.status_code == 400, response.text
        error_of(response)


@pytest.mark.parametrize("depth", [65, 10_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_deep_json_is_refused(client, depth, opening, closing):
    for path in TEXT_ROUTES:
        body = f'{json.dumps(BODIES[path])[:-1]}, "x": {opening * depth}1{closing * depth}}}'
        response = client.post(path, content=body, headers=JSON)
        assert (response.status_code, error_of(response)["code"]) == (400, "too_deep")


def test_brackets_in_strings_and_wide_json_are_not_depth(client):
    body = {"prompt": "[" * 200 + '\\"{' * 100, "x": [[1]] * 500, "max_tokens": 2}
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "ab"


def test_other_content_types_are_refused(client):
    for path in TEXT_ROUTES:
        body = json.dumps(BODIES[path])
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            response = client.post(path, content=body, headers={"content-type": kind})
            assert response.status_code == 415
            error_of(response)
        good = {"content-type": "application/json; charset=utf-8"}
        assert client.post(path, content=body, headers=good).status_code == 200


# One row a refusal: the route, the fields beside those of a plain request, the field that is named, and words.

FUNCTION = {"name": "get_weather", "description": "Get the weather", "parameters": CITY}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files"}


def tool(**changed):
    """The fields of a chat with this one function."""
    return {"tools": [{"type": "function", "function": {**FUNCTION, **changed}}]}


def chosen(choice):
    return {"tools": [TOOL], "tool_choice": choice}


def flat(choice):
    return {"tools": [FLAT], "tool_choice": choice}


def said(**message):
    return {"messages": [message]}


def item(**fields):
    return {"input": [fields]}


def user(content):
    return said(role="user", content=content)


OF_PROMPTS = [
    *((COMPLETIONS, {"prompt": one}, "prompt*") for one in ("", [], [[]], ["a", ""], [1, "a"], [[1], "a"], [-1])),
    *(
        (COMPLETIONS, {"prompt": one}, "prompt*")
        for one in ([MARKED.vocab_size], [[MARKED.vocab_size]], [1.5], None, {"a": 1}, 3, [True])
    ),
    *((COMPLETIONS, {"prompt": ["~ok", ""], "max_tokens": 500, "stream": one}, "prompt*") for one in (True, False)),
    (COMPLETIONS, {"prompt": ["x"] * 5, "n": 52, "max_tokens": 1}, "n"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs", "not supported"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "whole number"),
    (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs", "not supported"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"echo": True, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"echo": True, "max_tokens": 0, "guided_regex": "a"}, "guided_regex", "max_tokens is 0"),
    *((path, {"prompt_logprobs": -1}, "prompt_logprobs", "not supported") for path in TEXT_ROUTES),
    *((path, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream") for path in TEXT_ROUTES),
    *((TOKENIZE, body, "*") for body in ({"messages": []}, {"prompt": 3}, {"model": 1}, {"prompt": None})),
    *((DETOKENIZE, {"tokens": one}, "tokens*") for one in ([-1], [MARKED.vocab_size], [2**70], ["a"], "ab", None)),
]
OF_CHATS = [
    *((path, {"best_of": 2}, "best_of") for path in TEXT_ROUTES),
    (CHAT, {"logprobs": 3}, "logprobs", "bool"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    *((CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, 10**30, True)),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"bos_token": False}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
    *((path, {"chat_template_kwargs": {name: "x"}}, "chat_template_kwargs", name)
      for path in (CHAT, RESPONSES) for name in ("messages", "tools", "bos_token", "add_generation_prompt",
                                                 "chat_template")),
    *((TOKENIZE, {"messages": HI, "prompt": None, "chat_template_kwargs": {name: "x"}}, "chat_template_kwargs", name)
      for name in ("messages", "tools", "bos_token", "add_generation_prompt", "chat_template")),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, said(content="x"), "messages[0].role"),
    (CHAT, user(3), "messages[0].content"),
    (CHAT, user([]), "messages[0].content"),
    (CHAT, user([{"type": "image_url", "image_url": {"url": "http://x"}}]), "messages*"),
    (CHAT, said(role="assistant"), "messages[0].content"),
    (CHAT, said(role="tool"), "messages[0].content"),
    (CHAT, said(role="tool", tool_call_id=5, content="x"), "messages[0].tool_call_id"),
    (CHAT, said(role="assistant", tool_calls=[{"function": {"arguments": "{}"}}]), "messages*"),
    *((CHAT, tool(parameters=one), "tools[0].function.parameters*")
      for one in ({"properties": []}, {"required": "x"}, {"required": [1]}, {**OBJECT, "required": 3}, "x", [])),
    *((CHAT, {"structured_outputs": {"json": one}}, "structured_outputs*") for one in (3, True, [1])),
    *((CHAT, {"guided_json": one}, "guided_json*") for one in (3, False)),
    (CHAT, {"tools": [{}]}, "tools[0].type"),
    (CHAT, {"tools": [3]}, "tools[0]"),
    (CHAT, {"tools": [{**TOOL, "type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, tool(name=3), "tools[0].function.name"),
    (CHAT, tool(name="a b"), "tools[0].function.name"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (CHAT, tool(description=3), "tools[0].function.description"),
    (CHAT, tool(strict="yes"), "tools[0].function.strict"),
    (CHAT, {"tools": [tool(name=f"f{i}")["tools"][0] for i in range(129)]}, "tools"),
    (CHAT, tool(description="x" * (257 << 10)), "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, chosen("sometimes"), "tool_choice"),
    (CHAT, chosen({"type": "custom"}), "tool_choice.type"),
    (CHAT, chosen({"type": "function", "function": {"name": "other"}}), "tool_choice"),
    (CHAT, chosen({"type": "allowed_tools", "allowed_tools": {"tools": []}}), "tool_choice.allowed_tools.tools"),
    (CHAT, {**chosen("required"), "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (CHAT, {**tool(parameters={**OBJECT, "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}),
            "tool_choice": "required"}, "tools[0].function.parameters"),
]  # fmt: skip
OF_RESPONSES = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    *(({"conversation": value}, "conversation") for value in ("conv_1", "", 0)),
    *(({"background": value}, "background") for value in (True, "x")),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    *(({"truncation": value}, "truncation") for value in ("auto", "some")),
    ({"n": 2}, "n"),
    *(({name: 7}, name) for name in ("input", "instructions", "tools", "text", "reasoning", "include", "metadata")),
    *(({name: "x"}, name) for name in ("max_output_tokens", "top_logprobs", "temperature", "top_p", "stream", "store")),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"include": [1]}, "include[0]"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    (item(), "input[0]"),
    (item(role="robot", content="x"), "input[0].role"),
    (item(role="user - at `$`", content="x"), "input[0].role"),
    (item(role="user", content=3), "input[0].content"),
    (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0].type"),
    *((item(type=kind), "input[0].type") for kind in ("web_search_call", "item_reference", 3, [])),
    (item(type="function_call", call_id="1", name="f", arguments=3), "input[0].arguments"),
    (item(type="function_call", call_id="1"), "input[0]"),
    (item(type="function_call_output", call_id="1", output="x"), "input[0].call_id"),
    (item(role="user", content="x", id=3), "input[0].id"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.schema"),
    *(({"tools": tools, "text": {"format": {"type": "json_schema", "name": "x", "schema": UNIQUE}}},
       "text.format.schema", 'text.format.schema cannot be honoured: "uniqueItems"')
      for tools in ([], [FLAT], [{**FLAT, "strict": False}])),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, {"type": 3}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search"}, {**FLAT, "parameters": 3}]}, "tools[1].parameters"),
    ({"tools": [{"type": "web_search"}, {**FLAT, "parameters": {**OBJECT, "properties": {"x": UNIQUE}}}]},
     "tools[1].parameters"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**FLAT, "parameters": 3}]}, "tools[0].parameters"),
    ({"tools": [{**FLAT, "strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [{**PATCH, "description": 3}]}, "tools[0].description"),
    ({"tools": [{**PATCH, "name": 3}]}, "tools[0].name"),
    ({"tools": [FLAT, FLAT]}, "tools[1].name"),
    ({"tools": [{**FLAT, "name": "max_tokens.function"}] * 2}, "tools[1].name",
     "tools[1].name: two tools are called 'max_tokens.function'"),
    ({"tools": [{**PATCH, "format": "text"}]}, "tools[0].format"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]}, "tools[0].format"),
    *(({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": one}}]},
       "tools[0].format.definition") for one in ("(?=a)b", "(a", "a)|(b", r"[)]\)\)a)(b")),
    (flat(3), "tool_choice.type"),
    (flat({"type": "function", "name": "x"}), "tool_choice", "tool_choice.name must be one of the tools: get_weather"),
    (flat({"type": "file_search"}), "tool_choice.type"),
    (flat({"type": "allowed_tools", "tools": []}), "tool_choice.tools"),
    (flat({"type": "allowed_tools", "tools": [{"type": 3, "name": "get_weather"}]}), "tool_choice.tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"model": "other"}, "model"),
    *(({"text": {"format": form}, "response_format": {"type": other}}, "response_format",
       "and response_format both ask for a form of output")
      for form in ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "schema": CITY})
      for other in ("text", "json_object")),
    ({"text": {"format": {"type": "text"}}, "guided_regex": "a", "max_tokens": 0}, "max_output_tokens"),
    *(({"text": {"format": form}, "guided_regex": "a", "max_tokens": 0}, "guided_regex")
      for form in ({"type": "json_object"}, {"type": "json_schema", "schema": CITY})),
]  # fmt: skip
ROWS = [*OF_PROMPTS, *OF_CHATS, *((RESPONSES, *row) for row in OF_RESPONSES)]
OURS = ("response_format", ".function", "at `$")
"""Words of a chat's request that no error of /v1/responses may have, unless the caller wrote them."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {str(row[1])[:60]}")
def test_a_refused_request_names_its_field(formed, row):
    path, fields, param, *words = row
    error = refused(formed, path, fields, 404 if fields.get("model") == "other" else 400)
    assert error["type"] == "invalid_request_error"
    named = error["param"] or ""
    assert named.startswith(param[:-1]) if param.endswith("*") else named == param
    assert all(word in error["message"] for word in words), error["message"]
    assert error["code"] == "unsupported_parameter" or not (words and param == "chat_template_kwargs")
    if path == RESPONSES:
        assert not any(word in error["message"] and word not in json.dumps(fields) for word in OURS)
        assert not re.search(r"at \d|parse error", error["message"])


def test_a_request_without_its_text_names_the_field(client):
    for path in (*TEXT_ROUTES, TOKENIZE, DETOKENIZE):
        error = error_of(client.post(path, json={}))
        assert error["param"] in ("prompt", "messages", "tokens")


ADD = {"name": "add", "input_schema": {**OBJECT, "properties": {"a": {"type": "integer"}}}}
OF_MESSAGES = [
    ({"model": "claude"}, "model: the model is not served here; served as model: tiny"),
    ({"model": None}, "model: "),
    ({"max_tokens": None}, "max_tokens: "),
    ({"max_tokens": -1}, "max_tokens must be"),
    ({"top_p": 2}, "top_p must be"),
    ({"top_k": "x"}, "top_k: expected"),
    ({"regex": "a"}, "regex is not supported"),
    ({"stop_sequences": [""]}, "stop_sequences must hold"),
    ({"stop_sequences": ["x" * 2000]}, "stop_sequences: a stop string is longer"),
    (user([{"type": "image"}]), "messages.0.content.0: image blocks are not supported"),
    (user([3]), "messages.0.content.0: expected"),
    (user("x" * 1100), "prompt is too long: "),
    (said(role="tool", content="x"), "messages.0.role must be user, assistant or system, got 'tool'"),
    ({"tools": [{**ADD, "name": "a b"}]}, "tools.0.name must be 1 to "),
    ({"tools": [ADD, ADD]}, "tools.1.name: two tools"),
    ({"tools": [{**ADD, "input_schema": {"type": "array"}}]}, "tools.0.input_schema must be"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: bash_20250124 is not supported"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}}, "output_config.format.schema"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
]


@pytest.mark.parametrize(("fields", "words"), OF_MESSAGES, ids=lambda one: str(one)[:40])
def test_a_refused_message_names_its_field_in_the_form_of_anthropic(formed, fields, words):
    status, kind = (404, "not_found_error") if fields.get("model") else (400, "invalid_request_error")
    for stream in (False, True):
        response = formed.post(MESSAGES, json={**BODIES[MESSAGES], **fields, "stream": stream})
        assert response.status_code == status, response.text
        assert message_error_of(response, kind).startswith(words)


# Forms of output.

TREE = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
SCHEMA = "response_format.json_schema.schema"


def named_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


OF_FORMS = [
    ({"response_format": named_schema(UNIQUE)}, SCHEMA, '"uniqueItems"'),
    ({"response_format": named_schema(None)}, SCHEMA, "missing"),
    ({"response_format": {"type": "json_schema"}}, SCHEMA, "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, SCHEMA, ""),
    ({"response_format": named_schema([1])}, SCHEMA, "object"),
    ({"response_format": named_schema("x{")}, SCHEMA, "cannot be honoured"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "triggers"),
    ({"response_format": {"type": "structural_tag", "triggers": 1, "structures": []}}, "response_format", "list"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "'x'"),
    ({"response_format": {}}, "response_format", "type"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": 1}}, "response_format.type", "str"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema", "object"),
    ({"response_format": {"type": "json_object", "schema": UNIQUE}}, "response_format.schema", '"uniqueItems"'),
    ({"response_format": {**named_schema(CITY), "schema": CITY}}, "response_format.schema",
     "response_format.json_schema and response_format.schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
     "response_format and structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema", "both ask"),
    ({"structured_outputs": {}}, "structured_outputs", "found none"),
    ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json", '"uniqueItems"'),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "str"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "incomplete escape"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "array"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", '"x"'),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "(a"}}, "structured_outputs.json", "whitespace"),
    ({"guided_json": UNIQUE}, "guided_json", '"uniqueItems"'),
    ({"guided_json": 5}, "guided_json", "cannot be honoured"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
    ({"guided_structural_tag": {}}, "guided_structural_tag", "triggers"),
    ({"guided_structural_tag": TAG, "guided_regex": "a"}, "guided_structural_tag", "guided_regex and guided_st"),
    ({"guided_regex": ""}, "guided_regex", "regex"),
    ({"guided_regex": "a" * 140_000}, "guided_regex", "131,072 bytes"),
    ({"guided_choice": [1]}, "guided_choice", "str"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
    ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "guided_regex"),
    ({"guided_regex": "a", "regex": "a"}, "regex", "guided_regex and regex"),
    ({"structural_tag": {}}, "structural_tag", "triggers"),
    ({"ebnf": "root ::= x"}, "ebnf", "cannot be honoured"),
    ({"grammar": "root ::= (", "n": 1}, "grammar", "cannot be honoured"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": 1}, "regex", "str"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf"),
    ({"json_schema": UNIQUE}, "json_schema", '"uniqueItems"'),
    ({"json_schema": 5}, "json_schema", "object"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), OF_FORMS, ids=lambda one: str(one)[:50])
def test_a_form_that_cannot_be_honoured_names_its_field(formed, fields, param, words):
    for path, stream in ((COMPLETIONS, False), (CHAT, True)):
        error = refused(formed, path, {**fields, "stream": stream})
        assert error["param"].split("[")[0] == param, error
        assert words in error["message"]


# On all routes: parameters and schemas that bind nothing.

PARAMETERS = [
    ({**OBJECT, "properties": {"a": {"type": "string", "pattern": "a\\"}}}, "properties.a.pattern"),
    ({**OBJECT, "properties": {"a": 5}}, "properties.a must be a schema"),
    ({**OBJECT, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "no value of it ends"),
    ({**OBJECT, "properties": {"a": {"type": None}}}, "properties.a.type"),
    ({**OBJECT, "properties": {"a": UNIQUE}}, "uniqueItems"),
    ({**OBJECT, "required": "a"}, "required"),
    ([], "must be a JSON schema of an object"),
    (True, "must be a JSON schema of an object"),
]


@pytest.mark.parametrize(("parameters", "words"), PARAMETERS, ids=str)
def test_parameters_that_bind_no_call_are_refused_by_name_on_all_routes(formed, parameters, words):
    function = {"name": "f", "parameters": parameters}
    asked = {
        CHAT: {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        RESPONSES: {"tools": [{"type": "function", **function}], "tool_choice": "required"},
        MESSAGES: {"tools": [{"name": "f", "input_schema": parameters}], "tool_choice": {"type": "any"}},
    }
    for path in asked if isinstance(parameters, dict) else (CHAT, RESPONSES):
        answer = formed.post(path, json={**BODIES[path], **asked[path]})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


SCHEMAS = [
    *((one, "schema") for one in ([], "[1]", 5, True, False)),
    ({"type": "string", "pattern": "\\"}, "pattern"),
    ({"type": "string", "pattern": "(a"}, "unclosed group"),
    ({**OBJECT, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "no value of it ends"),
    ({**OBJECT, "propertyNames": {"pattern": "a"}}, "propertyNames"),
]


@pytest.mark.parametrize(("schema", "words"), SCHEMAS, ids=str)
def test_a_form_that_is_no_schema_is_refused_by_name_on_all_routes(formed, schema, words):
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    for path, fields in (
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        (CHAT, {"guided_json": schema}),
        (COMPLETIONS, {"structured_outputs": {"json": schema}}),
        (RESPONSES, {"text": {"format": flat}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
    ):
        answer = formed.post(path, json={**BODIES[path], **fields})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and (words in message or "json" in message), answer.text
