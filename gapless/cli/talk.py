"""Something that answers: a server at a URL, or an engine in this process. Commands see only this."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

Messages = list[dict[str, str]]
Pieces = Generator["Piece"]


class Piece(NamedTuple):
    """A bit of an answer. `tokens` counts the answer so far; None when not known yet."""

    text: str
    tokens: int | None = None
    finish: str | None = None


class Talker(Protocol):
    """`fields` are sampling settings under the API's names. Both raise GaplessError when the answer cannot come.

    Closing the pieces before their end gives the answer up.
    """

    def chat(self, messages: Messages, fields: dict[str, Any]) -> Pieces: ...

    def complete(self, prompt: str, fields: dict[str, Any]) -> Pieces: ...

    def close(self) -> None: ...


class Answer(NamedTuple):
    """A whole answer and how long it took. Seconds; `first` is the time to the first text."""

    text: str
    tokens: int | None
    finish: str | None
    first: float
    total: float

    def stats(self) -> str:
        """One line: time to first token, and tokens a second after it."""
        after = self.total - self.first
        if not self.tokens:
            return f"first token after {self.first * 1000:.0f} ms; {self.total:.2f} s"
        rate = f", {(self.tokens - 1) / after:.1f} tokens/s" if self.tokens > 1 and after > 0 else ""
        return f"first token after {self.first * 1000:.0f} ms; {self.tokens} tokens in {self.total:.2f} s{rate}"


def show(pieces: Pieces) -> Answer:
    """Print an answer while it comes."""
    start = time.perf_counter()
    first, tokens, finish, texts = 0.0, None, None, []
    with contextlib.closing(pieces):
        for piece in pieces:
            if piece.text:
                first = first or time.perf_counter() - start
                texts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            tokens = piece.tokens if piece.tokens is not None else tokens
            finish = piece.finish or finish
    sys.stdout.write("\n")
    sys.stdout.flush()
    total = time.perf_counter() - start
    return Answer("".join(texts), tokens, finish, first or total, total)
