"""Requests of the Messages API: the chat request that each stands for, and faults by the names of their fields."""

import json

import msgspec
import pytest

from gapless.base.errors import RequestError
from gapless.server.dialects.messages.request import CountTokensRequest, MessagesRequest

ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ADD_FUNCTION = {"type": "function", "function": {"name": "add", "parameters": ADD["input_schema"]}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def chat(**fields):
    body = {"model": "m", "max_tokens": 2000, "messages": [HI], **fields}
    return msgspec.json.decode(json.dumps(body), type=MessagesRequest).chat()


def text(text, **more):
    return {"type": "text", "text": text, **more}


def said(messages):
    """The messages without the fields that hold nothing."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({}, [HI]),
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, HI]),
        ({"system": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
         [{"role": "system", "content": "a\nb"}, HI]),
        ({"system": ""}, [HI]),
        ({"messages": [HI, {"role": "system", "content": "Hurry."}]}, [HI, {"role": "system", "content": "Hurry."}]),
        ({"messages": [{"role": "user", "content": [text("a", citations=None), text("b")]}]},
         [{"role": "user", "content": "a\nb"}]),
        ({"messages": [HI, HI]}, [{"role": "user", "content": "hi\nhi"}]),
        ({"messages": [HI, {"role": "assistant", "content": "so"}, HI]},
         [HI, {"role": "assistant", "content": "so"}, HI]),
        ({"messages": [HI, {"role": "assistant", "content": []}, HI]}, [HI, {"role": "assistant", "content": ""}, HI]),
    ],
)  # fmt: skip
def test_messages_become_those_of_a_chat(fields, messages):
    assert said(chat(**fields).messages) == messages


def test_calls_thinking_and_results_become_those_of_a_chat():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    answer = {"role": "assistant", "content": [thought, redacted, text("I add."), USE, {**USE, "id": "toolu_2"}]}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("way")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
    ]
    found = chat(messages=[HI, answer, {"role": "user", "content": [*results, text("go on")]}]).messages
    assert said(found) == [
        HI,
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [CALL, {**CALL, "id": "toolu_2"}]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "add", "content": "Error: no\nway"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip


def test_a_call_without_text_has_no_content():
    found = chat(messages=[HI, {"role": "assistant", "content": [USE]}, HI]).messages
    assert said(found)[1] == {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"tools": [], "tool_choice": None, "add_generation_prompt": True, "continue_final_message": False}),
        ({"tools": [ADD]}, {"tools": [ADD_FUNCTION], "tool_choice": None, "parallel_tool_calls": None}),
        ({"tools": [{**ADD, "type": "custom", "strict": True, "description": "x", "cache_control": None}]},
         {"tools": [{"type": "function", "function": {
             "name": "add", "description": "x", "parameters": SCHEMA, "strict": True}}]}),
        ({"tools": [ADD], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tools": [ADD], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}},
         {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": True}),
        ({"messages": [HI, {"role": "assistant", "content": "We"}]},
         {"add_generation_prompt": False, "continue_final_message": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "include_reasoning": True}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}},
         {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "include_reasoning": False}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high", "chat_template_kwargs": None}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "stream": True, "max_tokens": 7},
         {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "stream": True, "max_tokens": 7}),
    ],
)  # fmt: skip
def test_other_fields_become_those_of_a_chat(fields, expected):
    found = chat(**fields)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("where", ["output_config.format", "output_format"])
def test_a_schema_becomes_a_form_that_names_its_field(where):
    fields = {"output_config": {"format": FORMAT}} if "." in where else {"output_format": FORMAT}
    form = chat(**fields).form()
    assert json.loads(form.json) == SCHEMA and form.where == f"{where}.schema"
    assert chat().form() is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [HI, {"role": "user", "content": []}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, "messages.0.content.1"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text("a"), IMAGE]}]}]},
         "messages.0.content.0.content.1"),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}, HI]},
         "messages.1.content.0.name"),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "thinking"}]}, HI]},
         "messages.1.content.0.thinking"),
        ({"messages": [HI, {"role": "assistant", "content": [text("so"), USE]}]}, "messages.1.content.1"),
        ({"messages": [HI, {"role": "assistant", "content": []}]}, "messages"),
        ({"system": [IMAGE]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [ADD, {"name": "f"}]}, "tools.1.input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"temperature": 1.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_a_wrong_message_request_is_refused_by_its_field(fields, param):
    with pytest.raises(RequestError) as found:
        chat(**fields)
    assert found.value.param == param and param in str(found.value)


def test_counting_tokens_needs_no_limit_of_the_answer():
    body = {"model": "m", "messages": [HI], "thinking": {"type": "enabled", "budget_tokens": 5}}
    assert msgspec.json.decode(json.dumps(body), type=CountTokensRequest).chat().max_tokens is None
