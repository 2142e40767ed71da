"""Arguments of tool calls: where JSON ends in a growing text, and JSON for values that are written otherwise."""

from __future__ import annotations

import json
import re
from typing import Any

from gapless.text.schemas import UNBOUND, Meaning, meaning_of, property_of, type_of

WHITE = " \t\r\n"
_IN_STRING = re.compile(r"[\"'\\]")
_JSON = re.compile(r'["\[\]{},]')
_PYTHON = re.compile(r"""["'()\[\]{},]""")


class ValueScanner:
    """Finds the end of a JSON value in a text that is still growing; nothing else of the value is checked.

    An object, array or string ends where it closes, a bare word before a comma or bracket. A Python literal, with
    `python`, ends before a comma or bracket that is outside its own.
    """

    def __init__(self, python: bool = False) -> None:
        self.done = False
        self._python = python
        self._quote = ""
        self._escaped = False
        self._depth = 0

    @property
    def quoted(self) -> bool:
        """The text ends inside a string."""
        return bool(self._quote)

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from index `at`; return the index after the last character that belongs to the value."""
        while at < len(text) and not self.done:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        pattern = _IN_STRING if self._quote else _PYTHON if self._python else _JSON
        found = pattern.search(text, at)
        if found is None:
            return len(text)
        char = found[0]
        if self._quote:
            self._escaped = char == "\\"
            if char == self._quote:
                self._quote = ""
        elif not self._depth and char in ",)]}":
            self.done = True
            return found.start()
        elif char in "\"'":
            self._quote = char
        elif char != ",":
            self._depth += 1 if char in "([{" else -1
        closed = char in "\"')]}" and not self._quote
        self.done = closed and not self._depth and not self._python
        return found.end()


class CallReader:
    """Reads the JSON of a call. `take` gives the text of the arguments as it comes."""

    name: str | None = None
    done = False
    failed = False
    """The text is not a call."""
    whole = False
    """The arguments have ended."""

    def __init__(self) -> None:
        self._fragments: list[str] = []
        self._value: ValueScanner | None = None

    @property
    def quoted(self) -> bool:
        """The text ends inside a string: no terminal counts there."""
        return self._value is not None and self._value.quoted

    @property
    def ready(self) -> bool:
        """Whether it is certain that this is a call, and its name is known."""
        return self.name is not None

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the call."""
        raise NotImplementedError

    def take(self) -> str:
        """Return the new part of the arguments."""
        text = "".join(self._fragments)
        self._fragments.clear()
        return text


class ArgumentsReader(CallReader):
    """Reads the arguments alone. Text that is no object or array is passed on to its terminal as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._plain = False

    def feed(self, text: str) -> int:
        start = 0
        if self._value is None:
            start = len(text) - len(text.lstrip(WHITE))
            if start == len(text):
                return start
            self._value = ValueScanner()
            self._plain = text[start] not in "{["
        end = len(text) if self._plain else self._value.feed(text, start)
        self._fragments.append(text[start:end])
        self.done = self._value.done
        return end


class EnvelopeReader(CallReader):
    """Reads `{"name": ..., "arguments": {...}}`, also with `parameters`, in either order.

    The first arguments count. Without `sure`, an object is a call only if it has arguments and begins with keys of a
    call.
    """

    def __init__(self, sure: bool) -> None:
        super().__init__()
        self._sure = sure
        self._expected = "{"
        self._key = ""
        self._text = ""
        self._streams = False
        self._has_arguments = False

    @property
    def ready(self) -> bool:
        return self.name is not None and (self._sure or self._has_arguments)

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and not (self.done or self.failed):
            at = self._punctuation(text, at) if self._value is None else self._in_value(self._value, text, at)
        return at

    def _punctuation(self, text: str, at: int) -> int:
        """Read one character outside the keys and values."""
        char = text[at]
        if char in WHITE:
            return at + 1
        if self._expected == "value":
            self._streams = char in "{[" and self._is_arguments()
            self._value = ValueScanner()
            return at
        if self._expected == "key" and char == '"':
            self._value = ValueScanner()
            return at
        if self._expected == "{":
            self.failed = char != "{"
            self._expected = "key"
        elif char == ":" and self._expected == ":":
            self._expected = "value"
        elif char == ",":
            self._expected = "key"
        elif char == "}":
            self.done = True
        else:
            self.failed = self.name is None
        return at if self.failed else at + 1

    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.whole

    def _in_value(self, value: ValueScanner, text: str, at: int) -> int:
        end = value.feed(text, at)
        if self._streams:
            self._fragments.append(text[at:end])
        else:
            self._text += text[at:end]
        if value.done:
            self._value = None
            self._end_key() if self._expected == "key" else self._end_value()
            self._text = ""
        return end

    def _end_key(self) -> None:
        self._key = string_of(self._text)
        self._expected = ":"
        self._has_arguments |= self._is_arguments()
        known = self._key in ("type", "id", "name") or self._has_arguments
        self.failed = not (known or self._sure or self.ready)

    def _end_value(self) -> None:
        if self._key == "name" and self.name is None:
            self.name = string_of(self._text) or None
        elif self._is_arguments():
            self.whole = True
            if not self._streams:
                self._fragments.append(_unwrapped(self._text))
        self._streams = False
        self._expected = ","


def _unwrapped(text: str) -> str:
    """Return arguments that are no object: JSON that was written into a string, or none."""
    text = text.strip(WHITE)
    return string_of(text) if text[:1] == '"' else "" if text == "null" else text


def string_of(text: str) -> str:
    """Return the string that a JSON text stands for; "" when it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return _paired(value) if isinstance(value, str) else ""


def _paired(text: str) -> str:
    """Join surrogate pairs; a lone one cannot be sent as UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _refuse(word: str) -> None:
    raise ValueError(word)


def _parsed_type(text: str) -> str | None:
    """Return the type of a JSON text; None when it is not JSON."""
    try:
        return type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def as_json(text: str, said: Meaning) -> str:
    """Return JSON for a value that is written as plain text, by its schema: a string if that is one of the constants,
    else as it is if that is JSON of an allowed type."""
    bare, types = text.strip(WHITE), said.types
    if constant := next((one for one in (text, bare) if one in said.constants), None):
        return dumps(constant)
    if bare in _WORDS and types & {"boolean", "null"}:
        bare = _WORDS[bare]
    found = _parsed_type(bare)
    fits = found in types or (found == "integer" and "number" in types)
    return bare if fits or (found and "string" not in types) else dumps(text)


_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[()]|\b(?:True|False|None)\b""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0"}


def python_as_json(text: str) -> str:
    """Return JSON for a Python literal; for anything else, the text as a string."""
    converted = _TOKEN.sub(_python_token, text.strip(WHITE))
    return converted if _parsed_type(converted) else dumps(text.strip(WHITE))


def _python_token(found: re.Match[str]) -> str:
    token = found[0]
    if token in "()":
        return "[" if token == "(" else "]"
    return _WORDS[token] if token in _WORDS else dumps(_paired(_ESCAPE.sub(_python_escape, token[1:-1])))


def _python_escape(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, "\\" + code)


class ParameterWriter:
    """Writes the parameters of a call, one after another, as a JSON object. A value of type string streams."""

    def __init__(self, schema: Any, trims: bool) -> None:
        self._schema = schema
        self._trims = trims
        self._count = 0
        self._said = UNBOUND
        self._python = False
        self._held = ""
        self._begun = False
        self.is_json = False
        """The value is JSON whatever it begins with: its schema allows no string, or the model has marked it so."""

    def begin_value(self, key: str, types: frozenset[str] | None = None, python: bool = False) -> str:
        """Begin the value of a parameter; return the text up to it. `types` are the schema's by default."""
        self._said = meaning_of(property_of(key, self._schema), self._schema) if types is None else Meaning(types)
        types_said = self._said.types
        self._python, self._held, self._begun = python, "", False
        self.is_json = not python and "string" not in types_said and (bool(types_said) or types is not None)
        self._count += 1
        return f"{'{' if self._count == 1 else ', '}{dumps(key)}: "

    @property
    def _streams(self) -> bool:
        return self._said.types == {"string"} and not self._python

    def write(self, text: str) -> str:
        """Add text to the value; return what of it can be sent."""
        self._held += text
        if not (self._streams and self._held):
            return ""
        begun, self._begun = self._begun, True
        if self._trims and not begun:
            self._held = self._held.removeprefix("\n")
        text = self._held.removesuffix("\n") if self._trims else self._held
        self._held = self._held[len(text) :]
        return ("" if begun else '"') + dumps(text)[1:-1]

    def end_value(self) -> str:
        """Return the rest of the value."""
        if self._streams:
            return '"' if self._begun else '""'
        if self._python:
            return python_as_json(self._held)
        text = self._held.removeprefix("\n").removesuffix("\n") if self._trims else self._held
        return as_json(text, self._said)

    def cut(self) -> str:
        """Return the rest of a value whose end never came, as it is."""
        return "" if self._streams else self._held

    def end(self) -> str:
        """Return the end of the object; empty when there was no parameter."""
        return "}" if self._count else ""
