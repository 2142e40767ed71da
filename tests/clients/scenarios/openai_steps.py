"""The official client, the present and the previous major version alike."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from pydantic import BaseModel
from steps import (
    CAR,
    KEY,
    LIA,
    MIA,
    MODEL,
    PARIS,
    PERSON,
    SUNNY,
    items,
    main,
    plain,
    refused,
    spent,
    usage,
    user,
    weather,
)


class Person(BaseModel):
    name: str
    age: int
    city: str
    job: str


def sync(address: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def choice(one: Any) -> list[Any]:
    text = one.message.content if hasattr(one, "message") else one.text
    return [one.index, text, one.finish_reason]


def chunks(stream: Any) -> dict[str, Any]:
    """The text of a stream put together, how it ended, and its usage."""
    told: dict[str, Any] = {"text": "", "finish": None, "ids": set()}
    for chunk in stream:
        add(told, chunk)
    return done(told)


def add(told: dict[str, Any], chunk: Any) -> None:
    told["ids"].add(chunk.id)
    for one in chunk.choices:
        told["text"] += (one.delta.content if hasattr(one, "delta") else one.text) or ""
        told["finish"] = one.finish_reason or told["finish"]
    if chunk.usage:
        assert not chunk.choices
        told["usage"] = usage(chunk.usage)


def done(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "ids": len(told["ids"])}


def models(address: str) -> Any:
    with sync(address) as client:
        return {"models": [model.id for model in client.models.list()], "one": client.models.retrieve(MODEL).id}


def chat(address: str) -> Any:
    with sync(address) as client:
        said = client.chat.completions.create(
            model=MODEL, messages=user(MIA), max_completion_tokens=60, temperature=0, seed=1
        )
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def chat_of_parts_with_a_stop_string(address: str) -> Any:
    parts = [{"role": "system", "content": "Be short and exact."}]
    parts.append({"role": "user", "content": [{"type": "text", "text": CAR}]})
    with sync(address) as client:
        said = client.chat.completions.create(model=MODEL, messages=parts, temperature=0, stop=["####"], n=2)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def chat_stream(address: str) -> Any:
    with sync(address) as client:
        return chunks(
            client.chat.completions.create(
                model=MODEL, messages=user(MIA), temperature=0, stream=True, stream_options={"include_usage": True}
            )
        )


def chat_stream_without_usage(address: str) -> Any:
    with sync(address) as client:
        return chunks(
            client.chat.completions.create(model=MODEL, messages=user(CAR), max_tokens=9, temperature=0, stream=True)
        )


def stream_helper(address: str) -> Any:
    with sync(address) as client, client.chat.completions.stream(model=MODEL, messages=user(LIA), temperature=0) as s:
        told = "".join(event.delta for event in s if event.type == "content.delta")
        said = s.get_final_completion()
    return {"text": told, "choices": [choice(one) for one in said.choices]}


def chat_logprobs(address: str) -> Any:
    with sync(address) as client:
        said = client.chat.completions.create(
            model=MODEL, messages=user(MIA), max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
    content = said.choices[0].logprobs.content
    assert all(bytes(one.bytes).decode("utf-8", "replace") == one.token for one in content)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    return {"tokens": [one.token for one in content], "tops": [len(one.top_logprobs) for one in content]}


def chat_logprobs_in_a_stream(address: str) -> Any:
    tokens: list[str] = []
    with sync(address) as client:
        for chunk in client.chat.completions.create(
            model=MODEL, messages=user(MIA), max_tokens=8, temperature=0, logprobs=True, stream=True
        ):
            for one in chunk.choices:
                tokens += [entry.token for entry in one.logprobs.content] if one.logprobs else []
    return {"tokens": tokens}


def completions(address: str) -> Any:
    with sync(address) as client:
        said = client.completions.create(model=MODEL, prompt=[plain(MIA), plain(CAR)], max_tokens=16, temperature=0)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def completions_stream(address: str) -> Any:
    with sync(address) as client:
        return chunks(
            client.completions.create(
                model=MODEL,
                prompt=plain(CAR),
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )


def completions_echo_logprobs(address: str) -> Any:
    with sync(address) as client:
        said = client.completions.create(
            model=MODEL, prompt="3 + 4 = 7", max_tokens=1, temperature=0, logprobs=1, echo=True
        )
    scores = said.choices[0].logprobs
    assert scores.token_logprobs[0] is None and all(score <= 0 for score in scores.token_logprobs[1:])
    return {"tokens": scores.tokens, "offsets": scores.text_offset, "choices": [choice(one) for one in said.choices]}


def token_ids(address: str) -> Any:
    with sync(address) as client:
        said = client.completions.create(model=MODEL, prompt=[10, 20, 30], max_tokens=3, temperature=0)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def raw_response(address: str) -> Any:
    headers = {"X-Request-Id": "my-own-id"}
    with sync(address) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=user(MIA), max_tokens=1, temperature=0, extra_headers=headers
        )
    assert raw.parse().choices[0].finish_reason == "length"
    return {"status": raw.status_code, "type": raw.headers["content-type"]}


def failing(work: Any) -> Any:
    try:
        work()
    except openai.APIStatusError as error:
        return refused(error, error.status_code, dict(error.body))
    raise AssertionError("it was accepted")


def unknown_model(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.chat.completions.create(model="gpt-4", messages=user("Hi")))


def wrong_key(address: str) -> Any:
    with sync(address, "another-key") as client:
        return failing(lambda: client.models.list())


def bad_field(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.chat.completions.create(model=MODEL, messages=user("Hi"), temperature=500))


def too_long(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.completions.create(model=MODEL, prompt=[5] * 8, max_tokens=10**6))


def embeddings(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.embeddings.create(model=MODEL, input="x"))


async def at_once(address: str) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(text: str) -> Any:
            said = await client.chat.completions.create(model=MODEL, messages=user(text), max_tokens=12, temperature=0)
            return said.choices[0].message.content

        async def stream(text: str) -> Any:
            told: dict[str, Any] = {"text": "", "finish": None, "ids": set()}
            async for chunk in await client.completions.create(
                model=MODEL, prompt=plain(text), max_tokens=12, temperature=0, stream=True
            ):
                add(told, chunk)
            return told["text"]

        return {"texts": sorted(await asyncio.gather(ask(MIA), ask(CAR), stream(MIA), stream(CAR)))}


def chat_parse(address: str) -> Any:
    with sync(address) as client:
        said = client.chat.completions.parse(
            model=MODEL, messages=user(PERSON), temperature=0, response_format=Person, max_tokens=200
        )
    return {"json": [said.choices[0].message.parsed.model_dump()], "usage": usage(said.usage)}


def responses(address: str) -> Any:
    with sync(address) as client:
        said = client.responses.create(
            model=MODEL, instructions="Be short and exact.", input=MIA, temperature=0, metadata={"a": "b"}
        )
    assert said.metadata == {"a": "b"} and said.output_text == said.output[0].content[0].text
    return {"items": items(said), "finish": said.status, "usage": spent(said.usage)}


def responses_cut_off(address: str) -> Any:
    with sync(address) as client:
        said = client.responses.create(model=MODEL, input=MIA, temperature=0, max_output_tokens=16, store=False)
    assert said.incomplete_details.reason == "max_output_tokens"
    return {"items": items(said), "finish": said.status, "usage": spent(said.usage)}


def responses_of_a_tool(address: str) -> Any:
    """A call, and an answer after its result: each request brings the whole conversation."""
    with sync(address) as client:
        told: list[Any] = user(PARIS)
        first = client.responses.create(model=MODEL, input=told, tools=[weather(strict=True)], temperature=0)
        told += [item.model_dump(exclude_none=True) for item in first.output]
        told.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": SUNNY})
        then = client.responses.create(model=MODEL, input=told, tools=[weather(strict=True)], temperature=0)
    return {"items": sorted(items(first) + items(then)), "usages": sorted([spent(first.usage), spent(then.usage)])}


def responses_stream(address: str) -> Any:
    with sync(address) as client, client.responses.stream(model=MODEL, input=LIA, temperature=0) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        said = stream.get_final_response()
    return {"text": told, "items": items(said), "finish": said.status, "usage": spent(said.usage)}


def responses_stream_of_a_call(address: str) -> Any:
    with (
        sync(address) as client,
        client.responses.stream(model=MODEL, input=PARIS, tools=[weather(strict=False)], temperature=0) as stream,
    ):
        told = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        said = stream.get_final_response()
    assert told == said.output[0].arguments
    return {"items": items(said), "finish": said.status}


def responses_parse(address: str) -> Any:
    with sync(address) as client:
        said = client.responses.parse(model=MODEL, input=PERSON, temperature=0, text_format=Person)
    return {"json": [said.output_parsed.model_dump()], "finish": said.status}


def responses_are_not_stored(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.responses.retrieve("resp_1"))


def responses_that_need_a_store(address: str) -> Any:
    with sync(address) as client:
        return failing(lambda: client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1"))


STEPS = [
    *(models, chat, chat_of_parts_with_a_stop_string, chat_stream, chat_stream_without_usage, stream_helper),
    *(chat_logprobs, chat_logprobs_in_a_stream, completions, completions_stream, completions_echo_logprobs, token_ids),
    *(raw_response, unknown_model, wrong_key, bad_field, too_long, embeddings, at_once),
    *(chat_parse, responses, responses_cut_off, responses_of_a_tool, responses_stream, responses_stream_of_a_call),
    *(responses_parse, responses_are_not_stored, responses_that_need_a_store),
]

if __name__ == "__main__":
    main(openai.__version__, STEPS)
