"""Answers in the form of Anthropic's Messages API: a whole message, and the events of a streamed one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from gapless.engine.outputs import Delta
from gapless.server.errors import ApiError
from gapless.server.event_stream import StreamedAnswer
from gapless.server.generation import Job
from gapless.server.messages_errors import error_body
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent

SIGNATURE = "unsigned"
"""Stands where the API signs the thinking of its own models: clients send it back, and it is not looked at."""
PING_SECONDS = 10.0
"""Tokens without events, such as those of hidden thinking, are a ping after this time: proxies cut silent streams."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_json = msgspec.json.encode


class MessageHead(NamedTuple):
    """What is known of a message before it begins."""

    identity: str
    model: str
    max_tokens: int
    """What the request asks for, which may be more than there is room for"""


def whole_message(job: Job, head: MessageHead) -> bytes:
    """Return the message of a job that has ended, as JSON."""
    done, reader = job.choices[0], job.readers.get(0)
    events: list[ReplyEvent] = [Content("".join(done.text))] if reader is None else done.events + reader.finish()
    blocks = [_block(list(group)) for _, group in groupby(events, _place)]
    content = [block for block in blocks if block.get("text") != ""]
    return _json({**_message(head, content), **_ending(job, head), "usage": _usage(job)})


def _message(head: MessageHead, content: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"id": head.identity, "type": "message", "role": "assistant", "model": head.model}
    return {**about, "content": content, "stop_reason": None, "stop_sequence": None}


def _ending(job: Job, head: MessageHead) -> dict[str, Any]:
    """Return why the message ended."""
    done, reader = job.choices[0], job.readers.get(0)
    if done.finish_reason == "stop" and isinstance(done.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_reason}
    reason = _STOP_REASONS.get(done.finish_reason or "", "end_turn")
    if reason == "end_turn" and reader is not None and reader.called:
        reason = "tool_use"
    if reason == "max_tokens" and done.tokens < head.max_tokens:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(job: Job) -> dict[str, Any]:
    """Return the tokens so far. Those read from the prefix cache are not among `input_tokens`."""
    stream, done, reader = job.stream_of(0), job.choices[0], job.readers.get(0)
    cached = stream.num_cached_tokens
    usage: dict[str, Any] = {
        "input_tokens": len(stream.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": done.tokens,
    }
    return usage if reader is None else {**usage, "output_tokens_details": {"thinking_tokens": reader.reasoning_tokens}}


# Blocks


def _place(event: ReplyEvent) -> tuple[str, int]:
    """Return the kind of an event's block, and the number of its call: adjacent events of one place are one block."""
    if isinstance(event, Content):
        return "text", 0
    if isinstance(event, Reasoning):
        return "thinking", 0
    return "tool_use", event.index


def _block(events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """Return the block that these events make."""
    block = _empty(events[0])
    text = "".join(_piece(event) for event in events)
    if block["type"] == "tool_use":
        return {**block, "input": _input(text)}
    signature = {"signature": SIGNATURE} if block["type"] == "thinking" else {}
    return {**block, block["type"]: text, **signature}


def _empty(first: ReplyEvent) -> dict[str, Any]:
    """Return the block that begins with this event, still empty."""
    if isinstance(first, CallBegun):
        identity = first.call_id or f"toolu_{secrets.token_hex(12)}"
        return {"type": "tool_use", "id": identity, "name": first.name, "input": {}}
    kind, _ = _place(first)
    return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}


def _piece(event: ReplyEvent) -> str:
    return "" if isinstance(event, CallBegun) else event.text


def _input(text: str) -> msgspec.Raw | dict[str, str]:
    """Return a call's arguments, as the model wrote them. What is no JSON object, as where max_tokens cut it off, is
    marked in the way of the API's manual."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"INVALID_JSON": text}
    return msgspec.Raw(text.encode())


# Events


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json({"type": kind, **fields}))


def _delta_of(event: ReplyEvent) -> dict[str, str]:
    """Return the delta of an event with text."""
    text = _piece(event)
    if isinstance(event, CallArguments):
        return {"type": "input_json_delta", "partial_json": text}
    kind, _ = _place(event)
    return {"type": f"{kind}_delta", kind: text}


class BlockWriter:
    """Writes the events of a message's blocks. A block begins with its first event, and ends when another begins."""

    def __init__(self) -> None:
        self._index = -1
        self._open: tuple[str, int] | None = None

    def write(self, events: Sequence[ReplyEvent]) -> bytes:
        return b"".join(map(self._one, events))

    def _one(self, event: ReplyEvent) -> bytes:
        begun = b"" if _place(event) == self._open else self.close() + self._begin(event)
        if not _piece(event):
            return begun
        return begun + _event("content_block_delta", index=self._index, delta=_delta_of(event))

    def _begin(self, first: ReplyEvent) -> bytes:
        self._open = _place(first)
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=_empty(first))

    def close(self) -> bytes:
        """End the block that is open, if any."""
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = _event("content_block_delta", index=self._index, delta=signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._index)


class MessageStream(StreamedAnswer):
    """Streams a message as events."""

    def __init__(self, job: Job, head: MessageHead) -> None:
        super().__init__(job, plain=not job.readers)
        self._head = head
        self._blocks = BlockWriter()
        self._ping_at = 0.0

    def _opening(self) -> bytes:
        message = {**_message(self._head, []), "usage": _usage(self._job)}
        return _event("message_start", message=message)

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        reader = self._job.readers.get(choice)
        if reader is None:
            return self._token(delta)
        events = reader.feed(delta.token_ids, delta.text)
        return self._news(events + (reader.finish() if delta.finish_reason is not None else []))

    def _token(self, delta: Delta) -> bytes:
        return self._news([Content(delta.text)] if delta.text else [])

    def _news(self, events: Sequence[ReplyEvent]) -> bytes:
        """Return these events, after a ping if they are the stream's first, or nothing was sent for PING_SECONDS.

        The ping of a first token that is hidden opens the stream.
        """
        now, data = time.monotonic(), self._blocks.write(events)
        ping = _event("ping") if now >= self._ping_at else b""
        if ping or data:
            self._ping_at = now + PING_SECONDS
        return ping + data

    def _end(self) -> bytes:
        ending = _event("message_delta", delta=_ending(self._job, self._head), usage=_usage(self._job))
        return self._blocks.close() + ending + _event("message_stop")

    def _error(self, answer: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(answer, self._job.call.label)
