"""Reads streamed answers: server-sent events, and what they say as the numbers of a sample. Does no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.lab.http import HttpAnswer, Piece

TEXT_KEYS = ("content", "reasoning", "reasoning_content")


class Reply(NamedTuple):
    """Contents and times of an answer. `counted`: the server sent no usage, so output tokens are events."""

    events: tuple[float, ...] = ()
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    error: str = ""


class EventReader:
    """Cuts the data of server-sent events out of a stream. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the events that end within `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event


def server_events(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the data of each event, with the time at which its last byte was read."""
    reader = EventReader()
    for at, data in pieces:
        for event in reader.feed(data):
            yield Piece(at, event)


def parse_event(data: bytes) -> dict[str, Any]:
    """Parse the JSON of one event. Raises ServerError for anything else, and for an error that the server sends."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"an event is no JSON object: {data[:80]!r}")
    if event.get("error"):
        raise ServerError(f"the server stopped answering: {error_text(data)}")
    return event


def read_reply(answer: HttpAnswer) -> Reply:
    """Read the answer to a streaming request; `error` says what is wrong with it."""
    if answer.status != 200:
        return Reply(ended=answer.ended, error=f"HTTP {answer.status}: {error_text(answer.body)}")
    reader, error = _Reader(), ""
    try:
        for at, data in server_events(answer.pieces):
            if data != b"[DONE]":
                reader.take(at, parse_event(data))
    except ServerError as failure:
        error = str(failure)
    return reader.reply(answer.ended, error)


class _Reader:
    """Adds up the events of one stream."""

    def __init__(self) -> None:
        self._events: list[float] = []
        self._last: float | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finish = ""

    def take(self, at: float, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            self._choice(at, choice)

    def _choice(self, at: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if delta is None:
            text, opening = choice.get("text") or "", False
        else:
            text = "".join(delta.get(key) or "" for key in TEXT_KEYS)
            text += "".join(_tool_text(call) for call in delta.get("tool_calls") or ())
            opening = "role" in delta and not text
        ids = choice.get("token_ids") or ()
        finish = choice.get("finish_reason") or ""
        # A token may show no text of its own: half a character, or one that the detokenizer holds back.
        if text or ids or not (finish or opening):
            self._events.append(at)
        self._texts.append(text)
        self._ids += ids
        self._finish = finish or self._finish
        self._last = at

    def reply(self, ended: float, error: str) -> Reply:
        tokens = int(self._usage.get("completion_tokens") or 0)
        # Servers may put the only text into the event that also ends the stream, or hold all of it back.
        events = self._events or ([] if self._last is None else [self._last])
        if not error and not events:
            error = "the stream holds no output"
        elif not error and not self._finish:
            error = "the stream broke off: no finish_reason"
        return Reply(
            tuple(events),
            ended if self._last is None else self._last,
            int(self._usage.get("prompt_tokens") or 0),
            tokens or len(events),
            not tokens,
            "".join(self._texts),
            tuple(self._ids),
            self._finish,
            error,
        )


def _tool_text(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


def error_text(body: bytes) -> str:
    """Return the message in an error body of any shape, at most 300 characters."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip() or "no text"
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
