"""Forms of messages that a chat template reads, found by rendering probes once, when it is loaded.

Templates differ in whether content is a text or a list of parts, whether a call's arguments are an object or its text,
and what stands for no content beside calls. A probe shows which of these a template prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2s
from itertools import product
from typing import Any, NamedTuple

from gapless.base.errors import RequestError
from gapless.text.history import INVALID, REASONING, GivenArguments

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools. Raises RequestError."""
_WORDS = ("one4c7", "two9e1")
_GIVEN = {"key5a3": "value8d2"}
_NAME, _ID, _SHORT = "name6b0", "call_0123456789abcdef01234567", 9
_SCHEMA = {"type": "object", "properties": {"key5a3": {"type": "string", "description": "d"}}, "required": ["key5a3"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "d", "parameters": _SCHEMA}}


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_FORMS: dict[str, Callable[[Sequence[str]], Any]] = {
    "text": "".join,
    "parts": _parts,
    "part": lambda texts: _parts(["".join(texts)]),
}
"""Forms of content, the first that a template prints is used"""
_SILENCES: dict[str, dict[str, Any]] = {"absent": {}, "empty": {"content": ""}, "null": {"content": None}}
"""Content of a message with calls alone, in the order of trials"""


class Reading(NamedTuple):
    """A template's reading of canonical messages. The default is the form that transformers passes."""

    forms: Mapping[str, str] = {}
    """Forms of content by role, if it is not one text"""
    silence: str = "absent"
    """Content of a message with calls alone"""
    objects: bool = True
    """Arguments are read as an object"""
    texts: bool = False
    """Arguments are printed where they are text"""
    short_ids: bool = False
    """Ids of calls must have nine letters or digits, as in Mistral's templates"""

    def written(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a canonical message as the template reads it."""
        made = dict(message)
        if "content" in made:
            made["content"] = _FORMS[self.forms.get(made["role"], "text")](made["content"])
        else:
            made |= _SILENCES[self.silence]
        if "tool_calls" in made:
            made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
        if "tool_call_id" in made:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        thought = made.get(REASONING[0])
        return made if thought is None else {**dict.fromkeys(REASONING, thought), **made}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        made = {**call, "function": {**function, "arguments": self._arguments(function["arguments"])}}
        return {**made, "id": self._id(call["id"])} if "id" in call else made

    def _arguments(self, given: GivenArguments) -> Any:
        if self.objects and (given.fields is not None or not self.texts):
            return {INVALID: given.text} if given.fields is None else given.fields
        return given.text

    def _id(self, given: Any) -> Any:
        if not self.short_ids or (isinstance(given, str) and len(given) == _SHORT and given.isalnum()):
            return given
        return blake2s(str(given).encode(errors="replace")).hexdigest()[:_SHORT]


def read(render: Render) -> Reading:
    """Return what the template behind `render` reads. What it prints in no form is left as it is by default."""
    reading = Reading()
    for role in ("user", "system", "assistant"):
        reading = _with_form(reading, role, render, None)
    reading, tools = _with_calls(reading, render)
    return _with_form(reading, "tool", render, tools)


def _with_form(reading: Reading, role: str, render: Render, tools: Sequence[Mapping[str, Any]] | None) -> Reading:
    """Return the reading with the first form that prints the content of this role."""
    for form in _FORMS:
        tried = reading._replace(forms={**reading.forms, role: form})
        text = _rendered(render, tried, _conversation(role), tools)
        if all(word in text for word in _WORDS):
            return tried if form != "text" else reading
    return reading


def _with_calls(reading: Reading, render: Render) -> tuple[Reading, Sequence[Mapping[str, Any]] | None]:
    """Return the reading with the first form that prints calls, and the tools that this needs."""
    silent: Reading | None = None
    for tools, end in product(([_TOOL], None), (None, 2)):  # some templates have no role for results
        for tried in _ways(reading):
            text = _rendered(render, tried, _conversation("tool")[:end], tools)
            if _prints(text, tried.objects):
                as_text = tried._replace(objects=False)
                texts = _prints(_rendered(render, as_text, _conversation("tool")[:end], tools), False)
                return tried._replace(texts=texts), tools
            silent = silent or (tried if text else None)  # calls are not printed, but may be there
    return silent or reading, [_TOOL]


def _ways(reading: Reading) -> Iterator[Reading]:
    for short, silence, objects in product((False, True), _SILENCES, (True, False)):
        yield reading._replace(silence=silence, objects=objects, short_ids=short)


def _prints(text: str, objects: bool) -> bool:
    """Return whether a call is in the text; an object that was printed as Python writes it does not count."""
    if not objects:
        return _NAME in text and json.dumps(_GIVEN) in text
    return all(word in text for word in (_NAME, *_GIVEN, *_GIVEN.values())) and repr(_GIVEN) not in text


def _conversation(role: str) -> list[dict[str, Any]]:
    """Return a canonical conversation with the words in a message of this role."""
    user, words = {"role": "user", "content": ["hi"]}, {"role": role, "content": list(_WORDS)}
    if role != "tool":
        return {"user": [words], "system": [words, user]}.get(role, [user, words, user])
    call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": GivenArguments(_GIVEN)}}
    return [user, {"role": "assistant", "tool_calls": [call]}, {**words, "tool_call_id": _ID, "name": _NAME}]


def _rendered(
    render: Render, reading: Reading, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> str:
    form = reading.forms.get("system", reading.forms.get("user", "text"))
    system = {"role": "system", "content": _FORMS[form](["be brief"])}
    for head in ([], [system]):  # some templates take no conversation without one
        with suppress(RequestError):
            return render([*head, *map(reading.written, messages)], tools)
    return ""
