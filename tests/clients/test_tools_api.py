"""Tools over HTTP: the demo model's calls come out parsed, whole and streamed; forced ones keep to their schemas."""

import json
from typing import Any

import pytest
from jsonschema import validate
from openai.types.chat import ChatCompletion, ChatCompletionChunk


def tool(name: str, description: str, **parameters: Any) -> dict[str, Any]:
    properties = {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("get_weather", "Get the current weather of a city", city={"type": "string", "maxLength": 30}),
    tool("add", "Add two numbers", a={"type": "integer", "maximum": 99}, b={"type": "integer", "maximum": 99}),
]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 12 + 30?"}]


def ask(demo: Any, messages: Any = WEATHER, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **more}
    response = demo.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    return response.json()["choices"][0]


def streamed(demo: Any, **more: Any) -> list[dict[str, Any]]:
    body = {"model": "demo", "messages": WEATHER, "tools": TOOLS, "temperature": 0, "max_tokens": 200, "stream": True}
    response = demo.post("/v1/chat/completions", json={**body, **more})
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-2]]
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return [chunk["choices"][0] for chunk in chunks]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"].get("tool_calls") or []
    ]


def test_a_call_of_the_model_is_a_tool_call_and_not_text(demo):
    choice = ask(demo)
    assert calls_of(choice) == [("get_weather", {"city": "Paris"})]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")


def test_an_answer_without_a_call_is_text_and_nothing_is_called_under_none(demo):
    plain = ask(demo, SUM, tool_choice="none")
    assert "42" in plain["message"]["content"] and "tool_calls" not in plain["message"]
    assert plain["finish_reason"] == "stop"
    assert calls_of(ask(demo, tool_choice="none")) == []


@pytest.mark.parametrize("messages", [WEATHER, SUM])
@pytest.mark.parametrize("parallel", [True, False])
def test_under_required_there_is_a_call_with_arguments_of_its_schema(demo, messages, parallel):
    choice = ask(demo, messages, tool_choice="required", parallel_tool_calls=parallel)
    calls = calls_of(choice)
    assert calls and choice["message"]["content"] is None and (parallel or len(calls) == 1)
    for name, arguments in calls:
        validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "add"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "add"}}]}},
    ],
)
def test_a_named_function_is_called_and_no_other(demo, choice):
    answer = ask(demo, tool_choice=choice)
    calls = calls_of(answer)
    assert {name for name, _ in calls} == {"add"}
    reason = "stop" if choice["type"] == "function" else "tool_calls"
    assert answer["finish_reason"] == streamed(demo, tool_choice=choice)[-1]["finish_reason"] == reason
    for _, arguments in calls:
        validate(arguments, SCHEMAS["add"])


PERSON = [{"role": "user", "content": "Extract name and age as JSON: Marco is 89 years old and lives in Oslo."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.mark.parametrize("strict", [True, False])
def test_a_reply_is_a_call_or_keeps_to_the_form_when_tools_have_one_beside(demo, strict):
    tools = [{**one, "function": {**one["function"], "strict": strict}} for one in TOOLS]
    assert calls_of(ask(demo, tools=tools, response_format=FORMAT)) == [("get_weather", {"city": "Paris"})]
    answer = ask(demo, PERSON, tools=tools, response_format=FORMAT)
    assert not calls_of(answer) and answer["finish_reason"] == "stop"
    validate(json.loads(answer["message"]["content"]), SCHEMA)
    required = ask(demo, PERSON, tools=tools, response_format=FORMAT, tool_choice="required")
    assert calls_of(required) and required["message"]["content"] is None
