"""StructuredOutputs: the form that a request wants its output to have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from gapless.base.errors import RequestError

WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Regex of what may stand between the parts of JSON by default. Without a bound, models write spaces until
max_tokens ends them."""
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_FORM_BYTES = 128 << 10
"""Bytes of one form as text, and of all tools of a request as JSON."""
GRAMMAR_OF_PARTS = 8
"""A grammar made from tools may have this many times the bytes: each parameter takes rules of its own."""
MAX_WHITESPACE_BYTES = 1_000


class Thinking(NamedTuple):
    """Text that a model may write before the form: `begin`, free text, `end` and `between`, or none of these; then
    `answer`. With an empty `begin` the prompt has begun the thinking, so its end must come first.
    """

    begin: str
    end: str
    between: str = ""
    answer: str = ""
    budget: int | None = None
    """Tokens of the output that the thinking has at most, before its end; None for any number"""
    ids: tuple[int, ...] = ()
    """The tokens of `end`, if there is a budget"""
    free: bool = False
    """Whether there is no form: any token may come before the thinking, and after it"""


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an output must have: exactly one of the first six fields, in vLLM's names.

    Raises RequestError naming the field. Whether the form can be honoured shows when it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema; kept as text"""
    json_object: bool = False
    """Any JSON object"""
    regex: str | None = None
    """The whole output matches it. Syntax of Rust's regex, without look-around; a digit is one of 0 to 9"""
    choice: Sequence[str] | None = None
    """The output is one of these"""
    grammar: str | None = None
    """A context-free grammar, in Lark's syntax or llama.cpp's (GBNF)"""
    structural_tag: str | Mapping[str, Any] | None = None
    """A tree of formats, which may be free text, tags, JSON and more; kept as JSON text"""
    whitespace_pattern: str | None = None
    """Regex of what may stand between the parts of JSON; default: a space, or one or two line breaks and an indent"""
    disable_any_whitespace: bool = False
    """Nothing may stand there"""
    disable_additional_properties: bool = False
    """An object has the listed properties alone, unless the schema allows others"""
    thinking: Thinking | None = None
    """Text before the form; set by the reader of the model's way of replying"""
    marks: tuple[str, ...] = ()
    """Texts that count only as tokens of their own, and are no part of free text, beside the special tokens"""
    parts: tuple[str, ...] = ()
    """The request's fields that the rules `arguments0`, `arguments1`, ..., then `answer`, of a grammar come from, for
    errors"""
    begun: str = field(default="", compare=False)
    """The part of the output that the prompt already holds, thinking included; the output continues it. If no output of
    this form begins so, JSON and calls are refused, and other forms begin after it"""
    source: str = field(default="", compare=False)
    """The request's field that this comes from, for errors; empty when that is structured_outputs"""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"{self._field}: give exactly one of {', '.join(KINDS)}; found {found}", self._field)
        for name in ("json", "structural_tag"):
            object.__setattr__(self, name, self._as_json(getattr(self, name)))
        object.__setattr__(self, "choice", self._choices())
        # Between processes tuples become lists.
        if self.thinking is not None:
            thinking = Thinking(*self.thinking)
            object.__setattr__(self, "thinking", thinking._replace(ids=tuple(thinking.ids)))
        object.__setattr__(self, "marks", tuple(self.marks))
        object.__setattr__(self, "parts", tuple(self.parts))
        self._check_types()
        most = MAX_FORM_BYTES * (GRAMMAR_OF_PARTS if self.parts else 1)
        if len(self._bytes(self.text)) > most:
            what = f"the grammar of calls made from {self.where}" if self.parts else self.where
            raise RequestError(f"{what} is larger than {most:,} bytes", self.where)
        self._check_whitespace()

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def text(self) -> str:
        """The form as text; the choices, and a schema of any object, as JSON."""
        if self.kind == "json_object":
            return '{"type":"object"}'
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def where(self) -> str:
        """The request's field that a fault of the form is in."""
        return self.source or f"{self._field}.{self.kind}"

    @property
    def _field(self) -> str:
        return self.source or "structured_outputs"

    def _as_json(self, value: object) -> str | None:
        if value is None or value == "":
            return value
        if not isinstance(value, Mapping) and not (isinstance(value, str) and value.lstrip().startswith("{")):
            raise RequestError(f"{self.where} cannot be honoured: it must be a JSON object", self.where)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{self._field} is no JSON: {error}", self._field) from error

    def _choices(self) -> tuple[str, ...] | None:
        if self.choice is None:
            return None
        good = isinstance(self.choice, (list, tuple)) and all(isinstance(one, str) for one in self.choice)
        if not good or not self.choice:
            raise RequestError(f"{self._field}: choice must be a list of one or more strings", self._field)
        return tuple(self.choice)

    def _check_types(self) -> None:
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"{self._field}: {name} must be a text that is not empty", self._field)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{self._field}: {name} must be true or false", self._field)

    def _check_whitespace(self) -> None:
        if self.whitespace_pattern is None and not (self.disable_any_whitespace or self.disable_additional_properties):
            return
        if len(self._bytes(self.whitespace_pattern or "")) > MAX_WHITESPACE_BYTES:
            text = f"whitespace_pattern is larger than {MAX_WHITESPACE_BYTES:,} bytes"
            raise RequestError(f"{self._field}: {text}", self._field)
        if self.kind not in ("json", "json_object", "structural_tag"):
            raise RequestError(f"{self._field}: settings of JSON do not go with {self.kind}", self._field)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            text = "give whitespace_pattern or disable_any_whitespace, not both"
            raise RequestError(f"{self._field}: {text}", self._field)

    def _bytes(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{self.where} holds half a surrogate pair, which is not text", self.where) from error


def as_form(value: object) -> StructuredOutputs | None:
    """Return the form that `value` is, or describes as a mapping. Raises RequestError."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be StructuredOutputs, got {type(value).__name__}", name)
    known = [one.name for one in fields(StructuredOutputs)]
    if unknown := [key for key in value if key not in known]:
        raise RequestError(f"{name} has no field {unknown[0]!r}; known: {', '.join(known[:-5])}", name)
    return StructuredOutputs(**value)
