"""Server-sent events of both endpoints. The chunk of one token is put together from bytes made once a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from gapless.server.protocol import Usage
from gapless.text.tokens import Memo

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"

_json = msgspec.json.encode


class Extra(NamedTuple):
    """Parts of a chunk beside its text, as JSON."""

    logprobs: bytes = b"null"
    ids: bytes = b""
    """Further fields of the choice, each after a comma."""
    top: bytes = b""
    """Further fields of the chunk itself."""


PLAIN = Extra()


class Chunks(Protocol):
    """Makes the events of one stream. `usage` goes into the chunk when it is not None."""

    plain: Callable[[int, str], bytes]
    """`text` without usage and extra, put together from bytes made once."""

    def opening(self, index: int, extra: Extra = PLAIN) -> bytes: ...

    def text(self, index: int, text: str, usage: Usage | None = None, extra: Extra = PLAIN) -> bytes: ...

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None,
        extra: Extra = PLAIN,
    ) -> bytes: ...  # fmt: skip

    def usage(self, usage: Usage) -> bytes: ...


class _Frame:
    """Common parts of all chunks of a stream."""

    def __init__(self, id: str, object: str, created: int, model: str, null_usage: bool) -> None:
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            *(_json(id), _json(object), created),
            _json(model),
        )
        # A client that asked for usage finds the field in every chunk, null until the last.
        self._tail = b',"usage":null}\n\n' if null_usage else b"}\n\n"

    def wrap(self, choice: bytes, usage: Usage | None, top: bytes = b"") -> bytes:
        tail = self._tail if usage is None else b',"usage":%b}\n\n' % _json(usage)
        return self._head + choice + b"]" + top + tail

    def plain(self, begin: bytes, end: bytes) -> Callable[[int, str], bytes]:
        """A function (index, text) for the chunk of a choice with nothing but text, between `begin` and `end`."""
        heads, tail = Memo(lambda index: self._head + begin % index), end + b"]" + self._tail
        return lambda index, text: heads[index] + _json(text) + tail


class ChatChunks:
    """chat.completion.chunk events."""

    def __init__(self, id: str, created: int, model: str, null_usage: bool) -> None:
        self._frame = _Frame(id, "chat.completion.chunk", created, model, null_usage)
        self.plain = self._frame.plain(b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')

    def opening(self, index: int, extra: Extra = PLAIN) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._frame.wrap(delta % index, None, extra.top)

    def text(self, index: int, text: str, usage: Usage | None = None, extra: Extra = PLAIN) -> bytes:
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            *(index, _json(text)),
            *(extra.logprobs, extra.ids),
        )
        return self._frame.wrap(choice, usage)

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None,
        extra: Extra = PLAIN,
    ) -> bytes:  # fmt: skip
        delta = b'{"content":%b}' % _json(text) if text else b"{}"
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            *(index, delta, extra.logprobs),
            *(_json(reason), _json(stop_reason), extra.ids),
        )
        return self._frame.wrap(choice, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.wrap(b"", usage)


class CompletionChunks:
    """text_completion events."""

    def __init__(self, id: str, created: int, model: str, null_usage: bool) -> None:
        self._frame = _Frame(id, "text_completion", created, model, null_usage)
        self.plain = self._frame.plain(
            b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
        )

    def opening(self, index: int, extra: Extra = PLAIN) -> bytes:
        return b""

    def text(self, index: int, text: str, usage: Usage | None = None, extra: Extra = PLAIN) -> bytes:
        return self._choice(index, text, b"null", b"null", usage, extra)

    def last(
        self, index: int, text: str, reason: str, stop_reason: int | str | None, usage: Usage | None = None,
        extra: Extra = PLAIN,
    ) -> bytes:  # fmt: skip
        return self._choice(index, text, _json(reason), _json(stop_reason), usage, extra)

    def usage(self, usage: Usage) -> bytes:
        return self._frame.wrap(b"", usage)

    def _choice(
        self, index: int, text: str, reason: bytes, stop_reason: bytes, usage: Usage | None, extra: Extra
    ) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            *(index, _json(text), extra.logprobs),
            *(reason, stop_reason, extra.ids),
        )
        return self._frame.wrap(choice, usage)


def error_event(body: bytes) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + body + b"\n\n" + DONE
