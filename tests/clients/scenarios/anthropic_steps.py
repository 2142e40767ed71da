"""Anthropic's official client: messages, whole and streamed, tools, counts and errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from steps import KEY, MIA, MODEL, main, refused, user

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Get the current weather of a city", "input_schema": SCHEMA}
PARIS = user("What is the weather in Paris?")


def sync(address: str, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)


def asked(messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": messages, "extra_body": {"temperature": 0}, **more}


def block(one: Any) -> list[Any]:
    """[type, text or call]; the ids of calls are drawn."""
    return [one.type, [one.name, one.input] if one.type == "tool_use" else getattr(one, one.type)]


def message(one: Any) -> dict[str, Any]:
    assert (one.type, one.role, one.model) == ("message", "assistant", MODEL) and one.id.startswith("msg_")
    prompt = one.usage.input_tokens + one.usage.cache_read_input_tokens
    counts = {"prompt": prompt, "output": one.usage.output_tokens}
    return {"content": [block(each) for each in one.content], "reason": one.stop_reason, "usage": counts}


def outline(one: Any) -> dict[str, Any]:
    """What of an answer does not depend on how sure the model is of its words."""
    message(one)
    return {"kinds": [each.type for each in one.content], "reason": one.stop_reason}


def create(address: str) -> Any:
    with sync(address) as client:
        return message(client.messages.create(**asked(user(MIA), system="Be short and exact.")))


def create_with_a_stop_sequence(address: str) -> Any:
    with sync(address) as client:
        one = client.messages.create(**asked(user(MIA), stop_sequences=["####"]))
    return {**message(one), "sequence": one.stop_sequence}


def stream_text(address: str) -> Any:
    with sync(address) as client, client.messages.stream(**asked(user(MIA))) as stream:
        text = "".join(stream.text_stream)
        one = stream.get_final_message()
    assert stream.get_final_text() == text
    return message(one)


def stream_cut_off(address: str) -> Any:
    with sync(address) as client, client.messages.stream(**asked(user(MIA), max_tokens=5)) as stream:
        return message(stream.get_final_message())


def use_of_a_tool(address: str) -> Any:
    with sync(address) as client:
        one = client.messages.create(**asked(PARIS, tools=[WEATHER]))
        assert one.content[-1].id.startswith("toolu_")
        return message(one)


def result_of_a_tool(address: str) -> Any:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny, 24 C"}]}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    with sync(address) as client:
        one = client.messages.create(**asked([*PARIS, *turns], tools=[WEATHER]))
    return {"prompt": message(one)["usage"]["prompt"]}


def stream_of_a_call(address: str) -> Any:
    parts: dict[int, str] = {}
    with sync(address) as client, client.messages.stream(**asked(PARIS, tools=[WEATHER])) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                parts[event.index] = parts.get(event.index, "") + event.delta.partial_json
        one = stream.get_final_message()
    assert [json.loads(text) for text in parts.values()] == [each.input for each in one.content]
    return message(one)


def forced_call(address: str) -> Any:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    with sync(address) as client:
        one = client.messages.create(**asked(user(MIA), tools=[WEATHER], tool_choice=choice))
    assert list(one.content[0].input) == ["city"]
    return outline(one)


def answer_in_a_schema(address: str) -> Any:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with sync(address) as client:
        one = client.messages.create(**asked(PARIS, output_config=config))
    assert list(json.loads(one.content[0].text)) == ["city"]
    return outline(one)


def count_tokens(address: str) -> Any:
    with sync(address) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=PARIS, tools=[WEATHER])
    return {"counted": counted.input_tokens}


async def asynchronous_stream(address: str) -> Any:
    client = anthropic.AsyncAnthropic(base_url=address, api_key=KEY, max_retries=0)
    async with client, client.messages.stream(**asked(user(MIA))) as stream:
        return message(await stream.get_final_message())


def failing(address: str, key: str = KEY, **fields: Any) -> Any:
    try:
        with sync(address, key) as client:
            client.messages.create(**{**asked(user("Hi")), **fields})
    except anthropic.APIStatusError as error:
        assert error.type == error.body["error"]["type"] and error.body["request_id"]
        return refused(error, error.status_code, error.body["error"])
    raise AssertionError("it was accepted")


def unknown_model(address: str) -> Any:
    return failing(address, model="claude")


def wrong_key(address: str) -> Any:
    return failing(address, key="another-key")


def bad_field(address: str) -> Any:
    return failing(address, extra_body={"temperature": 5})


def picture(address: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    return failing(address, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])


STEPS = [
    *(create, create_with_a_stop_sequence, stream_text, stream_cut_off, asynchronous_stream),
    *(use_of_a_tool, result_of_a_tool, stream_of_a_call, forced_call, answer_in_a_schema, count_tokens),
    *(unknown_model, wrong_key, bad_field, picture),
]

if __name__ == "__main__":
    main(anthropic.__version__, STEPS)
