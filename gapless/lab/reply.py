"""Reads streamed answers: server-sent events, and their numbers as a sample. Does no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from gapless.base.errors import ServerError
from gapless.base.http import HttpAnswer, Piece
from gapless.lab.records import Sample

TEXT_KEYS = ("content", "reasoning", "reasoning_content")


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
    """Yield the data of each event, with the time of its last byte."""
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


def read_reply(answer: HttpAnswer, asked: Sample | None = None) -> Sample:
    """Complete the sample of a streaming request with its answer; `error` has its fault."""
    asked = asked or Sample()
    if answer.status != 200:
        return asked._replace(ended=answer.ended, error=f"HTTP {answer.status}: {error_text(answer.body)}")
    events, texts, ids = list[float](), list[str](), list[int]()
    last: float | None = None
    usage: dict[str, Any] = {}
    finish = error = ""
    try:
        for at, data in server_events(answer.pieces):
            event = parse_event(data) if data != b"[DONE]" else {}
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                last, text, ends = at, _text(choice), choice.get("finish_reason") or ""
                opening = "role" in (choice.get("delta") or {}) and not text
                # A token may show no text of its own: half a character, or one that the detokenizer holds back.
                if text or choice.get("token_ids") or not (ends or opening):
                    events.append(at)
                texts.append(text)
                ids += choice.get("token_ids") or ()
                finish = ends or finish
    except ServerError as failure:
        error = str(failure)
    # Servers may put the only text into the event that also ends the stream, or hold all of it back.
    events = events or ([] if last is None else [last])
    if not error and not events:
        error = "the stream holds no output"
    elif not error and not finish:
        error = "the stream broke off: no finish_reason"
    tokens = int(usage.get("completion_tokens") or 0)
    return asked._replace(
        events=tuple(events),
        ended=answer.ended if last is None else last,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=tokens or len(events),
        counted=not tokens,
        text="".join(texts),
        token_ids=tuple(ids),
        finish=finish,
        error=error,
    )


def _text(choice: dict[str, Any]) -> str:
    """The text that a choice adds, reasoning and calls of tools included."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts = [delta.get(key) for key in TEXT_KEYS]
    parts += [call.get(key) for call in calls for key in ("name", "arguments")]
    return "".join(part or "" for part in parts)


def error_text(body: bytes) -> str:
    """Return the message in an error body of any shape, at most 300 characters."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip() or "no text"
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
