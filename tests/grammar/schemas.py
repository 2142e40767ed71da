"""Random JSON schemas of the kinds that applications send, and a few by hand."""

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ["id", "name", "größe", "a b", "items", 'q"uote', "x1", "$ref_", "value"]
TEXTS = ["red", "green", 'say "hi"', "tab\there", "日本", "", "back\\slash", "a/b"]
FORMATS = ["date", "ipv4", "ipv6", "email", "uuid"]
PATTERNS = ["^[a-z]{2,6}$", "^(foo|bar)+$", r"^\d{3}-\d{4}$", "[0-9]", "^a.{0,9}z$"]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema that nests `depth` levels at most."""
    flat = [_string, _string, _integer, _number, _boolean, _null, _enum, _const]
    deep = [_object, _object, _array, _array, _any_of, _all_of, _tuple, _reference]
    return rng.choice(deep + flat if depth else flat)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 5)
    kinds: list[Schema] = [
        {},
        {"minLength": low, "maxLength": low + rng.randint(0, 8)},
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(FORMATS)},
        {"pattern": "^[a-f]*$", "maxLength": 7},
    ]
    return {"type": "string", **rng.choice(kinds)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1_000, 1_000)
    kinds: list[Schema] = [
        {},
        {"minimum": low, "maximum": low + rng.randint(0, 300)},
        {"exclusiveMinimum": low},
        {"multipleOf": rng.choice([2, 5, 10])},
    ]
    return {"type": "integer", **rng.choice(kinds)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50) / 4
    return {"type": "number", **rng.choice([{}, {"minimum": low, "maximum": low + 2.5}, {"exclusiveMaximum": low}])}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> Schema:
    return {"type": ["null", "integer"]} if rng.random() < 0.5 else {"type": "null"}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample([*TEXTS, 1, -2.5, None, True, [1, "x"], {"k": "v"}], rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([*TEXTS, 0, None, ["a"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: random_schema(rng, max(depth, 0)) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    more = rng.choice([None, False, False, {"type": "integer"}, True])
    if more is not None:
        schema["additionalProperties"] = more
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^p_[a-z]$": {"type": "boolean"}}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    bounds = rng.choice([{}, {"minItems": low}, {"maxItems": low + 2}, {"minItems": low, "maxItems": low + 1}])
    return {"type": "array", "items": random_schema(rng, max(depth, 0)), **bounds}


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [random_schema(rng, 0) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, max(depth, 0)) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    parts = [{"type": "object", "properties": {name: random_schema(rng, 0)}, "required": [name]} for name in ("a", "b")]
    return {"allOf": parts}


def _reference(rng: random.Random, depth: int) -> Schema:
    node = {"type": "object", "properties": {"v": random_schema(rng, 0), "next": {"anyOf": [{"$ref": "#/$defs/node"}]}}}
    node |= {"required": ["v"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def as_root(schema: Schema) -> Schema:
    """Lift the definitions of a nested schema to where their references point."""
    found: Schema = {}

    def lift(part: Any) -> Any:
        if isinstance(part, list):
            return [lift(one) for one in part]
        if not isinstance(part, dict) or "enum" in part or "const" in part:
            return part
        if "$defs" in part:
            name = f"node{len(found)}"
            found[name] = None
            found[name] = _renamed(part["$defs"]["node"], name)
            return {"$ref": f"#/$defs/{name}"}
        return {key: lift(value) for key, value in part.items()}

    lifted = lift(schema)
    return {**lifted, "$defs": found} if found else lifted


def _renamed(node: Schema, name: str) -> Schema:
    following = {"anyOf": [{"$ref": f"#/$defs/{name}"}]}
    return {**node, "properties": {**node["properties"], "next": following}}
