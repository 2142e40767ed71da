"""Grammars of tool calls, in Lark's syntax, from the tables of gapless.text.reply_parser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gapless.base.errors import RequestError
from gapless.base.structured import WHITESPACE
from gapless.text.reply_tables import CallForm, ParameterForm, ReplyState, ReplyTable
from gapless.text.schema_words import KEYWORDS, Schema
from gapless.text.schemas import Meaning, meaning_of, resolved

MAX_CALLS = 32
"""Calls of one answer that must call."""
EXACT = {"lenient": False, "coerce_one_of": False}
"""llguidance's options for JSON: a schema is exact or refused"""
_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_TEXT = {"type", "minLength", "maxLength", "$defs", "definitions"}
_CHOICE = _TEXT | {"enum", "const", "anyOf", "oneOf", "allOf"}
_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
"""A reference to a place that a parameter's own schema has not"""
_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_ENVELOPE = r'\{\s*"(type|id|name|arguments|parameters)"'
"""Beginning of JSON that may be a call, if it has no mark of its own"""
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.-]*")
_VALUES = (ReplyState.VALUE, ReplyState.STRING_VALUE, ReplyState.JSON_VALUE)
_KEY = r'[^\s<>"=,()]+( [^\s<>"=,()]+)*'
"""The name of a parameter that no schema lists"""


class Function(NamedTuple):
    """A function that may be called."""

    name: str
    schema: Schema
    """The parser's schema for its arguments"""
    exact: bool
    """Whether its arguments are held to the schema; otherwise they are any that the parser reads"""
    field: str
    """The field of the request that holds the schema"""


def as_terminals(text: str, added: Mapping[str, int]) -> str:
    """Return a text as terminals: an added token is that token, `{index}` a number, and the rest is text."""
    tokens = {"{index}": "/[0-9]{1,2}/", **{one: f"<[{token}]>" for one, token in added.items() if one in text}}
    known = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    parts = [part for part in re.split(f"({known})", text) if part]
    return " ".join(tokens.get(part) or quoted(part) for part in parts)


def quoted(text: str) -> str:
    """Return a text as a string of Lark's, which are JSON's but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _regex(text: str) -> str:
    return _META.sub(r"\\\g<0>", text)


class CallGrammar:
    """The grammar of replies to a request with these functions.

    `added` are the added tokens of the tokenizer. Raises RequestError naming the field `source` where nothing is known
    of how calls are written, or a function's field where it cannot be held to its schema by this table.
    """

    def __init__(self, table: ReplyTable, functions: Sequence[Function], added: Mapping[str, int], source: str) -> None:
        if table.form is None:
            raise RequestError(
                f"{source}: no grammar is known for the form of this model's calls, {table.name}, so none can be "
                "required or strict: leave it to the model (tool_choice auto, no strict)", source)  # fmt: skip
        self._table = table
        self._form: CallForm = table.form
        self._functions = functions
        # Few of the tokens occur in a text; looking for all of them in each text would take most of the time.
        texts = "\n".join(_texts(self._form, functions))
        self.added = {one: token for one, token in added.items() if one in texts}

    def calls(self, many: bool) -> str:
        """Return the grammar of a reply that is nothing but calls; `many` allows more than one."""
        calls = self._several(f"{{0,{MAX_CALLS - 1}}}" if many else "")
        return "\n".join([f"start: {self.text(self._form.opening)} {calls}", *self._rules()])

    def calls_or(self, schema: Schema, many: bool) -> str:
        """Return the grammar of a reply that is calls, or JSON of this schema."""
        answer = f"answer: {self.text(self._form.plain)} {_json(schema)}"
        calls = self.calls(many).replace("start:", "calls:", 1)
        return "\n".join(["start: calls | answer", answer, calls])

    def free(self, many: bool) -> str:
        """Return the grammar of a reply of free text and calls; `many` allows more than one."""
        form, times = self._form, "*" if many else "?"
        calls = f"calls: {self.text(form.opening)} {self._several('*' * many)}"
        if form.plain:
            return self._lines(f"start: calls | {self.text(form.plain)} TEXT?", calls)
        if not self._table.sure:
            return self._lines("start: calls | TEXT?", calls)
        alone = not (form.opening or form.closing)
        if form.trigger in self.added:
            return self._lines(f"start: TEXT? (calls TEXT?){times}", "calls: call" if alone else calls)
        # The trigger is found in the text: a lazy rule takes everything up to its end. A token in it ends the text.
        text, token, rest = f" {self.text(form.trigger)}".partition(" <[")
        head = f"head{'[lazy]' * (not token)}: HEAD {token}{rest}\nHEAD: ({self._prose(form.trigger)}) {text}"
        if alone:
            return self._lines(f"start: call{times} TEXT?", head, head=form.trigger)
        opening = self.text(form.opening.removeprefix(form.trigger))
        calls = f"calls: head {opening} {self._several('*' * many)}"
        return self._lines(f"start: calls{times} TEXT?", calls, head)

    def _several(self, times: str) -> str:
        """Return calls, the first and `times` others, up to the closing of their section."""
        between, closing = self._form.between, self._form.closing
        # The text after a call must not begin alike: the lexer takes the longest text, and does not go back.
        shared = between if closing.startswith(between) else ""
        ends = [self.text(text) for text in (shared, between.removeprefix(shared), closing.removeprefix(shared))]
        return f"call {ends[0]} {f'({ends[1]} call {ends[0]}){times}' * bool(times)} {ends[2]}"

    def _lines(self, *lines: str, head: str = "") -> str:
        return "\n".join([*lines, f"TEXT: {self._prose()}", *self._rules(head)])

    def _prose(self, trigger: str = "") -> str:
        """Return the terminal of text without a call, but for one that begins with `trigger`."""
        moves = [m for m in self._table.moves if m.state is self._table.start and m.to is not ReplyState.CONTENT]
        first = "".join(_regex(move.terminal) for move in moves if move.first)
        inside = [_ENVELOPE if m.terminal == "{" else _regex(m.terminal) for m in moves if not m.first]
        inside = [text for text in inside if text != _regex(trigger)]
        text = rf"\s*[^\s{first}](?s:.*)" if first else "(?s:.*)" if trigger else "(?s:.+)"
        return f"/{text}/" + f" & ~/(?s:.*)({'|'.join(inside)})(?s:.*)/" * bool(inside)

    def _rules(self, head: str = "") -> list[str]:
        """Return the rules of `call`. With `head`, calls begin with the rule `head`, which takes that text."""
        lines = [f"call: {' | '.join(f'call{i}' for i in range(len(self._functions)))}"]
        for i, function in enumerate(self._functions):
            begin = self.text(self._form.before.replace("{name}", function.name).removeprefix(head))
            lines.append(f"call{i}: {'head ' * bool(head)}{begin} arguments{i} {self.text(self._form.after)}")
            if self._form.parameter is None:
                lines.append(f"arguments{i}: {_json(function.schema if function.exact else {'type': 'object'})}")
            else:
                kind = _ExactParameters if function.exact else _AnyParameters
                lines += kind(self, self._form.parameter, function, f"arguments{i}").rules()
        return lines

    def text(self, text: str) -> str:
        """Return a text as terminals."""
        return as_terminals(text, self.added)

    def refusal(self, function: Function, what: str) -> RequestError:
        text = f"{function.field}: {function.name}: {what} cannot be kept to where calls are of the form"
        return RequestError(f"{text} {self._table.name!r}: leave it out, or leave calls to the model", function.field)

    @property
    def marks(self) -> list[str]:
        """Texts that end a value."""
        return sorted({move.terminal for move in self._table.moves if move.state in _VALUES})

    @property
    def heads(self) -> list[str]:
        """Texts that end the name of a parameter."""
        return [move.terminal for move in self._table.moves if move.state is ReplyState.KEY]


def _texts(form: CallForm, functions: Sequence[Function]) -> Iterator[str]:
    """Yield the fixed texts of calls, between values."""
    yield from (text for part in (form, form.parameter or ()) for text in part if isinstance(text, str))
    for function in functions:
        yield function.name
        yield from function.schema.get("properties") or ()


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {**EXACT, 'whitespace_pattern': WHITESPACE}})}"


class _Parameters:
    """Makes the rules of one function's parameters, whose names begin with `rule`."""

    def __init__(self, calls: CallGrammar, form: ParameterForm, function: Function, rule: str) -> None:
        self._calls = calls
        self._form = form
        self._function = function
        self._schema = resolved(function.schema, function.schema)
        self._properties: Mapping[str, Any] = self._schema.get("properties") or {}
        self._rule = rule
        self._marks = "|".join(map(_regex, calls.marks))
        if form.python and not _IDENTIFIER.fullmatch(function.name):
            raise calls.refusal(function, "the name")

    def rules(self) -> list[str]:
        raise NotImplementedError


class _ExactParameters(_Parameters):
    """Parameters that stand in the order of the schema, and are held to it."""

    def rules(self) -> list[str]:
        self._check()
        required = set(self._schema.get("required") or ())
        between = self._calls.text(self._form.between)
        lines = []
        # "first" if no parameter has been written, "more" after one.
        for i, (key, schema) in enumerate(self._properties.items()):
            value, rest, skips = f"{self._rule}v{i}", f"{self._rule}more{i + 1}", key not in required
            first = f" | {self._rule}first{i + 1}" if skips else ""
            more = f" | {rest}" if skips else ""
            lines += [
                f"{self._rule}first{i}: {value} {rest}{first}",
                f"{self._rule}more{i}: {between} {value} {rest}{more}",
            ]
            lines += self._parameter(key, schema if isinstance(schema, Mapping) else {}, value)
        ends = [f'{self._rule}{kind}{len(self._properties)}: ""' for kind in ("first", "more")]
        return [f"{self._rule}: {self._rule}first0", *lines, *ends]

    def _check(self) -> None:
        """Refuse what the parameters cannot be held to."""
        for key in self._schema.keys() & KEYWORDS.keys() - _OBJECT:
            raise self._calls.refusal(self._function, f"the keyword {key!r}")
        for key in self._schema.get("required") or ():
            if key not in self._properties:
                raise self._calls.refusal(self._function, f"the required {key!r}, which properties do not describe,")
        for key in self._properties:
            if not key or key != key.strip() or any(mark in key for mark in self._calls.heads) or "{index}" in key:
                raise self._calls.refusal(self._function, f"the parameter name {key[:40]!r}")

    def _parameter(self, key: str, schema: Schema, rule: str) -> list[str]:
        form, root = self._form, self._schema
        schema = resolved(schema, root)
        said, chosen = meaning_of(schema, root), _is_choice(schema, root)
        defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
        mixed = not form.before_string and "string" in said.types and (chosen or _nullable_text(schema))
        text = not form.python and (said.types == {"string"} or mixed)
        if not (text or form.python or form.before_string) and (not said.types or "string" in said.types):
            raise self._calls.refusal(self._function, f"the type of {key!r}, which may be a string or another,")
        before = form.before_string if text and form.before_string else form.before
        begin, after = self._calls.text(before.replace("{key}", key)), self._calls.text(form.after)
        if text:
            value = self._choice(key, schema, said) if chosen else self._plain(key, schema)
            return _ended(rule, begin, value, after)
        if _ELSEWHERE.search(json.dumps([schema, defined])):
            raise self._calls.refusal(self._function, f"a reference to another place than $defs in {key!r}")
        value = _python(schema, defined) if form.python else _json({**schema, **defined})
        return [f"{rule}: {begin} {value} {after}"]

    def _choice(self, key: str, schema: Schema, said: Meaning) -> str:
        """Return the terminal of one of some constants."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", sys.maxsize)
        known = [one for one in said.constants if not isinstance(one, str) or least <= len(one) <= most]
        texts = [one if isinstance(one, str) else json.dumps(one) for one in known]
        for one in texts or ["none of its length"]:
            if not texts or re.search(self._marks, one):
                raise self._calls.refusal(self._function, f"the value {one[:40]!r} of {key!r}")
        return f"({' | '.join(map(quoted, texts))})"

    def _plain(self, key: str, schema: Schema) -> str:
        """Return the terminal of a string that is written as it is, and ends with the next of `marks`."""
        for name in () if _nullable_text(schema) else schema.keys() & KEYWORDS.keys() - _TEXT:
            raise self._calls.refusal(self._function, f"the keyword {name!r} of the string {key!r}")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return _any_text(self._marks, f"{{{least},{most}}}" if least or most != "" else "*")


class _AnyParameters(_Parameters):
    """Any parameters that the parser reads as JSON, in any order."""

    def rules(self) -> list[str]:
        one, between = f"{self._rule}one", self._calls.text(self._form.between)
        if self._form.python:
            kinds = self._python()
        elif self._form.before_string:
            kinds = [*self._text(self._form.before_string, ""), *self._values(self._form.before, f"/{_KEY}/")]
        else:
            # Values of these the parser reads as JSON, so that a quote in one has to be closed.
            keys = [key for key, schema in self._properties.items() if self._is_json(schema)]
            kinds = self._text(self._form.before, "|".join(map(_regex, keys)))
            kinds += self._values(self._form.before, f"({' | '.join(map(quoted, keys))})") if keys else []
        names = " | ".join(sorted({line.partition(":")[0] for line in kinds if line.startswith(one)}))
        return [f"{self._rule}: ({self._rule}any ({between} {self._rule}any)*)?", f"{self._rule}any: {names}", *kinds]

    def _is_json(self, schema: Any) -> bool:
        types = meaning_of(schema, self._schema).types
        return bool(types) and "string" not in types

    def _around(self, before: str) -> list[str]:
        return [self._calls.text(part) for part in before.split("{key}")]

    def _text(self, before: str, others: str) -> list[str]:
        """Return the rules of a text, under any name but `others`, a regular expression."""
        begin, end = self._around(before)
        key, but = f"{self._rule.upper()}KEY", f" & ~/({others})/" * bool(others)
        value, after = _any_text(self._marks), self._calls.text(self._form.after)
        return [*_ended(f"{self._rule}onetext", f"{begin} {key} {end}", value, after), f"{key}: /{_KEY}/{but}"]

    def _values(self, before: str, key: str) -> list[str]:
        begin, end = self._around(before)
        return [f"{self._rule}onevalue: {begin} {key} {end} {_json({})} {self._calls.text(self._form.after)}"]

    def _python(self) -> list[str]:
        value, items = f"{self._rule}literal", r"{0} (/,\s*/ {0})*"
        pair = rf"{value} /:\s*/ {value}"
        words = r"/[\w.+-]+/ | /'([^'\\]|\\(?s:.))*'/ | /\"([^\"\\]|\\(?s:.))*\"/"
        return [
            f"{self._rule}oneliteral: /{_KEY}/ {self._around(self._form.before)[1]} {value}",
            f'{value}: {words} | "[" ({items.format(value)})? "]" | "{{" ({items.format(f"({pair})")})? "}}"',
        ]


def _any_text(marks: str, count: str = "*") -> str:
    """Return the terminal of a text without `marks`, a regular expression."""
    return rf"(/(?s:.){count}/ & ~/(?s:.*)({marks})(?s:.*)/)"


def _ended(rule: str, begin: str, value: str, after: str) -> list[str]:
    """Return the rules of a value that is text, between terminals."""
    # Text of the end belongs to the terminal, which would otherwise take the beginning of the end.
    ending, _, others = after.partition(" <[") if after.startswith('"') else ("", "", after)
    others = f"<[{others}" if others and ending else others
    return [f"{rule}: {begin} {rule.upper()} {others}", f"{rule.upper()}: {value} {ending}"]


def _is_choice(schema: Schema, root: Schema, inner: bool = False) -> bool:
    """Return whether a value of this schema is one of the constants that it lists."""
    schema = resolved(schema, root)
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    plain = _only(schema, *_CHOICE - ({"minLength", "maxLength"} if inner else set()))
    whole = all(isinstance(part, Mapping) and _is_choice(part, root, True) for part in parts)
    return plain and whole and meaning_of(schema, root).finite


def _nullable_text(schema: Schema) -> bool:
    """Return whether the schema allows any string or null: the parser takes every text then."""
    parts = schema.get("anyOf", [{"type": kind} for kind in schema.get("type", ())])
    plain = all(isinstance(part, Mapping) and _only(part, "type") for part in parts)
    return plain and _only(schema, "type", "anyOf") and meaning_of(schema, schema).types == {"string", "null"}


def _only(schema: Schema, *words: str) -> bool:
    """Return whether a schema has these keywords alone."""
    return schema.keys() & KEYWORDS.keys() <= set(words)


def _python(schema: Schema, defined: Schema) -> str:
    """Return a Python literal: JSON, but for the words of booleans and none, which are Python's outside of lists."""
    kind, plain = schema.get("type"), _only(schema, "type")
    if plain and kind == "boolean":
        return '("True" | "False")'
    if plain and kind == "null":
        return '"None"'
    parts = schema.get("anyOf")
    if isinstance(parts, list) and parts and _only(schema, "anyOf"):
        return "(" + " | ".join(_python(part, defined) for part in parts if isinstance(part, Mapping)) + ")"
    return _json({**schema, **defined})
