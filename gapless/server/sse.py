"""Server-sent events of both endpoints. The chunk of one token is put together from bytes made once a stream."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gapless.server.protocol import Usage

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"

_json = msgspec.json.encode


class Chunks(Protocol):
    """Makes the events of one stream. `usage` goes into the chunk when it is not None."""

    def opening(self, index: int) -> bytes: ...

    def text(self, index: int, text: str, usage: Usage | None = None) -> bytes: ...

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None
    ) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class _Frame:
    """What all chunks of one stream share."""

    def __init__(self, id: str, object: str, created: int, model: str, null_usage: bool) -> None:
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            *(_json(id), _json(object), created),
            _json(model),
        )
        # A client that asked for usage finds the field in every chunk, null until the last.
        self._tail = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    def wrap(self, choice: bytes, usage: Usage | None) -> bytes:
        tail = self._tail if usage is None else b'],"usage":%b}\n\n' % _json(usage)
        return self._head + choice + tail


class ChatChunks:
    """chat.completion.chunk events."""

    def __init__(self, id: str, created: int, model: str, null_usage: bool) -> None:
        self._frame = _Frame(id, "chat.completion.chunk", created, model, null_usage)

    def opening(self, index: int) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._frame.wrap(delta % index, None)

    def text(self, index: int, text: str, usage: Usage | None = None) -> bytes:
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, _json(text))
        return self._frame.wrap(choice, usage)

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None
    ) -> bytes:
        delta = b'{"content":%b}' % _json(text) if text else b"{}"
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            *(index, delta),
            *(_json(reason), _json(stop_reason)),
        )
        return self._frame.wrap(choice, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.wrap(b"", usage)


class CompletionChunks:
    """text_completion events."""

    def __init__(self, id: str, created: int, model: str, null_usage: bool) -> None:
        self._frame = _Frame(id, "text_completion", created, model, null_usage)

    def opening(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str, usage: Usage | None = None) -> bytes:
        return self._choice(index, text, b"null", b"null", usage)

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None
    ) -> bytes:
        return self._choice(index, text, _json(reason), _json(stop_reason), usage)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.wrap(b"", usage)

    def _choice(self, index: int, text: str, reason: bytes, stop_reason: bytes, usage: Usage | None) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            *(index, _json(text)),
            *(reason, stop_reason),
        )
        return self._frame.wrap(choice, usage)


def error_event(body: bytes) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + body + b"\n\n" + DONE
