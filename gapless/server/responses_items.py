"""The output of a response, item by item, from the events of a reply, and the events that stream it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from gapless.server.logprobs import ChatTokenLogprob
from gapless.text.replies import call_id
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent

ItemFields = dict[str, Any]
ResponseEvent = tuple[str, ItemFields]
"""The type of an event, and its fields but for its number."""


class ItemKind(NamedTuple):
    """Names of one type of item, and of its text in items and events."""

    type: str
    prefix: str
    """The beginning of its ids."""
    stem: str
    """The types of its events, without the .delta and .done at their end."""
    field: str
    """The field with its text, in an item without content parts and in the event .done."""
    part: str = ""
    """Type of its one content part; empty for calls"""


MESSAGE = ItemKind("message", "msg", "output_text", "text", "output_text")
REASONING_ITEM = ItemKind("reasoning", "rs", "reasoning_text", "text", "reasoning_text")
FUNCTION = ItemKind("function_call", "fc", "function_call_arguments", "arguments")
CUSTOM = ItemKind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class Output:
    """All items of one response; the last is being written. Calls of `customs` are calls of tools that take text."""

    def __init__(self, customs: Collection[str] = ()) -> None:
        self._customs = customs
        self.records: list[ItemFields] = []
        """The items as they are now; the last has no content before its end."""
        self._kind = MESSAGE
        """The last item's kind. Its text and log-probabilities follow."""
        self._text: list[str] = []
        self._scores: list[ChatTokenLogprob] = []

    def take(
        self, events: Iterable[ReplyEvent], scores: Iterable[Sequence[ChatTokenLogprob]]
    ) -> Iterator[ResponseEvent]:
        """Yield the events of the stream for these of the reply, each with the log-probabilities of its text."""
        for event, scored in zip(events, scores, strict=False):
            if isinstance(event, Content):
                yield from self._say(MESSAGE, event.text, {"role": "assistant"}, scored)
            elif isinstance(event, Reasoning):
                yield from self._say(REASONING_ITEM, event.text, {"summary": []}, [])
            elif isinstance(event, CallBegun):
                kind = CUSTOM if event.name in self._customs else FUNCTION
                yield from self._open(kind, {"call_id": call_id(event), "name": event.name})
            elif isinstance(event, CallArguments):
                yield from self._add(event.text, [])

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """Yield the last events. `status` is the last item's: completed or incomplete."""
        if not self.records:
            yield from self._open(MESSAGE, {"role": "assistant"})
        yield from self._close(status)

    def _say(
        self, kind: ItemKind, text: str, fields: ItemFields, scores: Sequence[ChatTokenLogprob]
    ) -> Iterator[ResponseEvent]:
        if not self.records or self._kind is not kind:
            yield from self._open(kind, fields)
        yield from self._add(text, scores)

    def _open(self, kind: ItemKind, fields: ItemFields) -> Iterator[ResponseEvent]:
        if self.records:
            yield from self._close("completed")
        self._kind, self._text, self._scores = kind, [], []
        about = {"id": f"{kind.prefix}_{secrets.token_hex(12)}", "type": kind.type, "status": "in_progress"}
        self.records.append({**about, **fields, **({"content": []} if kind.part else {kind.field: ""})})
        yield self._item("added")
        if kind.part:
            yield "response.content_part.added", {**self._place(), "part": self._part("")}

    def _add(self, text: str, scores: Sequence[ChatTokenLogprob]) -> Iterator[ResponseEvent]:
        """Note new text; yields its event, if it is one that clients can read already."""
        self._text.append(text)
        self._scores += scores
        if self._kind is not CUSTOM:
            yield self._event("delta", scores, delta=text)

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        kind, item, said = self._kind, self.records[-1], "".join(self._text)
        if kind is CUSTOM and (said := _input_of(said)):
            yield self._event("delta", [], delta=said)
        name = {"name": item["name"]} if kind is FUNCTION else {}
        yield self._event("done", self._scores, **name, **{kind.field: said})
        ended: ItemFields = {"status": status, kind.field: said}
        if kind.part:
            part = self._part(said)
            yield "response.content_part.done", {**self._place(), "part": part}
            ended = {"status": status, "content": [part]}
        item |= ended
        yield self._item("done")

    def _item(self, end: str) -> ResponseEvent:
        return f"response.output_item.{end}", {"output_index": len(self.records) - 1, "item": {**self.records[-1]}}

    def _event(self, end: str, scores: Sequence[ChatTokenLogprob], **fields: Any) -> ResponseEvent:
        scored = {"logprobs": scores} if self._kind is MESSAGE else {}
        return f"response.{self._kind.stem}.{end}", {**self._place(), **fields, **scored}

    def _place(self) -> ItemFields:
        content = {"content_index": 0} if self._kind.part else {}
        return {"item_id": self.records[-1]["id"], "output_index": len(self.records) - 1, **content}

    def _part(self, text: str) -> ItemFields:
        more: ItemFields = {"annotations": [], "logprobs": [*self._scores]} if self._kind is MESSAGE else {}
        return {"type": self._kind.part, "text": text, **more}


def _input_of(arguments: str) -> str:
    """Return the text that a call of a custom tool brings; all that the model wrote where that has another form."""
    try:
        text = msgspec.json.decode(arguments).get("input")
    except (msgspec.DecodeError, RecursionError, AttributeError):
        return arguments
    return text if isinstance(text, str) else arguments
