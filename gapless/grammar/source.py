"""Writes a form of output as a grammar of llguidance. Every fault is a RequestError naming the request's field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from gapless.base.errors import RequestError
from gapless.base.structured import WHITESPACE, StructuredOutputs
from gapless.grammar.lark import from_grammar, from_regex
from gapless.grammar.tags import tag_grammar
from gapless.text.call_grammar import EXACT, quoted
from gapless.text.schema_words import plain_schema

ENDLESS_FORM: Mapping[str, int] = MappingProxyType({})
_MENDS = {
    r"Unimplemented keys: \[(.*?)\]": r"\1 not supported: leave it out",
    "regex parse error: error: ": "fault of a regex: ",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Write anyOf",
}
"""Messages of llguidance that a caller cannot act on, and ours in their place."""


def write_grammar(form: StructuredOutputs, special: Mapping[str, int] = ENDLESS_FORM) -> str:
    """Return the grammar of a form; `special` are the special tokens that a structural tag may name."""
    makers: dict[str, Callable[[], str]] = {
        "json": lambda: _json(form),
        "json_object": lambda: _json(form),
        "regex": lambda: LLMatcher.grammar_from_lark(f"start: {from_regex(form.text)}"),
        "choice": lambda: LLMatcher.grammar_from_lark(_choice(form)),
        "grammar": lambda: LLMatcher.grammar_from_lark(from_grammar(form.text)),
        "structural_tag": lambda: _tags(form, special),
    }
    if form.whitespace_pattern is not None:
        _check_pattern(form)
    try:
        return makers[form.kind]()
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise fault(form, str(error)) from error


def fault(form: StructuredOutputs, reason: str) -> RequestError:
    """Return the error of a form that cannot be honoured, with llguidance's reason in one line."""
    lines = [line.strip() for line in reason.splitlines()]
    # Left out: copies of the grammar's own lines with a marker below, and llguidance's words about itself.
    told = [line for line in lines if line and line[0] not in "^<" and not line[0].isdigit()] or lines[:1]
    text = " ".join(told)
    if form.parts or form.kind != "grammar":  # lines of a grammar of ours, which the caller cannot see
        text = re.sub(r"^((at )?\d+\(\d+\): )?(failed to compile JSON schema: )?", "", text)
    for pattern, mend in _MENDS.items():
        text = re.sub(pattern, mend, text)
    where = _part(form, reason) or form.where
    return RequestError(f"{where} cannot be honoured: {text[:300]}", where)


def _part(form: StructuredOutputs, reason: str) -> str:
    """Return the one of `parts` that has the line of llguidance's fault; empty if none has."""
    at = re.match(r"at (\d+)\(", reason)
    line = form.text.split("\n")[int(at[1]) - 1 :] if at and form.parts else []
    rule = re.match(r"(?i)(?:call|arguments)(\d+)|answer:", line[0]) if line else None
    return form.parts[int(rule[1] or -1)] if rule else ""


def _json(form: StructuredOutputs) -> str:
    schema = form.text
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):  # llguidance reports the fault
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=_options(form)))
    value = plain_schema(value)
    if form.disable_additional_properties:
        _close(value)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=_options(form)))


def _options(form: StructuredOutputs) -> dict[str, Any]:
    """Text between the parts of JSON. A schema is exact or refused, whatever it asks itself."""
    if form.disable_any_whitespace:
        return {**EXACT, "whitespace_flexible": False}
    return {**EXACT, "whitespace_pattern": form.whitespace_pattern or WHITESPACE}


def _close(schema: Any) -> None:
    """Allow no further properties in every object that lists some and leaves it open."""
    if isinstance(schema, dict):
        if not {"properties", "patternProperties"}.isdisjoint(schema):
            schema.setdefault("additionalProperties", False)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _close(part)


def _choice(form: StructuredOutputs) -> str:
    """One terminal of all choices: as parts of a rule, more than 2,000 would be too many for the parser."""
    texts = " | ".join(quoted(text) for text in form.choice or () if text)
    empty = '"" | ' if "" in (form.choice or ()) else ""
    return f"start: {empty}CHOICE\nCHOICE: {texts}" if texts else 'start: ""'


def _check_pattern(form: StructuredOutputs) -> None:
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(form.whitespace_pattern or ""))
    if reason:
        raise fault(form, f"whitespace_pattern: {reason}")


def _tags(form: StructuredOutputs, special: Mapping[str, int]) -> str:
    value = json.loads(form.text)
    if form.disable_additional_properties:
        _close(value)
    return str(LLMatcher.grammar_from_lark(tag_grammar(value, special, _options(form))))
