"""Answers in the form of Anthropic's Messages API: a whole message, and the events of a streamed one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from gapless.engine.outputs import Delta
from gapless.server.errors import ApiError, error_body
from gapless.server.event_stream import StreamedAnswer
from gapless.server.generation import Job
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent

SIGNATURE = "unsigned"
"""Stands where the API signs the thinking of its own models: clients send it back, and it is not looked at."""
PING_SECONDS = 10.0
"""Tokens without events, such as those of hidden thinking, are a ping after this time: proxies cut silent streams."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_json = msgspec.json.encode


def whole_message(job: Job, max_tokens: int) -> bytes:
    """Return the message of a job that has ended, as JSON.

    `max_tokens` is what the request asks for, which may be more than there is room for.
    """
    blocks = [_block(list(group)) for _, group in groupby(job.choices[0].events, _place)]
    content = [block for block in blocks if block.get("text") != ""]
    return _json({**_message(job, content), **_ending(job, max_tokens), "usage": _usage(job)})


def _message(job: Job, content: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"id": job.call.identity, "type": "message", "role": "assistant", "model": job.call.model}
    return {**about, "content": content, "stop_reason": None, "stop_sequence": None}


def _ending(job: Job, max_tokens: int) -> dict[str, Any]:
    done, reader = job.choices[0], job.readers.get(0)
    if done.finish_reason == "stop" and isinstance(done.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_reason}
    reason = _STOP_REASONS.get(done.finish_reason or "", "end_turn")
    if done.finish_reason == "stop" and reader is not None and reader.called and not reader.cut:
        reason = "tool_use"
    if reason == "max_tokens" and done.tokens < max_tokens:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(job: Job) -> dict[str, Any]:
    """Return the tokens so far. `input_tokens` excludes tokens read from the prefix cache."""
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
    text = _piece(event)
    if isinstance(event, CallArguments):
        return {"type": "input_json_delta", "partial_json": text}
    kind, _ = _place(event)
    return {"type": f"{kind}_delta", kind: text}


class MessageStream(StreamedAnswer):
    """Streams a message as events. `max_tokens` is what the request asks for."""

    def __init__(self, job: Job, max_tokens: int) -> None:
        super().__init__(job, plain=not job.readers)
        self._max_tokens = max_tokens
        self._block = -1
        self._open: tuple[str, int] | None = None
        """The place of the block that is open: it begins with its first event, and ends when another begins."""
        self._ping_at = 0.0

    def _sign_of_life(self) -> bytes:
        return _event("ping") if self._opened else super()._sign_of_life()  # SDKs want message_start first

    def _opening(self) -> bytes:
        message = {**_message(self._job, []), "usage": _usage(self._job)}
        return _event("message_start", message=message)

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        # After a ping if these are the stream's first events, or nothing was sent for PING_SECONDS.
        now, data = time.monotonic(), b"".join(map(self._written, self._job.events_of(choice, delta)))
        ping = _event("ping") if now >= self._ping_at else b""
        if ping or data:
            self._ping_at = now + PING_SECONDS
        return ping + data

    def _written(self, event: ReplyEvent) -> bytes:
        begun = b"" if _place(event) == self._open else self._closed() + self._begun(event)
        if not _piece(event):
            return begun
        return begun + _event("content_block_delta", index=self._block, delta=_delta_of(event))

    def _begun(self, first: ReplyEvent) -> bytes:
        self._open = _place(first)
        self._block += 1
        return _event("content_block_start", index=self._block, content_block=_empty(first))

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed = _event("content_block_delta", index=self._block, delta=signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._block)

    def _end(self) -> bytes:
        ending = _event("message_delta", delta=_ending(self._job, self._max_tokens), usage=_usage(self._job))
        return self._closed() + ending + _event("message_stop")

    def _error(self, answer: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(answer, self._job.call.label)
