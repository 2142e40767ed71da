"""Messages for the chat template from the instructions and input items of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from gapless.base.errors import RequestError

_READ = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_JOINTS = {"content": "\n\n", "reasoning_content": ""}
"""Fields of messages that are gathered in pieces, and what joins them: adding to a text copies all that it has."""


class InputPart(msgspec.Struct):
    """A part of an item's content; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Fields that any item may have, which change nothing here."""

    id: str | None = None
    status: str | None = None


class InputMessage(InputItem):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class InputReasoning(InputItem):
    summary: list[InputPart] | None = None
    content: list[InputPart] | None = None


class InputCall(InputItem):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class InputCustomCall(InputItem):
    call_id: str
    name: str
    input: str | None = None


class InputCallOutput(InputItem):
    call_id: str
    output: str | list[InputPart] | None = None


_KINDS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "custom_tool_call": InputCustomCall,
    "function_call_output": InputCallOutput,
    "custom_tool_call_output": InputCallOutput,
}


def messages_of(instructions: str | None, given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation as chat messages. Raises RequestError, or msgspec's, naming the item and field."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": [instructions]}] if instructions else []
    for part in _parts([{"role": "user", "content": given}] if isinstance(given, str) else given):
        last: dict[str, Any] = messages[-1] if messages else {"role": ""}
        if last["role"] != part["role"]:
            joins = False
        elif part["role"] == "assistant":  # reasoning, text and calls of one turn are one message
            joins = "tool_calls" in part or "tool_calls" in last or "content" not in last
        else:
            joins = part["role"] == "system" and len(messages) == 1  # many templates take one, the first
        if not joins:
            messages.append(part)
            continue
        for name in part.keys() - {"role"}:
            last.setdefault(name, []).extend(part[name])
    if not messages:
        raise RequestError("input is empty: it must be a text or have at least one item", "input")
    return [_joined(message) for message in messages]


def _parts(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each item as a message, or as a part of one of the assistant's."""
    calls = set()
    for i, fields in enumerate(items):
        where = f"input[{i}]"
        item = _checked(fields, where)
        if isinstance(item, InputMessage):
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": [text_of(item.content, f"{where}.content")]}
        elif isinstance(item, InputReasoning):
            field = "content" if item.content else "summary"
            if text := text_of(getattr(item, field) or "", f"{where}.{field}"):
                yield {"role": "assistant", "reasoning_content": [text]}
        elif isinstance(item, InputCallOutput):
            text = text_of(item.output or "", f"{where}.output")
            if item.call_id not in calls:
                why = "no call with this id comes before; nothing is stored here, so send the whole conversation"
                raise RequestError(f"{where}.call_id: {why}", f"{where}.call_id")
            yield {"role": "tool", "tool_call_id": item.call_id, "content": [text]}
        elif isinstance(item, InputCall | InputCustomCall):
            arguments = item.arguments if isinstance(item, InputCall) else {"input": item.input or ""}
            calls.add(item.call_id)
            function = {"name": item.name, "arguments": arguments}
            yield {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}


def _checked(item: dict[str, Any], where: str) -> InputItem:
    named = "message" if item.get("type") is None else item["type"]
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        text = f"{where}.type must be one of {', '.join(_KINDS)}: nothing else can be read here, and nothing is stored"
        raise RequestError(text, f"{where}.type")
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:  # names the field within the item
        what, at, path = str(error).rpartition(" - at `$")
        raise msgspec.ValidationError(f"{what} - at `$.{where}{path}" if at else f"{path} - at `$.{where}`") from None


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    whole = {name: _JOINTS[name].join(value) if name in _JOINTS else value for name, value in message.items()}
    return whole if "tool_calls" in whole else {"content": "", **whole}


def text_of(content: str | list[InputPart], where: str) -> str:
    """Return the text of a content. Raises RequestError for parts that are none, naming the field below `where`."""
    if isinstance(content, str):
        return content
    for j, part in enumerate(content):
        if part.type not in (*_READ, "refusal"):
            field = f"{where}[{j}].type"
            raise RequestError(f"{field} must be input_text or output_text: this model reads text only", field)
    return "".join((part.refusal if part.type == "refusal" else part.text) or "" for part in content)
