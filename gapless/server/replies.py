"""Messages and deltas in OpenAI's form from the events of a reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gapless.server.protocol import AnswerMessage
from gapless.text.replies import call_id, joined
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning, ReplyEvent

_json = msgspec.json.encode


def message_of(events: Sequence[ReplyEvent]) -> AnswerMessage:
    """Return the message of a whole answer."""
    said = joined(events)
    thought: Any = said.reasoning or msgspec.UNSET
    return AnswerMessage(
        said.content or (None if said.reasoning or said.tool_calls else ""),
        reasoning=thought,
        reasoning_content=thought,
        tool_calls=said.tool_calls or msgspec.UNSET,
    )


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
