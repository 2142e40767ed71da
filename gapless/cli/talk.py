"""Sources of answers, a server at a URL or an engine in this process, and their display."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import gapless
from gapless.base.errors import ServerError
from gapless.lab.http import Client
from gapless.lab.probe import list_models, stream_events
from gapless.lab.reply import parse_event

Messages = list[dict[str, str]]
ChatInput = str | Messages
"""A text to continue, or a conversation to answer."""


class TextPart(NamedTuple):
    """The next bit of an answer. `tokens` counts the answer so far; None when not known yet."""

    text: str
    tokens: int | None = None


TextParts = AsyncGenerator[TextPart]
"""An answer. Closing it before its end stops it; it raises GaplessError when it cannot come."""


Answerer = Callable[[ChatInput, dict[str, Any]], TextParts]


async def answer_here(llm: gapless.AsyncLLM, question: ChatInput, fields: dict[str, Any]) -> TextParts:
    """Answer with an engine in this process, by sampling settings that bear the API's names."""
    prompt: Any = question if isinstance(question, str) else await llm.chat_prompt(question)
    params = llm.get_default_sampling_params(max_tokens=None).replace(**fields)
    count = 0
    stream = cast(AsyncGenerator[Any], llm.stream(prompt, params))
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            count += len(delta.token_ids)
            yield TextPart(delta.text, count)


async def answer_there(client: Client, question: ChatInput, fields: dict[str, Any]) -> TextParts:
    """Answer as `answer_here` does, with the client's server; its first model stands for a target without one."""
    if not client.target.model:
        client.target = replace(client.target, model=(await list_models(client))[0].name)
    bare = isinstance(question, str)
    path, asked = ("/v1/completions", "prompt") if bare else ("/v1/chat/completions", "messages")
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    fields = {"model": client.target.model, asked: question, **fields, **streaming}
    async with contextlib.aclosing(stream_events(client, path, fields)) as events:
        async for data in events:
            if data == b"[DONE]":
                return
            yield _part(parse_event(data))
    raise ServerError("the server's answer broke off before its end")


def _part(event: dict[str, Any]) -> TextPart:
    usage = event.get("usage") or {}
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return TextPart(text, usage.get("completion_tokens"))


async def show(answer: TextParts) -> tuple[str, str]:
    """Print an answer while it comes. Return its text, and how long it took in one line."""
    start = time.perf_counter()
    first, tokens, texts = 0.0, None, []
    async with contextlib.aclosing(answer) as parts:
        async for part in parts:
            if part.text:
                first = first or time.perf_counter() - start
                texts.append(part.text)
                sys.stdout.write(part.text)
                sys.stdout.flush()
            tokens = part.tokens if part.tokens is not None else tokens
    sys.stdout.write("\n")
    sys.stdout.flush()
    total = time.perf_counter() - start
    return "".join(texts), _timing(tokens, first or total, total)


def _timing(tokens: int | None, first: float, total: float) -> str:
    """Seconds to the first text and to the end, as time to first token and tokens per second after it."""
    begun = f"first token after {first * 1000:.0f} ms"
    if not tokens:
        return f"{begun}; {total:.2f} s"
    rate = f", {(tokens - 1) / (total - first):.1f} tokens/s" if tokens > 1 and total > first else ""
    return f"{begun}; {tokens} tokens in {total:.2f} s{rate}"
