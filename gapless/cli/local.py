"""An engine in this process, asked one question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import gapless
from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.cli.errors import UsageError
from gapless.cli.talk import Messages, Piece


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """SamplingParams of the given flags. Raises UsageError for a value out of range."""
    try:
        return SamplingParams.from_dict({"max_tokens": None, **fields})
    except RequestError as error:
        raise UsageError(str(error)) from error


class LocalTalker:
    """Drives an AsyncLLM on an event loop of its own, which runs only while an answer is awaited."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._llm = gapless.AsyncLLM(**engine)
        except BaseException:
            self._loop.close()
            raise

    def chat(self, messages: Messages, fields: dict[str, Any]) -> Iterator[Piece]:
        return self._pieces(self._llm.chat(messages, sampling_params(fields)))

    def complete(self, prompt: str, fields: dict[str, Any]) -> Iterator[Piece]:
        return self._pieces(self._llm.generate(prompt, sampling_params(fields)))

    def _pieces(self, outputs: AsyncGenerator[Any]) -> Iterator[Piece]:
        seen = 0
        try:
            while (output := self._loop.run_until_complete(anext(outputs, None))) is not None:
                done = output.outputs[0]
                yield Piece(done.text[seen:], len(done.token_ids), done.finish_reason)
                seen = len(done.text)
        finally:
            # Ctrl-C comes here too: closing the stream aborts the request.
            self._loop.run_until_complete(outputs.aclose())

    def close(self) -> None:
        self._loop.run_until_complete(self._llm.close())
        self._loop.close()
