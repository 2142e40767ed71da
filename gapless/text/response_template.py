"""Compiles a checkpoint's `response_template`, as transformers 5 defines it, to tables of gapless.text.reply_tables.

A feature that a table cannot express is refused with the field's name: patterns of more than literals, white space
and named groups, content other than text, json and xml-inline, and transforms other than to a function's name and
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gapless.base.errors import CheckpointError
from gapless.text.reply_tables import Move, ReplyState, ReplyTable, think_table

_S = ReplyState
_ATOM = r"(?:\[(?:\\.|[^\]\\])+\]|\\w|\.)[*+]\??"
_PIECE = re.compile(
    rf"(?P<space>\\s[*+])|\(\?P<(?P<group>\w+)>{_ATOM}\)|\\(?P<escaped>[^\w\s])|(?P<plain>[^\\^$.|?*+()\[\]{{}}])"
)
_GROUP = "\0"
"""Marks a piece of a pattern as a group, whose name follows."""
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"type": "function", "function": "{content}"}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def compile_response_template(template: Any) -> tuple[ReplyTable | None, ReplyTable | None]:
    """Return the tables of tool calls and of reasoning; None for what the template has no field for.

    Raises CheckpointError naming the field that cannot be read.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        raise _unreadable("fields", "it must be an object")
    tools = reasoning = None
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            raise _unreadable(name, "it must be an object")
        if name == "tool_calls":
            tools = _tools(name, field)
        elif name in _REASONING_FIELDS:
            reasoning = _reasoning(name, field)
        elif name != "content" or "open" in field or "open_pattern" in field:
            raise _unreadable(name, "only content without an opening, tool_calls and " + ", ".join(_REASONING_FIELDS))
    return tools, reasoning


def _unreadable(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"response_template: field {where} cannot be used: {why}; choose a form with --tool-call-parser and "
        "--reasoning-parser instead"
    )


def _pieces(where: str, pattern: Any) -> list[str]:
    """Split a pattern into literals and marks of its groups; white space that may vary only separates."""
    if not isinstance(pattern, str):
        raise _unreadable(where, "it must be a string")
    pieces, at = [""], 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None:
            raise _unreadable(where, f"{pattern!r} has more than literals, white space and named groups")
        if found["group"]:
            pieces += [_GROUP + found["group"], ""]
        elif found["space"]:
            pieces.append("")
        else:
            pieces[-1] += found["escaped"] or found["plain"]
        at = found.end()
    return [piece for piece in pieces if piece]


def _delimiter(name: str, field: Mapping[str, Any], key: str) -> list[str]:
    """Return the pieces of a field's opening or closing."""
    if f"{key}_pattern" in field:
        return _pieces(f"{name}.{key}_pattern", field[f"{key}_pattern"])
    literal = field.get(key)
    if not isinstance(literal, str) or not literal:
        raise _unreadable(f"{name}.{key}", "it must be one string")
    return [literal]


def _reasoning(name: str, field: Mapping[str, Any]) -> ReplyTable:
    begin, end = (_delimiter(name, field, key) for key in ("open", "close"))
    if field.get("content", "text") != "text" or len(begin) != 1 or len(end) != 1:
        raise _unreadable(name, "it must be text between one opening and one closing")
    return think_table("response_template", begin[0], end[0])


def _tools(name: str, field: Mapping[str, Any]) -> ReplyTable:
    opening, closing = (_delimiter(name, field, key) for key in ("open", "close"))
    content, named = field.get("content", "text"), _GROUP + "name" in opening
    if field.get("transform") != (_NAMED if named else _WHOLE) or field.get("transform_each"):
        raise _unreadable(f"{name}.transform", "it must put a name and arguments into a function")
    body: list[Move] = []
    if content == "json" and not field.get("content_args"):
        inside = _S.ARGUMENTS if named else _S.ENVELOPE
    elif content == "xml-inline" and named:
        inside, body = _S.PARAMETERS, _parameters(name, field.get("content_args"), closing[0])
    else:
        raise _unreadable(f"{name}.content", "it must be json without arguments, or xml-inline after a name")
    path = _path(f"{name}.open_pattern", opening, {"name": _S.NAME}, (_S.CONTENT, _S.BETWEEN, inside))
    ends = [Move(inside, closing[0], _S.CONTENT), *(Move(_S.CONTENT, mark, _S.CONTENT) for mark in closing)]
    return ReplyTable("response_template", (*path, *body, *ends), after=_S.CONTENT, trims=content == "xml-inline")


def _parameters(name: str, arguments: Any, closing: str) -> list[Move]:
    where = f"{name}.content_args"
    if not isinstance(arguments, Mapping) or not arguments.keys() <= {"tag_pattern", "value_parser"}:
        raise _unreadable(where, "it must have a tag_pattern, and a value_parser at most")
    where += ".tag_pattern"
    pieces = _pieces(where, arguments.get("tag_pattern"))
    path = _path(where, pieces, {"key": _S.KEY, "value": _S.VALUE}, (_S.PARAMETERS,) * 3)
    return [*path, Move(_S.VALUE, closing, _S.CONTENT)]


def _path(
    where: str, pieces: list[str], groups: Mapping[str, ReplyState], states: tuple[ReplyState, ReplyState, ReplyState]
) -> list[Move]:
    """Return the moves along a pattern: a literal leads to the state of the group after it.

    `states` are the states before the pattern, between two literals of it, and after it.
    """
    state, between, end = states
    targets = {_GROUP + name: target for name, target in groups.items()}
    literals = [not piece.startswith(_GROUP) for piece in pieces]
    alternate = all(literals[i] or (literals[i - 1] and pieces[i] in targets) for i in range(1, len(pieces)))
    if not (pieces and literals[0] and literals[-1] and alternate):
        raise _unreadable(where, f"its groups must be {', '.join(groups)}, each between two literals")
    moves = []
    for i, piece in enumerate(pieces):
        if literals[i]:
            target = targets.get(pieces[i + 1], between) if i + 1 < len(pieces) else end
            moves.append(Move(state, piece, target))
            state = target
    return moves
