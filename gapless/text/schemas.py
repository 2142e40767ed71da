"""Bounds of a value by a JSON schema: its types and its constants. The schema is a caller's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_PARTS = 1_000
"""Parts of a schema that are looked at for one value."""
MAX_MEANING_DEPTH = 50
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_FEW: Mapping[str, list[Any]] = {"null": [None], "boolean": [False, True]}
"""Types of few values"""


class Meaning(NamedTuple):
    """A schema's bounds of a value."""

    types: frozenset[str]
    """Allowed JSON types; empty when the schema leaves them open"""
    constants: Sequence[Any] = ()
    """Constants that it may be"""
    finite: bool = False
    """Whether it can be nothing else than one of these constants"""


UNBOUND = Meaning(frozenset())


def type_of(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def meaning_of(schema: Any, root: Any) -> Meaning:
    """Return a schema's bounds. `root` holds its definitions."""
    return _MeaningReader(root).of(schema)


def definition(reference: str, root: Any) -> Any:
    """Return the part of `root` that a reference names; None when there is none."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    for name in unquote(reference[2:]).split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal():
            root = root[int(name)] if int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def resolved(schema: Mapping[str, Any], root: Any) -> Mapping[str, Any]:
    """Return the definition that a schema refers to, or itself; other keywords beside the reference are kept."""
    for _ in range(8):
        if not isinstance(schema.get("$ref"), str):
            break
        found = definition(schema["$ref"], root)
        if not isinstance(found, Mapping):
            break
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def property_of(key: str, root: Any) -> Any:
    """Return the schema of a property of objects of this schema, which may stand in a part of it; None without one."""
    left, found = [root], []
    for part in left:  # it grows meanwhile
        part = resolved(part, root) if isinstance(part, Mapping) else {}
        properties = part.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        elif len(left) < MAX_PARTS:
            left += [one for name in ("allOf", "anyOf", "oneOf") for one in _list(part, name)]
    more = resolved(root, root).get("additionalProperties") if isinstance(root, Mapping) else None
    return {"anyOf": found} if found else more


class _MeaningReader:
    """Reads MAX_PARTS parts at most, and no reference inside itself."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_PARTS
        self._inside: list[str] = []

    def of(self, schema: Any, depth: int = 0) -> Meaning:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or depth > MAX_MEANING_DEPTH:
            return UNBOUND
        every = [_stated(schema.get("type")), self._referred(schema, depth)]
        every += [self.of(part, depth + 1) for part in _list(schema, "allOf")]
        if "const" in schema:
            every.append(_among([schema["const"]]))
        if isinstance(schema.get("enum"), list):
            every.append(_among(schema["enum"]))
        for parts in filter(None, (_list(schema, "anyOf"), _list(schema, "oneOf"))):
            every.append(_any([self.of(part, depth + 1) for part in parts]))
        return _all([one for one in every if one is not UNBOUND])

    def _referred(self, schema: Mapping[str, Any], depth: int) -> Meaning:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in self._inside:
            return UNBOUND
        self._inside.append(reference)
        found = self.of(definition(reference, self._root), depth + 1)
        self._inside.pop()
        return found


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _stated(types: Any) -> Meaning:
    listed = types if isinstance(types, list) else [types]
    named = [one for one in listed if isinstance(one, str)]
    if not named:
        return UNBOUND
    few = [value for one in named for value in _FEW.get(one, ())]
    return Meaning(frozenset(named), few, all(one in _FEW for one in named))


def _among(values: Sequence[Any]) -> Meaning:
    return Meaning(frozenset(map(type_of, values)), values, True)


def _any(parts: Sequence[Meaning]) -> Meaning:
    """Return the bounds if one of these holds; parts without any do not count."""
    types = frozenset[str]().union(*(one.types for one in parts))
    return Meaning(types, [value for one in parts for value in one.constants], all(one.finite for one in parts))


def _all(parts: Sequence[Meaning]) -> Meaning:
    """Return the bounds if all of these hold."""
    if not parts:
        return UNBOUND
    types = parts[0].types
    for one in parts[1:]:
        types = _both(types, one.types) if types and one.types else types | one.types
    finite = [one.constants for one in parts if one.finite] or [[value for one in parts for value in one.constants]]
    others = [{json.dumps(value) for value in values} for values in finite[1:]]
    values = [value for value in finite[0] if all(json.dumps(value) in other for other in others)]
    return Meaning(types, [value for value in values if _fits(value, types)], any(one.finite for one in parts))


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Return the types that are among both; whole numbers are numbers. Of types that exclude each other, `one`."""
    whole = {"integer"} if any("integer" in a and "number" in b for a, b in ((one, other), (other, one))) else set()
    return frozenset((one & other) | whole) or one


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    whole = kind == "number" and float(value).is_integer() and "integer" in types
    return kind in types or (kind == "integer" and "number" in types) or whole or not types
