"""The output of a response, item by item, from the events of a reply, and the events that stream it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from gapless.server.logprobs import ChatTokenLogprob
from gapless.text.replies import call_id
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent

Fields = dict[str, Any]
Event = tuple[str, Fields]
"""The type of an event, and its fields but for its number."""


class ItemKind(NamedTuple):
    """What one type of item is called, and what its text is called in items and events."""

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
REASONING = ItemKind("reasoning", "rs", "reasoning_text", "text", "reasoning_text")
FUNCTION = ItemKind("function_call", "fc", "function_call_arguments", "arguments")
CUSTOM = ItemKind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class OutputItem:
    """One item of the output, from its first event to its last. `fields` are those that only its kind has."""

    def __init__(self, kind: ItemKind, index: int, fields: Fields) -> None:
        self.kind = kind
        self.status = "in_progress"
        self._id = f"{kind.prefix}_{secrets.token_hex(12)}"
        self._index = index
        self._fields = fields
        self._text: list[str] = []
        self._scores: list[ChatTokenLogprob] = []

    def record(self) -> Fields:
        """Return the item as it is now; it has no content before its end."""
        begun: Fields = {"id": self._id, "type": self.kind.type, "status": self.status, **self._fields}
        ended = self.status != "in_progress"
        if self.kind.part:
            return {**begun, "content": [self._part(self._said(), self._scores)] if ended else []}
        return {**begun, self.kind.field: self._said() if ended else ""}

    def opening(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.record()}
        if self.kind.part:
            yield "response.content_part.added", {**self._place(), "part": self._part("", [])}

    def add(self, text: str, scores: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        """Note new text; yields its event, if it is one that clients can read already."""
        self._text.append(text)
        self._scores += scores
        if self.kind is not CUSTOM:
            yield self._event("delta", scores, delta=text)

    def closing(self, status: str) -> Iterator[Event]:
        self.status, said = status, self._said()
        if self.kind is CUSTOM and said:
            yield self._event("delta", [], delta=said)
        name = {"name": self._fields["name"]} if self.kind is FUNCTION else {}
        yield self._event("done", self._scores, **name, **{self.kind.field: said})
        if self.kind.part:
            yield "response.content_part.done", {**self._place(), "part": self._part(said, self._scores)}
        yield "response.output_item.done", {"output_index": self._index, "item": self.record()}

    def _said(self) -> str:
        text = "".join(self._text)
        return _input_of(text) if self.kind is CUSTOM else text

    def _event(self, end: str, scores: Sequence[ChatTokenLogprob], **fields: Any) -> Event:
        scored = {"logprobs": scores} if self.kind is MESSAGE else {}
        return f"response.{self.kind.stem}.{end}", {**self._place(), **fields, **scored}

    def _place(self) -> Fields:
        content = {"content_index": 0} if self.kind.part else {}
        return {"item_id": self._id, "output_index": self._index, **content}

    def _part(self, text: str, scores: Sequence[ChatTokenLogprob]) -> Fields:
        more: Fields = {"annotations": [], "logprobs": scores} if self.kind is MESSAGE else {}
        return {"type": self.kind.part, "text": text, **more}


class Output:
    """All items of one response. Calls of `customs` are calls of tools that take text."""

    def __init__(self, customs: Collection[str] = ()) -> None:
        self._customs = customs
        self._items: list[OutputItem] = []

    def records(self) -> list[Fields]:
        return [item.record() for item in self._items]

    def take(self, events: Iterable[ReplyEvent], scores: Iterable[Sequence[ChatTokenLogprob]]) -> Iterator[Event]:
        """Yield the events of the stream for these of the reply, each with the log-probabilities of its text."""
        for event, scored in zip(events, scores, strict=False):
            if isinstance(event, Content):
                yield from self._say(MESSAGE, event.text, {"role": "assistant"}, scored)
            elif isinstance(event, Reasoning):
                yield from self._say(REASONING, event.text, {"summary": []}, [])
            elif isinstance(event, CallBegun):
                kind = CUSTOM if event.name in self._customs else FUNCTION
                yield from self._open(kind, {"call_id": call_id(event), "name": event.name})
            elif isinstance(event, CallArguments):
                yield from self._items[-1].add(event.text, [])

    def finish(self, status: str) -> Iterator[Event]:
        """Yield the last events. `status` is the last item's: completed or incomplete."""
        if not self._items:
            yield from self._open(MESSAGE, {"role": "assistant"})
        yield from self._items[-1].closing(status)

    def _say(self, kind: ItemKind, text: str, fields: Fields, scores: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        if not self._items or self._items[-1].kind is not kind:
            yield from self._open(kind, fields)
        yield from self._items[-1].add(text, scores)

    def _open(self, kind: ItemKind, fields: Fields) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].closing("completed")
        self._items.append(OutputItem(kind, len(self._items), fields))
        yield from self._items[-1].opening()


def _input_of(arguments: str) -> str:
    """Return the text that a call of a custom tool brings; all that the model wrote where that has another form."""
    try:
        text = msgspec.json.decode(arguments).get("input")
    except (msgspec.DecodeError, RecursionError, AttributeError):
        return arguments
    return text if isinstance(text, str) else arguments
