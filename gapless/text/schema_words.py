"""Keywords of JSON schemas: idle ones are left out, and anything that cannot be one is refused by its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gapless.text.schemas import definition, meaning_of

MAX_SCHEMA_DEPTH = 127
"""Levels of a schema; the library that makes grammars takes no more."""
MAX_PASSES = 16
"""Rounds over all references that look for values which end."""
Schema = Mapping[str, Any]


class Word(NamedTuple):
    """The shape of a keyword's value, and the type that it bounds: it leaves other types free."""

    shape: str
    about: str = ""


def _words(shape: str, about: str, *names: str) -> dict[str, Word]:
    return {name: Word(shape, about) for name in names}


KEYWORDS: Mapping[str, Word] = {
    "type": Word("types"), "const": Word("any"), "enum": Word("list"), "items": Word("items", "array"),
    "dependencies": Word("object", "object"), "dependentRequired": Word("object", "object"),
    "format": Word("text", "string"), "pattern": Word("pattern", "string"), "required": Word("texts", "object"),
    "uniqueItems": Word("flag", "array"), "patternProperties": Word("patterns", "object"),
    **_words("schema", "", "not", "if", "then", "else"),
    **_words("schemas", "", "allOf", "anyOf", "oneOf"),
    **_words("text", "", "$ref", "$dynamicRef", "$recursiveRef"),
    **_words("named", "", "$defs", "definitions"),
    **_words("named", "object", "properties", "dependentSchemas"),
    **_words("schema", "object", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    **_words("schema", "array", "additionalItems", "contains", "unevaluatedItems"),
    **_words("schemas", "array", "prefixItems"),
    **_words("count", "object", "minProperties", "maxProperties"),
    **_words("count", "array", "minItems", "maxItems", "minContains", "maxContains"),
    **_words("count", "string", "minLength", "maxLength"),
    **_words("number", "number", "minimum", "maximum", "multipleOf"),
    **_words("limit", "number", "exclusiveMinimum", "exclusiveMaximum"),
}  # fmt: skip
"""The keywords that bound a value, and the keywords that hold schemas; all others are notes."""
_FREE = Word("any")
_NULLABLE = {"const", "default", "type"}
"""Keywords for which null is a value; of a type, one that cannot be guessed"""
_APART = {"$schema", "$dynamicAnchor", "$recursiveAnchor"}
"""Notes that the library that makes grammars does not take, or not with every value"""
_DRAFTS = ("http://json-schema.org/draft", "https://json-schema.org/draft")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_regex(value: Any) -> bool:
    # The library takes a backslash at the end, and drops it.
    return isinstance(value, str) and (len(value) - len(value.rstrip("\\"))) % 2 == 0


_ANY: tuple[Callable[[Any], bool], str] = (lambda value: True, "")
_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "types": (lambda value: isinstance(value, str) or _are_texts(value), "the name of a type, or a list of them"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "schemas": (lambda value: isinstance(value, list), "a list of schemas"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
    "named": (lambda value: isinstance(value, Mapping), "an object of schemas"),
    "patterns": (
        lambda value: isinstance(value, Mapping) and all(map(_is_regex, value)),
        "an object of schemas by regular expressions, none of which ends in a single backslash",
    ),
    "text": (lambda value: isinstance(value, str), "a string"),
    "texts": (_are_texts, "a list of strings"),
    "pattern": (_is_regex, "a regular expression, which does not end in a single backslash"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "count": (lambda value: _is_number(value) and value >= 0 and value == value // 1, "a whole number, 0 or more"),
    "number": (_is_number, "a number"),
    "limit": (lambda value: isinstance(value, int | float), "a number"),
}


def without_nulls(schema: Any, depth: int = 0) -> Any:
    """Return a schema without keywords that an encoder wrote as null: these are absent."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return schema
    given = {key: value for key, value in schema.items() if value is not None or key in _NULLABLE}
    return _mapped(given, lambda _, part: without_nulls(part, depth + 1))


def plain_schema(schema: Schema) -> dict[str, Any]:
    """Return an equal schema without idle keywords. Raises ValueError naming the place of what is
    no schema, and for one that no value satisfies because none ends."""
    reader = _PlainReader(schema)
    plain = reader.plain(schema, "", 0)
    if not isinstance(plain, dict):
        raise ValueError('it allows no value: "not" excludes all')
    if reader.refers and (endless := _endless(plain)):
        raise ValueError(f"no value of it ends: one of {endless!r} needs another one; allow null or fewer properties")
    return plain


def _mapped(schema: Schema, change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the schema with each part changed, which `change` gets beside its place."""
    changed = dict(schema)
    for key, value in schema.items():
        shape = KEYWORDS.get(key, _FREE).shape
        if isinstance(value, list) and shape in ("schemas", "items"):
            changed[key] = [change(f"{key}[{i}]", part) for i, part in enumerate(value)]
        elif shape in ("schema", "items"):
            changed[key] = change(key, value)
        elif shape in ("named", "patterns") and isinstance(value, Mapping):
            changed[key] = {name: change(f"{key}.{name}", part) for name, part in value.items()}
    return changed


class _PlainReader:
    """Reads a schema, part by part."""

    refers = False
    """Whether it has references"""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, bool] = {}
        """Whether a reference allows every name"""

    def plain(self, schema: Any, where: str, depth: int) -> Any:
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"recursion limit exceeded: it nests more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where[:-1][:200] or 'it'} must be a schema: an object, true or false")
        about = _about(schema.get("type"))
        told = {key: value for key, value in schema.items() if _tells(key, value, about)}
        for key, value in told.items():
            fits, shape = _SHAPES.get(KEYWORDS.get(key, _FREE).shape, _ANY)
            if not fits(value):
                raise ValueError(f"{where[:200]}{key} must be {shape}")
        self.refers |= "$ref" in told
        told = _mapped(told, lambda key, part: self.plain(part, f"{where}{key}.", depth + 1))
        if "not" in told and _is_free(told["not"]):
            return False
        return {key: _whole(key, value) for key, value in told.items() if not self._says_nothing(key, told)}

    def _says_nothing(self, key: str, told: Schema) -> bool:
        value = told[key]
        if key == "propertyNames" and isinstance(value, Mapping) and "$ref" in value:
            rest, reference = {name: part for name, part in value.items() if name != "$ref"}, value["$ref"]
            if reference not in self._names:
                self._names[reference] = _allows_names(definition(reference, self._root))
            return self._names[reference] and _allows_names(rest)
        return _says_nothing(key, told)


def _about(types: Any) -> tuple[str, ...]:
    """Return the types that a schema states; none where it does not."""
    stated = (types,) if isinstance(types, str) else tuple(types) if _are_texts(types) else ()
    return (*stated, "number") if "integer" in stated else stated


def _tells(key: str, value: Any, about: tuple[str, ...]) -> bool:
    """Return whether a keyword bounds values of these types."""
    if value is None and key not in _NULLABLE:
        return False
    word = KEYWORDS.get(key)
    if word is None:
        return key not in _APART or (key == "$schema" and str(value).startswith(_DRAFTS))
    return not word.about or not about or word.about in about


def _whole(key: str, value: Any) -> Any:
    return int(value) if KEYWORDS.get(key, _FREE).shape == "count" else value


def _is_free(schema: Any) -> bool:
    """Return whether a schema allows everything."""
    return schema is True or (
        isinstance(schema, Mapping) and not schema.keys() & KEYWORDS.keys() - {"$defs", "definitions"}
    )


def _says_nothing(key: str, schema: Schema) -> bool:
    value = schema[key]
    match key:
        case "minLength" | "minItems" | "minProperties":
            return not value
        case "uniqueItems":
            return not value or schema.get("maxItems", 2) < 2
        case "not":
            return value is False
        case "propertyNames":
            return _allows_names(value)
        case "unevaluatedProperties" | "unevaluatedItems":
            return _is_free(value)
        case "additionalItems":
            return _is_free(value) or not isinstance(schema.get("items"), list)
        case "contains" | "minContains" | "maxContains":
            free = schema.get("minContains", 1) == 0 and "maxContains" not in schema
            return free or "contains" not in schema
        case "if" | "then" | "else":
            return "if" not in schema or all(_is_free(schema.get(branch, True)) for branch in ("then", "else"))
        case "allOf" | "patternProperties" | "dependentSchemas" | "dependentRequired" | "dependencies":
            parts = value.values() if isinstance(value, Mapping) else value
            return all(part == [] or _is_free(part) for part in parts)
    return False


def _allows_names(schema: Any) -> bool:
    """Return whether every name is one of these. References are not followed."""
    if _is_free(schema) or not isinstance(schema, Mapping):
        return _is_free(schema)
    return all(
        (key == "type" and "string" in (value if isinstance(value, list) else [value]))
        or (key == "pattern" and value in ("", ".*", "^.*"))
        or (key == "minLength" and not value)
        or (key == "allOf" and isinstance(value, list) and all(map(_allows_names, value)))
        or (key == "anyOf" and isinstance(value, list) and any(map(_allows_names, value)))
        for key, value in schema.items()
        if key in KEYWORDS and key not in ("$defs", "definitions")
    )


# Schemas whose values never end.


def _endless(root: Schema) -> str:
    """Return a reference that every value has to follow for ever; empty where a value ends, or it is not clear."""
    references = _references(root)
    ended: set[str] = set()
    for _ in range(MAX_PASSES):
        new = {ref for ref, part in references.items() if ref not in ended and _ends(part, ended)}
        if not new:
            return "" if _ends(root, ended) else next((ref for ref in references if ref not in ended), "")
        ended |= new
    return ""


def _references(root: Schema) -> dict[str, Any]:
    """Return the parts that are referred to, by reference, the last ones first; None for an unknown part."""
    parts: list[Any] = [root]
    for part in parts:  # it grows meanwhile
        if isinstance(part, Mapping):
            _mapped(part, lambda _, inner: parts.append(inner))
    known = set(map(id, parts))
    found: dict[str, Any] = {}
    for part in reversed(parts):
        if isinstance(part, Mapping) and isinstance(reference := part.get("$ref"), str):
            target = definition(reference, root)
            found[reference] = target if id(target) in known else None
    return found


def _ends(schema: Any, ended: set[str]) -> bool:
    """Return whether a value may end, if values of the references `ended` do."""
    if not isinstance(schema, Mapping):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in ended:
        return False
    if not all(_ends(part, ended) for part in schema.get("allOf", ())):
        return False
    if not all(any(_ends(part, ended) for part in schema[key]) for key in ("anyOf", "oneOf") if schema.get(key)):
        return False
    if "enum" in schema or "const" in schema:
        return bool(meaning_of({key: schema[key] for key in ("type", "enum", "const") if key in schema}, {}).constants)
    types = schema.get("type", "null")
    kinds, schema = [types] if isinstance(types, str) else types or ["null"], _joined(schema)
    return any(_type_ends(kind, schema, ended) for kind in kinds)


def _joined(schema: Schema) -> Schema:
    """Return a schema of objects together with the properties of the schemas that have to hold as well."""
    parts = [part for part in (schema, *schema.get("allOf", ())) if isinstance(part, Mapping)]
    if len(parts) == 1:
        return schema
    properties = {name: value for part in reversed(parts) for name, value in part.get("properties", {}).items()}
    return {**schema, "properties": properties, "required": [n for part in parts for n in part.get("required", ())]}


def _type_ends(kind: str, schema: Schema, ended: set[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties", {})
        others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
        other = any(_ends(part, ended) for part in others)
        if not all(_ends(properties.get(name, other), ended) for name in schema.get("required", ())):
            return False
        return other or schema.get("minProperties", 0) <= sum(_ends(part, ended) for part in properties.values())
    if kind == "array":
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        first, rest = (items, True) if isinstance(items, list) else (first, items)
        count = schema.get("minItems", 0)
        return all(_ends(part, ended) for part in [*first[:count], *[rest] * (count > len(first))])
    return True
