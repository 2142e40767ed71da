"""Command lines in other engines' words, rewritten in ours before they are parsed."""

from __future__ import annotations

import argparse
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gapless.base.addresses import hide_password
from gapless.base.spellings import Fate, Foreign, foreign, rows_of
from gapless.cli.errors import UsageError
from gapless.cli.spec import Spec, read_bool

SHOWN_CHARS = 40
"""Longer values are not repeated in notes."""
JSON_FIELDS = ("_config", "_kwargs")
"""Ends of the names of fields that are JSON, whose parts may be given one by one: --speculative-config.method mtp"""
Options = Mapping[str, argparse.Action]


class Rewritten(NamedTuple):
    """A command line in our own words."""

    words: list[str]
    notes: list[str]
    """Warnings about flags that are not ours"""
    said: dict[str, str]
    """The typed flag, by the name of the field that it sets"""
    needs: list[tuple[str, Foreign]]
    """Flags, as they were typed, that are in place only where another is given"""


def rewrite(words: Sequence[str], options: Options, fields: Mapping[str, Spec]) -> Rewritten:
    """Put flags of other engines in our words. Raises UsageError for an unsupported one, with our way instead."""
    done, rest, parts = Rewritten([], [], {}, []), deque(words), dict[str, dict[str, Any]]()
    while rest:
        word = rest.popleft()
        name, equals, text = word.partition("=")
        head, _, part = name.partition(".")
        value = text if equals else None
        if name in options:
            done.said[options[name].dest] = name
            done.words.append(_switched(options[name], name, value))
        elif part and head in options and options[head].dest.endswith(JSON_FIELDS):
            _add_part(parts, f"{options[head].dest}.{part}", _value(name, value, rest))
            done.said[options[head].dest] = head
        elif name.startswith("-") and (rows := rows_of(head if part else name)):
            _take(done, parts, fields, name, _given(name, rows, value, rest))
        else:
            done.words.append(word)
    for field, members in parts.items():
        done.words.extend([fields[field].flag, json.dumps(_whole(done.words, fields[field]) | members)])
    return done


def _whole(words: Sequence[str], spec: Spec) -> dict[str, Any]:
    """Return the object of a field where `words` have it whole: parts that are given one by one beat its members."""
    given: Any = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, text = word.partition("=")
        if name in spec.spellings:
            with suppress(ValueError):
                given = None
                given = json.loads(text if equals else following)
    if not isinstance(given, dict):
        raise UsageError(f"{spec.flag} must be a JSON object")
    return given


def _take(
    done: Rewritten, parts: dict[str, dict[str, Any]], fields: Mapping[str, Spec], name: str, value: str | None
) -> None:
    if value == "":  # a switch that is turned off
        name, value = f"--no-{name[2:]}", None
    name_of_all, _, part = name.partition(".")
    row = foreign(name_of_all, f"{part}={value}" if part else value)
    if row is None:
        takes = " or ".join(row.at for row in rows_of(name) if row.at) or "no value"
        raise UsageError(f"{name} takes {takes}, got {value!r}")
    typed = name if value is None or len(value) > SHOWN_CHARS else f"{name} {hide_password(value)}"
    target = row.field.partition(".")[0]
    if row.fate is Fate.INSTEAD:
        raise UsageError(f"{name} {row.fate.value}: {row.text}")  # its value may be secret
    if row.fate is Fate.NOT_YET:
        raise UsageError(f"{typed} {row.fate.value}" + (f": {row.text}" if row.text else ""))
    if row.fate is Fate.NOTHING:
        done.notes.append(f"{typed} {row.fate.value}: {row.text}")
    elif row.fate is Fate.NEEDS:
        done.needs.append((name, row))
    elif target not in fields:
        done.words.append(name)  # this command has no such thing
    else:
        if "." not in row.field:
            done.said[target] = name
        done.notes.append(f"{name} {row.fate.value} {_set(done, parts, fields[target], row, value)} here")


def _set(done: Rewritten, parts: dict[str, dict[str, Any]], spec: Spec, row: Foreign, value: str | None) -> str:
    """Add our own words for a flag; returns them as a note shows them, without a value that may be secret."""
    text, part = row.text.format(value), row.field.partition(".")[2]
    shown = "" if row.text == "{}" else f" {text}"
    if part:
        _add_part(parts, row.field, text)
        return f"{spec.flag}.{part}{shown}"
    if spec.kind is bool:
        done.words.append(spec.flag if text == "on" else f"--no-{spec.flag[2:]}")
        return done.words[-1]
    for one in text.split() if row.at == "+" else [text]:
        done.words.extend([spec.flag, one])
    return f"{spec.flag}{shown}"


def _given(name: str, rows: Sequence[Foreign], value: str | None, rest: deque[str]) -> str | None:
    """The value of another engine's flag, taken from the words that follow; "" for a switch that is off."""
    is_switch = any(not row.at for row in rows)
    listed = {text for row in rows for text in row.at.split()}
    if value is not None:
        on = read_bool(value) if is_switch and value not in listed else None
        return value if on is None else None if on else ""
    if is_switch:
        return rest.popleft() if rest and listed and rest[0] in listed else None
    values = [_value(name, None, rest)]
    while "+" in listed and rest and not _is_flag(rest[0]):
        values.append(rest.popleft())
    return " ".join(values)


def _value(name: str, value: str | None, rest: deque[str]) -> str:
    if value is not None:
        return value
    if not rest or _is_flag(rest[0]):
        raise UsageError(f"{name}: expected a value")
    return rest.popleft()


def _is_flag(word: str) -> bool:
    return word.startswith("-") and re.match(r"-($|\.?\d)", word) is None


def _switched(action: argparse.Action, name: str, value: str | None) -> str:
    """`--x=false` as `--no-x`, for our own switches."""
    if value is None or not isinstance(action, argparse.BooleanOptionalAction):
        return name if value is None else f"{name}={value}"
    on = read_bool(value)
    if on is None:
        raise UsageError(f"{name}: expected true or false, got {value!r}")
    positive = name.replace("--no-", "--", 1)
    return positive if on != name.startswith("--no-") else f"--no-{positive[2:]}"


def _add_part(parts: dict[str, dict[str, Any]], path: str, text: str) -> None:
    """Set one member of a field that is JSON."""
    field, *steps, last = path.split(".")
    place = parts.setdefault(field, {})
    for step in steps:
        place = place.setdefault(step, {})
    try:
        place[last] = json.loads(text)
    except ValueError:
        place[last] = text
