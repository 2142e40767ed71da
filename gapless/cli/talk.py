"""Something that answers: a server at a URL, or an engine in this process. Commands see only this."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from gapless.base.config import EngineConfig
from gapless.cli.errors import UsageError
from gapless.cli.flags import Settings

Messages = list[dict[str, str]]


class Piece(NamedTuple):
    """A bit of an answer. `tokens` counts the answer so far; None when not known yet."""

    text: str
    tokens: int | None = None
    finish: str | None = None


class Talker(Protocol):
    """`fields` are sampling settings under the API's names. Both raise GaplessError when the answer cannot come."""

    def chat(self, messages: Messages, fields: dict[str, Any]) -> Iterator[Piece]: ...

    def complete(self, prompt: str, fields: dict[str, Any]) -> Iterator[Piece]: ...

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


def show(pieces: Iterator[Piece]) -> Answer:
    """Print an answer while it comes."""
    start = time.perf_counter()
    first, tokens, finish, texts = 0.0, None, None, []
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


def open_talker(settings: Settings, url: str | None, api_key: str | None) -> Talker:
    """The server at `url`, else an engine in this process. Raises UsageError for engine flags given with a URL."""
    if url is None:
        settings.build(EngineConfig)  # a wrong flag is told before torch is loaded
        from gapless.cli.local import LocalTalker

        return LocalTalker(settings.given(EngineConfig))
    wrong = sorted((settings.typed & settings.given(EngineConfig).keys()) - {"model", "seed"})
    if wrong:
        raise UsageError(f"--{wrong[0].replace('_', '-')} is a matter of the server, not of a client with --url")
    from gapless.cli.remote import RemoteTalker

    return RemoteTalker(url, api_key, settings.given(EngineConfig).get("model") if "model" in settings.typed else None)
