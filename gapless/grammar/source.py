"""Writes a form of output as a grammar of llguidance. Every fault is a RequestError naming the request's field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from llguidance import LLMatcher, StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from gapless.base.errors import RequestError
from gapless.base.structured import WHITESPACE, StructuredOutputs
from gapless.text.call_grammar import EXACT, quoted

MAX_GBNF_BYTES = 16 << 10
"""Bytes of a grammar in llama.cpp's syntax, whose translation is Python, and slow."""

_MENDS = {
    r"Unimplemented keys: \[(.*?)\]": r"\1 not supported: leave it out",
    "regex parse error: error: ": "fault of a regex: ",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Write anyOf",
}
"""What llguidance says that the caller cannot act on, and what we say."""


def write_grammar(form: StructuredOutputs, special: Collection[str] = ()) -> str:
    """Return the grammar of a form; `special` are the special tokens that it may name."""
    makers: dict[str, Callable[[], str]] = {
        "json": lambda: _json(form),
        "json_object": lambda: _json(form),
        "regex": lambda: LLMatcher.grammar_from_lark(_regex(form)),
        "choice": lambda: LLMatcher.grammar_from_lark(_choice(form)),
        "grammar": lambda: LLMatcher.grammar_from_lark(_lark(form)),
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
    # Left out: copies of the grammar's own lines with a marker below, and what llguidance says of itself.
    told = [line for line in lines if line and line[0] not in "^<" and not line[0].isdigit()] or lines[:1]
    text = " ".join(told)
    if form.parts or form.kind != "grammar":  # lines of a grammar of ours, which the caller cannot see
        text = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", text)
    for pattern, mend in _MENDS.items():
        text = re.sub(pattern, mend, text)
    where = _part(form, reason) or form.where
    return RequestError(f"{where} cannot be honoured: {text[:300]}", where)


def _part(form: StructuredOutputs, reason: str) -> str:
    """Return which of `parts` the line comes from in which llguidance found a fault; empty where it is none."""
    at = re.match(r"at (\d+)\(", reason)
    line = form.text.split("\n")[int(at[1]) - 1 :] if at and form.parts else []
    rule = re.match(r"(?i)(?:call|arguments)(\d+)|answer:", line[0]) if line else None
    return form.parts[int(rule[1] or -1)] if rule else ""


def _json(form: StructuredOutputs) -> str:
    schema = form.text
    if form.disable_additional_properties:
        value = json.loads(schema)
        _close(value)
        schema = json.dumps(value)
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=_options(form)))


def _options(form: StructuredOutputs) -> dict[str, Any]:
    """What stands between the parts of JSON. A schema is exact or refused, whatever it says itself."""
    if form.disable_any_whitespace:
        return {**EXACT, "whitespace_flexible": False}
    return {**EXACT, "whitespace_pattern": form.whitespace_pattern or WHITESPACE}


def _close(schema: Any) -> None:
    """Allow no further properties in every object that lists some and does not say."""
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


def _regex(form: StructuredOutputs) -> str:
    if (len(form.text) - len(form.text.rstrip("\\"))) % 2:  # the translation would drop it
        raise fault(form, "incomplete escape sequence: write \\\\ for the character")
    # Digits are 0 to 9 alone: which others there are differs between the Unicode of libraries.
    return f"start: /{regex_to_lark(form.text, 'd')}/"


def _lark(form: StructuredOutputs) -> str:
    text = form.text
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_BYTES:
        raise fault(form, f"a grammar of llama.cpp may have {MAX_GBNF_BYTES:,} bytes")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise fault(form, str(error)) from error


def _check_pattern(form: StructuredOutputs) -> None:
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(form.whitespace_pattern or ""))
    if reason:
        raise fault(form, f"whitespace_pattern: {reason}")


def _tags(form: StructuredOutputs, special: Collection[str]) -> str:
    """Text is free up to a trigger; from there on a tag's beginning, its JSON and its end are set.

    The form is {"triggers": [text], "structures": [{"begin": text, "schema": schema, "end": text}]}.
    """
    value = json.loads(form.text)
    if not isinstance(value, Mapping) or not _texts(value.get("triggers")) or not value.get("structures"):
        raise fault(form, "it must be an object with triggers, a list of texts, and structures, a list of objects")
    tags = [_tag(form, tag, value["triggers"]) for tag in value["structures"]]
    tokens = {tag.trigger in special for tag in tags}
    if len(tokens) > 1:
        raise fault(form, "its triggers must all be special tokens of the model, or all be texts")
    return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=tokens.pop())))


def _tag(form: StructuredOutputs, tag: Any, triggers: list[str]) -> StructTag:
    if not isinstance(tag, Mapping) or not _texts([tag.get("begin"), tag.get("end")]):
        raise fault(form, "a structure must be an object with begin, schema and end; begin and end are texts")
    trigger = next((text for text in triggers if text and tag["begin"].startswith(text)), None)
    if trigger is None:
        raise fault(form, f"no trigger is how {tag['begin'][:40]!r} begins")
    schema = tag.get("schema")
    if not isinstance(schema, Mapping):
        raise fault(form, "the schema of a structure must be an object")
    if form.disable_additional_properties:
        _close(schema)
    return StructTag(
        trigger=trigger, begin=tag["begin"], grammar={**schema, "x-guidance": _options(form)}, end=tag["end"]
    )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
