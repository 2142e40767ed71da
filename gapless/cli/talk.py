"""What answers a question, a server at a URL or an engine in this process, and how an answer is shown."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol

Messages = list[dict[str, str]]
Question = str | Messages
"""A text to go on with, or a conversation to answer."""


class TextPart(NamedTuple):
    """The next bit of an answer. `tokens` counts the answer so far; None when not known yet."""

    text: str
    tokens: int | None = None
    finish: str | None = None


TextParts = AsyncGenerator[TextPart]


class Talker(Protocol):
    """Answers one question at a time. `fields` are sampling settings under the API's names.

    Closing an answer before its end stops it. It raises GaplessError when it cannot come.
    """

    async def start(self) -> None: ...

    def answer(self, question: Question, fields: dict[str, Any]) -> TextParts: ...

    async def close(self) -> None: ...


class ShownAnswer(NamedTuple):
    """A whole answer and how long it took, in seconds; `first` is the time to the first text."""

    text: str
    tokens: int | None
    finish: str | None
    first: float
    total: float

    def stats(self) -> str:
        """Return one line: time to first token, and tokens per second after it."""
        after = self.total - self.first
        if not self.tokens:
            return f"first token after {self.first * 1000:.0f} ms; {self.total:.2f} s"
        rate = f", {(self.tokens - 1) / after:.1f} tokens/s" if self.tokens > 1 and after > 0 else ""
        return f"first token after {self.first * 1000:.0f} ms; {self.tokens} tokens in {self.total:.2f} s{rate}"


async def show(answer: TextParts) -> ShownAnswer:
    """Print an answer while it comes."""
    start = time.perf_counter()
    first, tokens, finish, texts = 0.0, None, None, []
    async with contextlib.aclosing(answer) as parts:
        async for part in parts:
            if part.text:
                first = first or time.perf_counter() - start
                texts.append(part.text)
                sys.stdout.write(part.text)
                sys.stdout.flush()
            tokens = part.tokens if part.tokens is not None else tokens
            finish = part.finish or finish
    sys.stdout.write("\n")
    sys.stdout.flush()
    total = time.perf_counter() - start
    return ShownAnswer("".join(texts), tokens, finish, first or total, total)
