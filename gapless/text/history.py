"""Conversations in one form, whatever API or client they come from: absent, null and empty are one.

Content becomes a list of texts, and a call's arguments both an object and a text; reading.py picks a template's form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from gapless.base.errors import RequestError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Clients' names of a message's reasoning; templates read the first, some another."""
INVALID = "INVALID_JSON"
"""The field with the text of arguments that are no object but must be: the Messages API's own way."""
_ROLES = {"developer": "system", "function": "tool"}
_EMPTY: tuple[Any, ...] = (None, "", [], {}, ())
_CALLED = ("name", "arguments", "input")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts, and the fields that hold their text"""


class GivenArguments(NamedTuple):
    """The arguments of an earlier call. What a model wrote may be no object, or cut off."""

    fields: dict[str, Any] | None
    """None where they are no object"""
    written: str | None = None
    """The text that the client sent; None where it sent an object"""

    @property
    def text(self) -> str:
        return json.dumps(self.fields, ensure_ascii=False) if self.written is None else self.written


def canonical(messages: Any) -> list[dict[str, Any]]:
    """Return checked copies of the messages in the one form. Raises RequestError naming the field."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    made, called = [], ""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", where)
        if not is_empty(message.get("function_call")):  # and before calls had ids
            called = f"call_{i}"
        elif called and message.get("role") == "function":
            message = {**message, "tool_call_id": called}
        made.append(_message(message, where, called))
    return made


def is_empty(value: Any) -> bool:
    return any(value is nothing or (type(value) is type(nothing) and value == nothing) for nothing in _EMPTY)


def _message(message: Mapping[str, Any], where: str, called: str) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if not is_empty(value) or name == "content"}
    role = said.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a non-empty string", f"{where}.role")
    said["role"] = role = _ROLES.get(role, role)
    if not isinstance(said.get("tool_call_id", ""), str):
        raise RequestError(f"{where}.tool_call_id must be a string", f"{where}.tool_call_id")
    calls = [*_calls(said.pop("tool_calls", ()), f"{where}.tool_calls")]
    if "function_call" in said:
        field = f"{where}.function_call"
        calls.append({"id": called, **_called("function", said.pop("function_call"), field)})
    parts = [*_parts(said.get("content"), f"{where}.content")]
    refusal = _text(said.pop("refusal", ""), f"{where}.refusal")
    texts = [text for kind, text in parts if kind != "thinking" and text] or [refusal] * bool(refusal)
    thought = _thought(said, [text for kind, text in parts if kind == "thinking"], where)
    if not texts and not (role == "assistant" and calls):
        _check_silence(said, where, thought)
        texts = [""]
    made = {**said, "content": texts, "tool_calls": calls, REASONING[0]: thought}
    return {name: value for name, value in made.items() if not is_empty(value)}


def _thought(said: dict[str, Any], parts: list[str], where: str) -> str:
    """Take a message's reasoning out of it, which is in parts of its content, or in a field of several names."""
    if parts and said["role"] != "assistant":
        raise RequestError(f"{where}.content has thinking, which is the assistant's alone", f"{where}.content")
    given = [said.pop(name) for name in REASONING if name in said]
    return "".join(parts or (text for one in given[:1] for _, text in _parts(one, f"{where}.{REASONING[0]}")))


def _check_silence(said: Mapping[str, Any], where: str, thought: str) -> None:
    """Refuse an empty message, but for the allowed ones: a text that is empty, the result of a tool that
    returned no parts, and an answer that was cut off while it reasoned.
    """
    role, content = said["role"], said.get("content")
    silent = content is None or (not content and not isinstance(content, str) and role != "tool")
    if silent and not (role == "assistant" and thought):
        text = f"{where}.content is missing: it must be a string or a list of parts"
        raise RequestError(text, f"{where}.content")


def _parts(content: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the type and text of each part."""
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list | tuple | None):
        raise RequestError(f"{where} must be a string or a list of parts", where)
    for i, part in enumerate(content or ()):
        yield ("text", part) if isinstance(part, str) else _part(part, f"{where}[{i}]")


def _part(part: Any, where: str) -> tuple[str, str]:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with type and text", where)
    kind = part.get("type")
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(f"{where}.type must be text: this model reads text only", f"{where}.type")
    text = part.get(field)
    if kind == "thinking" and isinstance(text, list):
        return kind, "".join(text for _, text in _parts(text, f"{where}.{field}"))
    return str(kind), _text(text, f"{where}.{field}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string", where)
    return value


def _calls(calls: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} must be a list", where)
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}[{i}] must be an object with a function", f"{where}[{i}]")
        kept = {name: value for name, value in call.items() if not is_empty(value)}
        kind = "custom" if "custom" in kept else "function"
        function = _called(kind, kept.pop(kind, None), f"{where}[{i}].{kind}")
        yield {**kept, **function}


def _called(kind: str, function: Any, where: str) -> dict[str, Any]:
    """Return the function of a call as fields of it; that of a custom tool takes one text."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a name", where)
    given = {"input": function.get("input") or ""} if kind == "custom" else function.get("arguments")
    more = {name: value for name, value in function.items() if name not in _CALLED and not is_empty(value)}
    return {"type": "function", "function": {"name": function["name"], "arguments": _arguments(given), **more}}


def _arguments(given: Any) -> GivenArguments:
    written = given if isinstance(given, str) and given.strip() else None
    try:
        fields = (given or {}) if not isinstance(given, str) else _loaded(given) if written else {}
    except (ValueError, RecursionError):
        return GivenArguments(None, written)
    if fields is None:
        return GivenArguments({})
    if not isinstance(fields, Mapping):
        return GivenArguments(None, json.dumps(given, default=str) if written is None else written)
    broken = fields.get(INVALID) if len(fields) == 1 else None
    return _arguments(broken) if isinstance(broken, str) else GivenArguments(dict(fields), written)


def _loaded(text: str) -> Any:
    """Return the value of JSON. Raises ValueError for what some parsers take: numbers that are none, half a pair of
    surrogates.
    """
    found = json.loads(text, parse_constant=_no_number)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
