"""Items: a reply's text, reasoning and calls of tools, each opened, grown and closed.

Every form of an answer is made of them, streamed or whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent


class CalledFunction(msgspec.Struct, frozen=True):
    """The function that a tool call names, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call, in OpenAI's form."""

    id: str
    function: CalledFunction
    type: str = "function"


class ItemKind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True, eq=False)
class ReplyItem:
    """A part of a reply, the `index`-th; it grows until the next one begins."""

    kind: ItemKind
    index: int
    call: CallBegun | None = None
    """The beginning of a call, whose text is its arguments"""
    pieces: list[str] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    """Log-probabilities of the text, if they are asked for"""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def call_id(self, prefix: str = "call_") -> str:
        """Return the id that the model gave the call, or a new one."""
        assert self.call is not None
        return self.call.call_id or f"{prefix}{secrets.token_hex(12)}"


class Step(Enum):
    OPENED = "opened"
    GROWN = "grown"
    CLOSED = "closed"


class Change(NamedTuple):
    """A step in the life of an item; one that has grown has more text."""

    step: Step
    item: ReplyItem
    text: str = ""
    scores: Sequence[Any] = ()


_KINDS = {Content: ItemKind.TEXT, Reasoning: ItemKind.REASONING}


class Items(list[ReplyItem]):
    """The items of one reply so far."""

    def take(self, events: Iterable[ReplyEvent], scores: Sequence[Sequence[Any]] = ()) -> list[Change]:
        """Add a reply's events, with the log-probabilities of each one's text if there are any; return the changes."""
        changes: list[Change] = []
        for place, event in enumerate(events):
            if isinstance(event, CallBegun):
                self._open(ItemKind.CALL, event, changes)
                continue
            if not isinstance(event, CallArguments):
                kind = _KINDS[type(event)]
                if not self or self[-1].kind is not kind:
                    self._open(kind, None, changes)
            item, scored = self[-1], scores[place] if scores else ()
            item.pieces.append(event.text)
            item.scores += scored
            changes.append(Change(Step.GROWN, item, event.text, scored))
        return changes

    def close(self, at_least: ItemKind | None = None) -> list[Change]:
        """End the last item; without any, an empty one `at_least` of this kind."""
        changes: list[Change] = []
        if not self and at_least is not None:
            self._open(at_least, None, changes)
        return changes + [Change(Step.CLOSED, item) for item in self[-1:]]

    def _open(self, kind: ItemKind, call: CallBegun | None, changes: list[Change]) -> None:
        changes += self.close()
        self.append(ReplyItem(kind, len(self), call))
        changes.append(Change(Step.OPENED, self[-1]))

    def texts(self, kind: ItemKind) -> str:
        """Return the text of all items of this kind."""
        return "".join([piece for item in self if item.kind is kind for piece in item.pieces])

    @property
    def content(self) -> str | None:
        """The answer as one text; None beside reasoning or calls alone."""
        return self.texts(ItemKind.TEXT) or (None if self else "")

    @property
    def calls(self) -> list[ToolCall]:
        begun = [(item, item.call) for item in self if item.call is not None]
        return [ToolCall(item.call_id(), CalledFunction(call.name, item.text)) for item, call in begun]
