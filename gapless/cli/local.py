"""An engine in this process, asked one question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar, cast

import gapless
from gapless.base.params import SamplingParams
from gapless.base.progress import starting
from gapless.cli.talk import Messages, Piece, Pieces

T = TypeVar("T")


def with_defaults(defaults: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    """The model's own settings under what was given; without a number, output goes up to the context limit."""
    return defaults.replace(**{"max_tokens": None, **fields})


class LocalTalker:
    """Drives an AsyncLLM on an event loop of its own, which runs only while something is awaited."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._llm = gapless.AsyncLLM.from_engine_args(engine)
        self._runner = asyncio.Runner()
        try:
            with starting():
                self._await(self._llm.start())
        except BaseException:
            self.close()
            raise

    def chat(self, messages: Messages, fields: dict[str, Any]) -> Pieces:
        return self._pieces(self._await(self._llm.chat_prompt(messages)), fields)

    def complete(self, prompt: str, fields: dict[str, Any]) -> Pieces:
        return self._pieces(prompt, fields)

    def close(self) -> None:
        self._await(self._llm.close())
        self._runner.close()

    def _pieces(self, prompt: Any, fields: dict[str, Any]) -> Pieces:
        params = with_defaults(self._llm.get_default_sampling_params(), fields)
        deltas = cast(AsyncGenerator[Any], self._llm.stream(prompt, params))
        count = 0
        try:
            while (delta := self._await(anext(deltas, None))) is not None:
                count += len(delta.token_ids)
                yield Piece(delta.text, count, delta.finish_reason)
        finally:
            # Ctrl-C comes here too: closing the stream aborts the request.
            self._await(deltas.aclose())

    def _await(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self._runner.run(wait())
