"""Messages for the chat template from the instructions and input items of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gapless.base.errors import RequestError

_READ = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_JOINTS = {"content": "\n\n", "reasoning_content": ""}
"""Fields of messages that are gathered in pieces, and what joins them: adding to a text copies all that it has."""


class InputPart(msgspec.Struct):
    """A part of an item's content; only text is read."""

    type: str
    text: str = ""
    refusal: str = ""


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
    arguments: str


class InputCustomCall(InputItem):
    call_id: str
    name: str
    input: str


class InputCallOutput(InputItem):
    call_id: str
    output: str | list[InputPart]


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
    conversation = _Conversation()
    if instructions:
        conversation.say("system", instructions)
    for i, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        conversation.add(_checked(item, f"input[{i}]"), f"input[{i}]")
    return conversation.ended()


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


class _Conversation:
    """Messages so far. What the assistant reasoned, said and called in one turn is one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()

    def add(self, item: InputItem, where: str) -> None:
        if isinstance(item, InputMessage):
            self.say(item.role, text_of(item.content, f"{where}.content"))
        elif isinstance(item, InputReasoning):
            field = "content" if item.content else "summary"
            self._reason(text_of(getattr(item, field) or "", f"{where}.{field}"))
        elif isinstance(item, InputCall):
            self._call(item.call_id, item.name, _arguments(item.arguments, f"{where}.arguments"))
        elif isinstance(item, InputCustomCall):
            self._call(item.call_id, item.name, {"input": item.input})
        elif isinstance(item, InputCallOutput):
            self._result(item.call_id, text_of(item.output, f"{where}.output"), f"{where}.call_id")

    def say(self, role: str, text: str) -> None:
        if role == "assistant":
            self._turn("content", "tool_calls")["content"] = [text]
            return
        role = "system" if role == "developer" else role
        if role == "system" and len(self._messages) == 1 and self._messages[0]["role"] == role:
            self._messages[0]["content"].append(text)  # many templates take one system message, the first
        else:
            self._messages.append({"role": role, "content": [text]})

    def ended(self) -> list[dict[str, Any]]:
        """Return the messages; those of the assistant have at least an empty content."""
        if not self._messages:
            raise RequestError("input is empty: it must be a text or have at least one item", "input")
        return [_joined(message) for message in self._messages]

    def _turn(self, *busy: str) -> dict[str, Any]:
        """Return the assistant's message, a new one if the last is another's or has one of these fields."""
        if not self._messages or self._messages[-1]["role"] != "assistant" or self._messages[-1].keys() & set(busy):
            self._messages.append({"role": "assistant"})
        return self._messages[-1]

    def _reason(self, text: str) -> None:
        if text:
            self._turn("content", "tool_calls").setdefault("reasoning_content", []).append(text)

    def _call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        self._calls.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _result(self, call_id: str, text: str, where: str) -> None:
        if call_id not in self._calls:
            why = "no call with this id comes before; nothing is stored here, so send the whole conversation"
            raise RequestError(f"{where}: {why}", where)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": [text]})


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
    return "".join(part.refusal if part.type == "refusal" else part.text for part in content)


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(f"{where} must be the text of a JSON object", where) from None
