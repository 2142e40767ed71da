"""An engine in this process, asked one question at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

import gapless
from gapless.base.params import SamplingParams
from gapless.base.progress import starting
from gapless.cli.talk import Question, TextPart, TextParts


def with_defaults(defaults: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    """Complete `fields` with the model's own settings; without max_tokens, output goes up to the context limit."""
    return defaults.replace(**{"max_tokens": None, **fields})


class LocalTalker:
    """Answers with an AsyncLLM."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._llm = gapless.AsyncLLM.from_engine_args(engine)

    async def start(self) -> None:
        with starting():
            await self._llm.start()

    async def answer(self, question: Question, fields: dict[str, Any]) -> TextParts:
        prompt: Any = question if isinstance(question, str) else await self._llm.chat_prompt(question)
        params = with_defaults(self._llm.get_default_sampling_params(), fields)
        count = 0
        stream = cast(AsyncGenerator[Any], self._llm.stream(prompt, params))
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                count += len(delta.token_ids)
                yield TextPart(delta.text, count, delta.finish_reason)

    async def close(self) -> None:
        await self._llm.close()
