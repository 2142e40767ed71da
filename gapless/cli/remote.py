"""Any OpenAI-compatible server, asked one question at a time."""

from __future__ import annotations

import contextlib
from typing import Any

from gapless.base.errors import ServerError
from gapless.cli.talk import Question, TextPart, TextParts
from gapless.lab.http import Client
from gapless.lab.probe import list_models, stream_events
from gapless.lab.reply import parse_event
from gapless.lab.target import Target


class RemoteTalker:
    """Answers with the server at `url`; `model` defaults to the first that it lists."""

    def __init__(self, url: str, api_key: str = "", model: str | None = None) -> None:
        self._client = Client(Target(url, api_key=api_key))
        self._model = model

    async def start(self) -> None:
        """Do nothing: the first question opens a connection."""

    async def close(self) -> None:
        self._client.close()

    async def answer(self, question: Question, fields: dict[str, Any]) -> TextParts:
        self._model = self._model or (await list_models(self._client))[0].name
        bare = isinstance(question, str)
        path, asked = ("/v1/completions", "prompt") if bare else ("/v1/chat/completions", "messages")
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        fields = {"model": self._model, asked: question, **fields, **streaming}
        async with contextlib.aclosing(stream_events(self._client, path, fields)) as events:
            async for data in events:
                if data == b"[DONE]":
                    return
                yield _part(parse_event(data))
        raise ServerError("the server's answer broke off before its end")


def _part(event: dict[str, Any]) -> TextPart:
    usage = event.get("usage") or {}
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return TextPart(text, usage.get("completion_tokens"), choice.get("finish_reason"))
