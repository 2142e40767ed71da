"""Server-sent events of both endpoints. The chunk of one token is put together from bytes made once a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gapless.text.replies import call_id
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent
from gapless.text.tokens import Memo

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}

Usage = Mapping[str, Any]
"""Counts of tokens, as they are in answers"""

PLAIN = b'"logprobs":null'
"""Fields of a choice beside its text and its end, if none of them is asked for"""

_json = msgspec.json.encode


class Chunks:
    """Makes the events of one stream. `usage` goes into a chunk when it is not None."""

    object: str
    """The object of an event; that of an answer that is not streamed is no .chunk."""
    prefix: str
    """The beginning of the ids of answers."""
    first = b""
    """The field of a choice in the event before its text, if there is one."""
    news: bytes
    """The field of a choice with new text."""
    no_news: bytes
    """The field of a choice that ends without new text."""
    going_on: bytes
    """The finish reason of a choice that has not ended, and the fields after it."""

    def __init__(self, id: str, created: int, model: str, null_usage: bool) -> None:
        form = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":['
        self.more = b""
        """Further fields of an event, with a comma before each"""
        self._head = head = form % (_json(id), self.object.encode(), created, _json(model))
        # A client that asked for usage finds the field in every chunk, null until the last.
        self._tail = b',"usage":null}\n\n' if null_usage else b"}\n\n"
        begin, end = self.news.split(b"%b")
        heads = Memo(lambda index: head + b'{"index":%d,' % index + begin)
        tail = end + b',"logprobs":null,"finish_reason":' + self.going_on + b"}]" + self._tail
        self.plain: Callable[[int, str], bytes] = lambda index, text: heads[index] + _json(text) + tail
        """`text` without usage and extra, put together from bytes made once."""

    def opening(self, index: int, more: bytes) -> bytes:
        """Return the event of a choice that comes before its text, with `more` fields of the chunk itself."""
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":null}' % (index, self.first)
        return self._event(choice, None, more)

    def text(self, index: int, text: str, usage: Usage | None = None, extra: bytes = PLAIN) -> bytes:
        return self._chunk(index, self.news % _json(text), self.going_on, usage, extra)

    def last(
        self,
        index: int,
        text: str,
        reason: str,
        stop_reason: int | str | None,
        usage: Usage | None,
        extra: bytes = PLAIN,
    ) -> bytes:
        news = self.news % _json(text) if text else self.no_news
        return self._chunk(index, news, b'%b,"stop_reason":%b' % (_json(reason), _json(stop_reason)), usage, extra)

    def delta(self, index: int, delta: bytes, usage: Usage | None = None, extra: bytes = PLAIN) -> bytes:
        """Return the event of a choice whose news are this JSON object."""
        return self._chunk(index, b'"delta":' + delta, self.going_on, usage, extra)

    def usage(self, usage: Usage) -> bytes:
        return self._event(b"", usage)

    def _chunk(self, index: int, news: bytes, end: bytes, usage: Usage | None, extra: bytes) -> bytes:
        choice = b'{"index":%d,%b,%b,"finish_reason":%b}' % (index, news, extra, end)
        return self._event(choice, usage)

    def _event(self, choice: bytes, usage: Usage | None, more: bytes = b"") -> bytes:
        tail = self._tail if usage is None else b',"usage":%b}\n\n' % _json(usage)
        return self._head + choice + b"]" + more + self.more + tail


class ChatChunks(Chunks):
    """chat.completion.chunk events."""

    object, prefix = "chat.completion.chunk", "chatcmpl"
    first = b'"delta":{"role":"assistant","content":""}'
    news, no_news = b'"delta":{"content":%b}', b'"delta":{}'
    going_on = b"null"


class CompletionChunks(Chunks):
    """text_completion events."""

    object, prefix = "text_completion", "cmpl"
    news, no_news = b'"text":%b', b'"text":""'
    going_on = b'null,"stop_reason":null'


def deltas_of(events: Sequence[ReplyEvent]) -> Iterator[bytes]:
    """Yield the deltas of a stream, as JSON objects."""
    for event in events:
        if isinstance(event, Content):
            yield _json({"content": event.text})
        elif isinstance(event, Reasoning):
            yield _json({"reasoning": event.text, "reasoning_content": event.text})
        elif isinstance(event, CallBegun):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": call_id(event), "type": "function", "function": function}
            yield _json({"tool_calls": [call]})
        elif isinstance(event, CallArguments):
            yield _json({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
