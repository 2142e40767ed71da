"""A response: its output item by item, and the events that stream it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from gapless.engine.outputs import Delta
from gapless.server.answer import JobAnswer
from gapless.server.dialects.responses.request import ResponsesRequest, own_names
from gapless.server.dialects.responses.scores import ReplyScores
from gapless.server.errors import ApiError
from gapless.server.generation import Job
from gapless.text.items import Change, ItemKind, ReplyItem, Step
from gapless.text.reply_parser import ReplyEvent

ItemFields = dict[str, Any]
ResponseEvent = tuple[str, ItemFields]
"""The type of an event, without the response. before it, and its fields but for its number."""


class ItemNames(NamedTuple):
    """Names of one type of item: its type, the beginning of its ids and of the types of its events, the field with its
    text, and the type of its one content part, empty for calls.
    """

    type: str
    prefix: str
    stem: str
    field: str
    part: str = ""


MESSAGE = ItemNames("message", "msg", "output_text", "text", "output_text")
REASONING_ITEM = ItemNames("reasoning", "rs", "reasoning_text", "text", "reasoning_text")
FUNCTION = ItemNames("function_call", "fc", "function_call_arguments", "arguments")
CUSTOM = ItemNames("custom_tool_call", "ctc", "custom_tool_call_input", "input")
_NAMES = {ItemKind.TEXT: MESSAGE, ItemKind.REASONING: REASONING_ITEM}
_FIRST: Mapping[ItemKind, ItemFields] = {ItemKind.TEXT: {"role": "assistant"}, ItemKind.REASONING: {"summary": []}}
"""The fields that an item of this kind has before its content"""


class ResponseAnswer(JobAnswer):
    """A response object, or the events of one."""

    def __init__(self, job: Job, request: ResponsesRequest) -> None:
        super().__init__(job)
        job.call.identity = f"resp_{secrets.token_hex(16)}"
        self._frame = _frame(job, request)
        self._customs = request.custom_names()
        """Names of the tools that take text"""
        self.records: list[ItemFields] = []
        """The items of a stream so far; the last has no content before its end"""
        self._reader = job.readers.get(0)
        self._scores: ReplyScores | None = None
        """Log-probabilities of the text, if they are asked for; made with the first tokens"""
        self._sent = 0
        """Events that have been sent"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with own_names():
            await super().__call__(scope, receive, send)

    def opening(self) -> bytes:
        return self._events((name, {"response": self._frame}) for name in ("created", "in_progress"))

    def ending(self) -> bytes:
        ended = self._ended(self.records)
        return self._events([(ended["status"], {"response": ended})])

    def failure(self, error: ApiError) -> bytes:
        closed = b"".join(map(self.changed, self.job.choices[0].items.close(ItemKind.TEXT)))
        failed = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return closed + self._events([("failed", {"response": {**self._frame, **failed, "output": self.records}})])

    def whole(self) -> ItemFields:
        records = [self._closed(self._opened(item), item) for item in self.job.choices[0].items]
        return self._ended(records)

    # Items

    def changes(self, choice: int, delta: Delta) -> list[Change]:
        found: list[Change] = []
        for tokens, text in self._pieces(delta):
            found += self._taken(self.job.events_of(choice, Delta(choice, text, tokens)))
        if delta.finish_reason is not None:
            found += self._taken(self._reader.finish() if self._reader else [], ended=True)
            found += self.job.choices[0].items.close(ItemKind.TEXT)
        return found

    def _taken(self, events: Sequence[ReplyEvent], ended: bool = False) -> list[Change]:
        return self.job.choices[0].items.take(events, self._scores.of(events, ended) if self._scores else ())

    def _pieces(self, delta: Delta) -> Iterable[tuple[list[int], str]]:
        job = self.job
        if job.params.logprobs is None:
            return [(delta.token_ids, delta.text)]
        if self._scores is None:
            self._scores = ReplyScores(job.state.llm.tokenizer, job.params, job.stream_of(0), self._reader)
        return self._scores.split(delta)

    def changed(self, change: Change) -> bytes:
        step, item, text, scores = change
        names = self._names(item)
        if step is Step.OPENED:
            self.records.append(self._opened(item))
            begun = [("content_part.added", {**self._place(item), "part": _part(names, "", ())})] if names.part else []
            return self._events([self._item("added", item), *begun])
        if step is Step.GROWN:  # a custom tool's text is no text before its call has ended
            return b"" if names is CUSTOM else self._events([self._text("delta", item, scores, delta=text)])
        record, said = self._closed(self.records[item.index], item), self._said(item)
        late = [self._text("delta", item, (), delta=said)] if names is CUSTOM and said else []
        name = {"name": record["name"]} if names is FUNCTION else {}
        done = self._text("done", item, item.scores, **name, **{names.field: said})
        part = [("content_part.done", {**self._place(item), "part": record["content"][0]})] if names.part else []
        return self._events([*late, done, *part, self._item("done", item)])

    def _names(self, item: ReplyItem) -> ItemNames:
        if item.call is None:
            return _NAMES[item.kind]
        return CUSTOM if item.call.name in self._customs else FUNCTION

    def _said(self, item: ReplyItem) -> str:
        return _input_of(item.text) if self._names(item) is CUSTOM else item.text

    def _opened(self, item: ReplyItem) -> ItemFields:
        """Return an item without its content."""
        names = self._names(item)
        about = {"id": f"{names.prefix}_{secrets.token_hex(12)}", "type": names.type, "status": "in_progress"}
        if item.call is not None:
            return {**about, "call_id": item.call_id(), "name": item.call.name, names.field: ""}
        return {**about, **_FIRST[item.kind], "content": []}

    def _closed(self, record: ItemFields, item: ReplyItem) -> ItemFields:
        """Give an item its content and its end."""
        names, said = self._names(item), self._said(item)
        last = item is self.job.choices[0].items[-1]
        record["status"] = "incomplete" if last and self._cut() else "completed"
        record |= {"content": [_part(names, said, item.scores)]} if names.part else {names.field: said}
        return record

    def _cut(self) -> bool:
        """Return whether the reply did not end by itself."""
        failed = self.job.choices[0].finish_reason in (None, "error", "length")
        return failed or (self._reader is not None and self._reader.cut)

    def _item(self, end: str, item: ReplyItem) -> ResponseEvent:
        return f"output_item.{end}", {"output_index": item.index, "item": {**self.records[item.index]}}

    def _text(self, end: str, item: ReplyItem, scores: Sequence[Any], **fields: Any) -> ResponseEvent:
        scored = {"logprobs": scores} if item.kind is ItemKind.TEXT else {}
        return f"{self._names(item).stem}.{end}", {**self._place(item), **fields, **scored}

    def _place(self, item: ReplyItem) -> ItemFields:
        content = {"content_index": 0} if self._names(item).part else {}
        return {"item_id": self.records[item.index]["id"], "output_index": item.index, **content}

    # The response

    def _ended(self, records: list[ItemFields]) -> ItemFields:
        whole = self.job.choices[0].finish_reason != "length"
        ended: ItemFields = {"status": "completed", "completed_at": int(time.time())}
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        times = {"timings": self.job.timings()} if self.job.shows_times else {}
        said = {"output": records, "usage": self._usage(), **times}
        return {**self._frame, **(ended if whole else cut), **said}

    def _usage(self) -> Mapping[str, Any]:
        used = self.job.usage()
        cached = self.job.stream_of(0).num_cached_tokens
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": used["total_tokens"],
        }

    def _events(self, events: Iterable[ResponseEvent]) -> bytes:
        data = b""
        for name, fields in events:
            kind = f"response.{name}"
            body = msgspec.json.encode({"type": kind, "sequence_number": self._sent, **fields})
            data += b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
            self._sent += 1
        return data


def _frame(job: Job, request: ResponsesRequest) -> ItemFields:
    """Return the response object as it is at first."""
    params = job.params
    effort = request.reasoning.effort if request.reasoning else None
    return {
        "id": job.call.identity,
        "object": "response",
        "status": "in_progress",
        "created_at": int(time.time()),
        "model": job.call.model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": list(request.callable_tools().values()),
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _part(names: ItemNames, text: str, scores: Sequence[Any]) -> ItemFields:
    more: ItemFields = {"annotations": [], "logprobs": list(scores)} if names is MESSAGE else {}
    return {"type": names.part, "text": text, **more}


def _input_of(arguments: str) -> str:
    """Return the text that a call of a custom tool brings; all that the model wrote where that has another form."""
    try:
        text = msgspec.json.decode(arguments).get("input")
    except (msgspec.DecodeError, RecursionError, AttributeError):
        return arguments
    return text if isinstance(text, str) else arguments
