"""The official client, the present and the previous major version alike."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from steps import CAR, KEY, LIA, MIA, MODEL, main, plain, refused, usage, user


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


def no_such_route(address: str) -> Any:
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


STEPS = [
    *(models, chat, chat_of_parts_with_a_stop_string, chat_stream, chat_stream_without_usage, stream_helper),
    *(chat_logprobs, chat_logprobs_in_a_stream, completions, completions_stream, completions_echo_logprobs, token_ids),
    *(raw_response, unknown_model, wrong_key, bad_field, too_long, no_such_route, at_once),
]

if __name__ == "__main__":
    main(openai.__version__, STEPS)
