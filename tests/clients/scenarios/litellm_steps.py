"""litellm, by both of its ways to a server of one's own: `hosted_vllm/` and `openai/`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import litellm
from steps import CAR, KEY, LIA, MIA, MODEL, main, plain, refused, usage, user


def options(address: str, way: str, key: str = KEY) -> dict[str, Any]:
    base = {"model": f"{way}/{MODEL}", "api_base": f"{address}/v1", "api_key": key}
    return {**base, "temperature": 0, "num_retries": 0, "max_retries": 0}


def choice(one: Any) -> list[Any]:
    text = one.message.content if hasattr(one, "message") else one.text
    return [one.index, text, one.finish_reason]


def stream(address: str, way: str) -> Any:
    told: dict[str, Any] = {"text": "", "finish": None}
    for chunk in litellm.completion(
        **options(address, way), messages=user(MIA), max_tokens=12, stream=True, stream_options={"include_usage": True}
    ):
        for one in chunk.choices:
            told["text"] += one.delta.content or ""
            told["finish"] = one.finish_reason or told["finish"]
        if getattr(chunk, "usage", None):
            told["usage"] = usage(chunk.usage)
    return told


def chat_hosted_vllm(address: str) -> Any:
    said = litellm.completion(**options(address, "hosted_vllm"), messages=user(MIA), max_tokens=16, seed=3)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def chat_openai(address: str) -> Any:
    said = litellm.completion(**options(address, "openai"), messages=user(CAR), max_tokens=60, stop=["####"])
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def chat_stream_hosted_vllm(address: str) -> Any:
    return stream(address, "hosted_vllm")


def chat_stream_openai(address: str) -> Any:
    return stream(address, "openai")


def chat_logprobs(address: str) -> Any:
    said = litellm.completion(
        **options(address, "hosted_vllm"), messages=user(MIA), max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = said.choices[0].logprobs.content
    return {"tokens": [one.token for one in content], "tops": [len(one.top_logprobs) for one in content]}


def text_completion(address: str) -> Any:
    said = litellm.text_completion(**options(address, "openai"), prompt=plain(LIA), max_tokens=16)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


async def asynchronous(address: str) -> Any:
    said = await litellm.acompletion(**options(address, "hosted_vllm"), messages=user(CAR), max_tokens=16)
    return {"choices": [choice(one) for one in said.choices], "usage": usage(said.usage)}


def failing(work: Any) -> Any:
    try:
        work()
    except litellm.exceptions.APIError as error:
        return refused(error, error.status_code, {})
    except Exception as error:  # litellm's classes have no base of their own
        return refused(error, getattr(error, "status_code", 0), {})
    raise AssertionError("it was accepted")


def bad_field(address: str) -> Any:
    settings = {**options(address, "openai"), "temperature": 500}
    return failing(lambda: litellm.completion(**settings, messages=user("Hi")))


def wrong_key(address: str) -> Any:
    return failing(lambda: litellm.completion(**options(address, "hosted_vllm", "another-key"), messages=user("Hi")))


def unknown_model(address: str) -> Any:
    settings = {**options(address, "openai"), "model": "openai/nobody"}
    return failing(lambda: litellm.completion(**settings, messages=user("Hi")))


def too_long(address: str) -> Any:
    return failing(lambda: litellm.completion(**options(address, "openai"), messages=user("Hi"), max_tokens=10**6))


STEPS = [
    *(chat_hosted_vllm, chat_openai, chat_stream_hosted_vllm, chat_stream_openai, chat_logprobs, text_completion),
    *(asynchronous, bad_field, wrong_key, unknown_model, too_long),
]

if __name__ == "__main__":
    main(importlib.metadata.version("litellm"), STEPS)
