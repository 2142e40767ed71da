"""Single requests to a server: whether it answers, its models, its fields, and its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.base.http import HttpAnswer, Piece
from gapless.lab.http import Client, with_client
from gapless.lab.records import Sample
from gapless.lab.reply import EventReader, error_text, read_reply
from gapless.lab.target import PromptContent, Target

READY_POLL_SECONDS = 0.5
SILENT_SECONDS = 600.0
"""A long prompt on a slow machine may take minutes to its first token."""


class ServedModel(NamedTuple):
    """One entry of /v1/models. `max_len` is 0 if the server does not report it."""

    name: str
    max_len: int = 0


async def ask(client: Client, method: str, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of an answer with status 200; {} for any other answer. Raises ServerError for none."""
    body = b"" if fields is None else json.dumps(fields).encode()
    answer = await client.send(client.target.request(method, path, body))
    value = _json(answer) if answer.status == 200 else None
    return value if isinstance(value, dict) else {}


def _json(answer: HttpAnswer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return None


async def get(client: Client, path: str) -> HttpAnswer:
    """Return an answer whose status is 200. Raises ServerError for any other, or none."""
    answer = await client.send(client.target.request("GET", path))
    _check(client.target, path, answer)
    return answer


def fetch(target: Target, path: str) -> bytes:
    """Return the body of one GET. Raises ServerError. Runs an event loop of its own."""
    return asyncio.run(with_client(target, partial(get, path=path))).body


def _check(target: Target, path: str, answer: HttpAnswer) -> None:
    if answer.status == 200:
        return
    mend = ""
    if answer.status in (401, 403):
        mend = "; give the server's key with --api-key or $OPENAI_API_KEY"
    elif _json(answer) is None:
        mend = "; is that an OpenAI-compatible server?"
    where = target.base_url.rstrip("/").removesuffix("/v1") + path
    raise ServerError(f"{where} answered {answer.status}: {error_text(answer.body)}{mend}")


async def stream_events(client: Client, path: str, fields: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    """Post `fields` and yield the data of each server-sent event as it arrives.

    Closing the generator closes the connection. Raises ServerError when no answer comes, or one that is no stream, or
    when the server sends nothing for SILENT_SECONDS.
    """
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()
    data = client.target.request("POST", path, json.dumps(fields).encode())
    answer = asyncio.create_task(client.send(data, queue.put_nowait))
    answer.add_done_callback(lambda _: queue.put_nowait(None))
    reader = EventReader()
    try:
        while True:
            async with asyncio.timeout(SILENT_SECONDS):  # wait_for() may lose a cancellation before Python 3.12
                piece = await queue.get()
            if piece is None:
                break
            for event in reader.feed(piece.data):
                yield event
        _check(client.target, path, await answer)
    except TimeoutError as error:
        raise ServerError(f"{client.target.base_url}: nothing came for {SILENT_SECONDS:g} s") from error
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def list_models(client: Client) -> list[ServedModel]:
    """Return what the server serves. Raises ServerError."""
    value = _json(await get(client, "/v1/models"))
    cards = value.get("data") if isinstance(value, dict) else None
    found = [
        ServedModel(str(c["id"]), _whole(c.get("max_model_len")))
        for c in cards or ()
        if isinstance(c, dict) and "id" in c
    ]
    if not found:
        raise ServerError(f"{client.target.base_url} lists no model at /v1/models")
    return found


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


async def pick_model(client: Client) -> ServedModel:
    """Choose the target's model, or the first that the server lists. Raises ServerError naming the ones listed."""
    models = await list_models(client)
    wanted = client.target.model
    if not wanted:
        return models[0]
    for model in models:
        if model.name == wanted:
            return model
    raise ServerError(f"{client.target.base_url} has no model {wanted!r}; it has {', '.join(m.name for m in models)}")


async def wait_ready(client: Client, seconds: float) -> None:
    """Wait until the server lists its models and is healthy. Raises ServerError with the last failure."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        try:
            await list_models(client)
            health = await client.send(client.target.request("GET", "/health"))  # not every server has it
            if health.status == 503:
                raise ServerError(f"{client.target.base_url} is still loading its model")
            return
        except ServerError:
            if loop.time() + READY_POLL_SECONDS > end:
                raise
        await asyncio.sleep(READY_POLL_SECONDS)


async def one_reply(client: Client, content: PromptContent, output_len: int) -> tuple[HttpAnswer, Sample]:
    """Make one generation request that is not part of a run. Raises ServerError."""
    answer = await client.send(client.target.generation(content, output_len))
    return answer, read_reply(answer)


async def try_fields(client: Client, content: PromptContent, output_len: int) -> Target:
    """Find a target without the optional fields that its server refuses. Raises ServerError when none works."""
    target = client.target
    tries: list[tuple[str, ...]] = [(), ("stream_options",), ("ignore_eos",), ("stream_options", "ignore_eos")]
    first = ""
    for omit in tries:
        client.target = replace(target, omit=omit)
        answer, reply = await one_reply(client, content, output_len)
        if not reply.error:
            return client.target
        first = first or reply.error
        if answer.status not in (400, 422):
            break
    client.target = target
    raise ServerError(f"a first request to {target.base_url} failed: {first}")


async def server_vocabulary(client: Client) -> list[int] | None:
    """Return the ids of all ordinary tokens, from /tokenizer_info; None if the server does not report them."""
    info = await ask(client, "GET", "/tokenizer_info")
    added = info.get("added_tokens_decoder")
    special = {int(number) for number in added if str(number).isdecimal()} if isinstance(added, dict) else set[int]()
    size = _whole(info.get("vocab_size")) or min(special, default=0)
    return [number for number in range(size) if number not in special] or None


async def tokenize(client: Client, text: str) -> list[int] | None:
    """Return the server's token ids for a text, without special ones; None if it does not report them."""
    fields = {"model": client.target.model, "prompt": text, "add_special_tokens": False}
    tokens = (await ask(client, "POST", "/tokenize", fields)).get("tokens")
    return tokens if isinstance(tokens, list) else None


async def detokenize(client: Client, tokens: Sequence[int]) -> str | None:
    """Return the server's text for token ids; None if it does not report it."""
    fields = {"model": client.target.model, "tokens": list(tokens)}
    text = (await ask(client, "POST", "/detokenize", fields)).get("prompt")
    return text if isinstance(text, str) else None


class Codec(NamedTuple):
    """Text to tokens and back, by a server or on this machine; None if there is no tokenizer to ask."""

    encode: Callable[[Client, str], Awaitable[list[int] | None]] = tokenize
    decode: Callable[[Client, Sequence[int]], Awaitable[str | None]] = detokenize

    async def length(self, client: Client, text: str) -> int | None:
        tokens = await self.encode(client, text)
        return None if tokens is None else len(tokens)
