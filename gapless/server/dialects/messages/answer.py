"""Answers in the form of Anthropic's Messages API: a whole message, and the events of a streamed one."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gapless.engine.outputs import Delta
from gapless.server.answer import JobAnswer
from gapless.server.dialects.messages.errors import error_body
from gapless.server.errors import ApiError
from gapless.server.generation import Job
from gapless.text.items import Change, ItemKind, ReplyItem, Step

SIGNATURE = "unsigned"
"""Stands where the API signs the thinking of its own models: clients send it back, and it is not looked at."""
PING_SECONDS = 10.0
"""Tokens without events, such as those of hidden thinking, are a ping after this time: proxies cut silent streams."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_KINDS = {ItemKind.TEXT: "text", ItemKind.REASONING: "thinking"}
"""Types of blocks, and their fields of text"""


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


def _empty(item: ReplyItem) -> dict[str, Any]:
    """Return an item's block without its text."""
    if item.call is not None:
        return {"type": "tool_use", "id": item.call_id("toolu_"), "name": item.call.name, "input": {}}
    kind = _KINDS[item.kind]
    return {"type": kind, kind: "", **({"signature": ""} if item.kind is ItemKind.REASONING else {})}


def _block(item: ReplyItem) -> dict[str, Any]:
    text = item.text
    if item.kind is ItemKind.CALL:
        return {**_empty(item), "input": _input(text)}
    signature = {"signature": SIGNATURE} if item.kind is ItemKind.REASONING else {}
    return {**_empty(item), _KINDS[item.kind]: text, **signature}


def _input(text: str) -> msgspec.Raw | dict[str, str]:
    """Return a call's arguments, as the model wrote them. What is no JSON object, as where max_tokens cut it off, is
    marked in the way of the API's manual."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"INVALID_JSON": text}
    return msgspec.Raw(text.encode())


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


class MessageAnswer(JobAnswer):
    """A message. `max_tokens` is what the request asks for, which may be more than there is room for."""

    prefix = "msg_"

    def __init__(self, job: Job, max_tokens: int) -> None:
        super().__init__(job, plain=not job.readers)
        self._max_tokens = max_tokens
        self._ping_at = 0.0

    def sign_of_life(self) -> bytes:
        return _event("ping") if self.opened else super().sign_of_life()  # SDKs want message_start first

    def opening(self) -> bytes:
        return _event("message_start", message={**_message(self.job, []), "usage": _usage(self.job)})

    def news(self, choice: int, delta: Delta) -> bytes:
        # After a ping if these are the stream's first events, or nothing was sent for PING_SECONDS.
        now, data = time.monotonic(), super().news(choice, delta)
        ping = _event("ping") if now >= self._ping_at else b""
        if ping or data:
            self._ping_at = now + PING_SECONDS
        return ping + data

    def changed(self, change: Change) -> bytes:
        step, item, text, _ = change
        if step is Step.OPENED:
            return _event("content_block_start", index=item.index, content_block=_empty(item))
        if step is Step.GROWN:
            return _event("content_block_delta", index=item.index, delta=_delta(item, text))
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signs = item.kind is ItemKind.REASONING
        signed = _event("content_block_delta", index=item.index, delta=signature) if signs else b""
        return signed + _event("content_block_stop", index=item.index)

    def ending(self) -> bytes:
        ending = _event("message_delta", delta=_ending(self.job, self._max_tokens), usage=_usage(self.job))
        return ending + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error, self.job.call.label)

    def whole(self) -> dict[str, Any]:
        content = [_block(item) for item in self.job.choices[0].items]
        return {**_message(self.job, content), **_ending(self.job, self._max_tokens), "usage": _usage(self.job)}


def _delta(item: ReplyItem, text: str) -> dict[str, str]:
    if item.kind is ItemKind.CALL:
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": f"{_KINDS[item.kind]}_delta", _KINDS[item.kind]: text}
