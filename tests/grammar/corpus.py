"""Schemas in the style of those that applications and libraries send."""

from typing import Any

Schema = dict[str, Any]
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def record(required: list[str] | None = None, **properties: Schema) -> Schema:
    """An object of these properties and no others, as strict mode wants it."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


CORPUS: dict[str, Schema] = {
    "calendar event": record(name=TEXT, date={"type": "string", "format": "date"}, participants=array(TEXT)),
    "maths steps": record(steps=array(record(explanation=TEXT, output=TEXT), minItems=1, maxItems=4), answer=TEXT),
    "sentiment": record(
        label={"type": "string", "enum": ["positive", "neutral", "negative"]},
        score={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "pydantic optional": {
        "title": "User",
        "type": "object",
        "properties": {
            "id": {"title": "Id", "type": "integer"},
            "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}], "default": None},
            "tags": {"items": {"type": "string"}, "title": "Tags", "type": "array", "maxItems": 3},
        },
        "required": ["id"],
    },
    "pydantic references": {
        "$defs": {
            "Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"},
            "Part": record(colour={"$ref": "#/$defs/Colour"}, count={"type": "integer", "minimum": 0}),
        },
        **record(parts=array({"$ref": "#/$defs/Part"}, maxItems=3), main={"$ref": "#/$defs/Part"}),
    },
    "recursive tree": {
        "$defs": {"node": record(["value"], value=TEXT, children=array({"$ref": "#/$defs/node"}, maxItems=2))},
        "$ref": "#/$defs/node",
    },
    "tool call": record(
        name={"const": "get_weather"},
        arguments=record(["city"], city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, days={**WHOLE, "maximum": 14}),
    ),
    "tagged union": {
        "anyOf": [
            record(kind={"const": "circle"}, radius={"type": "number", "exclusiveMinimum": 0}),
            record(kind={"const": "square"}, side={"type": "number", "minimum": 1}),
        ]
    },
    "disjoint oneOf": {"oneOf": [record(a=WHOLE), record(b=TEXT), {"type": "null"}]},
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{6}$"},
        issued={"type": "string", "format": "date"},
        lines=array(
            record(text={**TEXT, "maxLength": 40}, cents={**WHOLE, "minimum": 0}, tax={"enum": [0, 7, 19]}),
            minItems=1,
            maxItems=3,
        ),
        paid={"type": "boolean"},
    ),
    "geo point": array({"type": "number", "minimum": -180, "maximum": 180}, minItems=2, maxItems=2),
    "free map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    "named keys": {
        "type": "object",
        "patternProperties": {"^x-[a-z]+$": TEXT},
        "properties": {"version": {"const": "1.0"}},
        "required": ["version"],
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2},
    "identifiers": record(id={"type": "string", "format": "uuid"}, at={"type": "string", "format": "date-time"}),
    "allOf merge": {"allOf": [{"properties": {"a": WHOLE}, "required": ["a"]}, {"properties": {"b": TEXT}}]},
    "anything": {},
    "wide": record([], **{f"field{number}": WHOLE for number in range(60)}),
    "long text": record(essay={**TEXT, "minLength": 50, "maxLength": 400}),
}
