"""What the generator asks a server before it measures: is it there, what does it serve, which fields does it take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.lab.http import Answer, Client, HttpError
from gapless.lab.reply import Reply, error_text, read_reply
from gapless.lab.target import Content, Target

POLL_SECONDS = 0.5


class Model(NamedTuple):
    """One entry of /v1/models. `max_len` is 0 where the server does not say."""

    name: str
    max_len: int = 0


async def ask(client: Client, method: str, path: str, fields: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON (None where it is none). Raises ServerError when nobody answers."""
    body = b"" if fields is None else json.dumps(fields).encode()
    try:
        answer = await client.send(client.target.request(method, path, body))
    except HttpError as error:
        raise ServerError(f"no answer from {client.target.base_url}: {error}; is a server running there?") from error
    try:
        return answer.status, json.loads(answer.body)
    except ValueError:
        return answer.status, None


async def list_models(client: Client) -> list[Model]:
    """What the server serves. Raises ServerError."""
    status, value = await ask(client, "GET", "/v1/models")
    where = f"{client.target.base_url}/v1/models"
    if status in (401, 403):
        raise ServerError(f"{where} answered {status}: give the server's key with --api-key or $OPENAI_API_KEY")
    if status != 200:
        told = "is that an OpenAI-compatible server?" if value is None else error_text(json.dumps(value).encode())
        raise ServerError(f"{where} answered {status}: {told}")
    cards = value.get("data") if isinstance(value, dict) else None
    found = [
        Model(str(c["id"]), _whole(c.get("max_model_len"))) for c in cards or () if isinstance(c, dict) and "id" in c
    ]
    if not found:
        raise ServerError(f"{where} lists no model")
    return found


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


async def pick_model(client: Client) -> Model:
    """The target's model, or the first that the server lists. Raises ServerError naming what there is."""
    models = await list_models(client)
    wanted = client.target.model
    if not wanted:
        return models[0]
    for model in models:
        if model.name == wanted:
            return model
    raise ServerError(f"{client.target.base_url} has no model {wanted!r}; it has {', '.join(m.name for m in models)}")


async def wait_ready(client: Client, seconds: float) -> None:
    """Until the server lists its models and is healthy. Raises ServerError with the last failure."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        try:
            await list_models(client)
            status, _ = await ask(client, "GET", "/health")  # not every server has it
            if status == 503:
                raise ServerError(f"{client.target.base_url} is still loading its model")
            return
        except ServerError:
            if loop.time() + POLL_SECONDS > end:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def one_reply(client: Client, content: Content, output_len: int) -> tuple[Answer, Reply]:
    """One request outside of any run. Raises ServerError."""
    try:
        answer = await client.send(client.target.generation(content, output_len))
    except HttpError as error:
        raise ServerError(f"{client.target.base_url}: {error}") from error
    return answer, read_reply(answer)


async def try_fields(client: Client, content: Content, output_len: int) -> Target:
    """The target without the optional fields that its server refuses. Raises ServerError when it refuses all."""
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
    """Token ids that are no special tokens, from /tokenizer_info; None where the server does not say."""
    status, info = await ask(client, "GET", "/tokenizer_info")
    if status != 200 or not isinstance(info, dict):
        return None
    added = info.get("added_tokens_decoder")
    special = {int(number) for number in added if str(number).isdecimal()} if isinstance(added, dict) else set[int]()
    size = _whole(info.get("vocab_size")) or min(special, default=0)
    return [number for number in range(size) if number not in special] or None


async def tokenize(client: Client, text: str) -> list[int] | None:
    """The server's token ids of a text, without special ones; None where it does not say."""
    fields = {"model": client.target.model, "prompt": text, "add_special_tokens": False}
    status, value = await ask(client, "POST", "/tokenize", fields)
    tokens = value.get("tokens") if status == 200 and isinstance(value, dict) else None
    return tokens if isinstance(tokens, list) else None


async def detokenize(client: Client, tokens: Sequence[int]) -> str | None:
    """The server's text of token ids; None where it does not say."""
    fields = {"model": client.target.model, "tokens": list(tokens)}
    status, value = await ask(client, "POST", "/detokenize", fields)
    text = value.get("prompt") if status == 200 and isinstance(value, dict) else None
    return text if isinstance(text, str) else None
