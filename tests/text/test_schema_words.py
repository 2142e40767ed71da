"""Schemas without what says nothing: they mean the same, and what is no schema is refused by its place."""

import json
import re

import jsonschema
import pytest

from gapless.text.schema_words import plain_schema, without_nulls

VALUES = [
    None, True, 0, 5, 2.5, "", "a", "longer text", [], [1], [1, 1], ["a", 1], {}, {"a": 1}, {"a": "x"},
    {"a": 1, "b": {}}, {"b": [1, 2, 3]}, {"A": True},
]  # fmt: skip
OBJECT = {"type": "object"}
SPARE = [
    ({**OBJECT, "propertyNames": {"type": "string"}}, OBJECT),
    ({**OBJECT, "propertyNames": {"type": ["string", "null"], "description": "a name"}}, OBJECT),
    ({**OBJECT, "propertyNames": True}, OBJECT),
    ({**OBJECT, "propertyNames": {"minLength": 0}}, OBJECT),
    ({**OBJECT, "propertyNames": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "string"}]}}, OBJECT),
    ({**OBJECT, "propertyNames": {"allOf": [{"type": "string"}, {"pattern": ".*"}], "pattern": ""}}, OBJECT),
    (
        {**OBJECT, "propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"type": "string", "minLength": 0}}},
        {**OBJECT, "$defs": {"name": {"type": "string"}}},
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"not": False, "type": "string"}, {"type": "string"}),
    ({"not": {"not": {}}, "type": "string"}, {"type": "string"}),
    ({"type": "array", "uniqueItems": False, "minItems": 0}, {"type": "array"}),
    ({"type": "array", "contains": {"type": "integer"}, "minContains": 0}, {"type": "array"}),
    ({"type": "array", "minContains": 2, "maxContains": 3}, {"type": "array"}),
    ({"type": "array", "additionalItems": False, "unevaluatedItems": True}, {"type": "array"}),
    ({"if": {"type": "string"}}, {}),
    ({"then": False, "else": {"type": "string"}}, {}),
    ({"if": {"type": "string"}, "then": {}, "else": True}, {}),
    ({**OBJECT, "minProperties": 0, "patternProperties": {}, "unevaluatedProperties": {}}, OBJECT),
    ({**OBJECT, "patternProperties": {"^a": True}}, OBJECT),
    ({**OBJECT, "dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}, "dependencies": {}}, OBJECT),
    ({"allOf": [{}, True, {"title": "x"}]}, {}),
    ({"type": "string", "minimum": 5, "uniqueItems": True, "required": True}, {"type": "string"}),
    ({"type": "integer", "pattern": "a", "format": "date", "minimum": 1}, {"type": "integer", "minimum": 1}),
    ({"type": ["integer", "array"], "maxLength": 1, "minItems": 1.0}, {"type": ["integer", "array"], "minItems": 1}),
    ({**OBJECT, "properties": {"a": {"not": {}}}}, {**OBJECT, "properties": {"a": False}}),
    ({"$schema": "https://example.com/dialect", "type": "null"}, {"type": "null"}),
    ({**OBJECT, "properties": {"required": {"minLength": 0}}}, {**OBJECT, "properties": {"required": {}}}),
]


@pytest.mark.parametrize(("schema", "plain"), SPARE, ids=str)
def test_keywords_that_say_nothing_are_left_out_and_the_meaning_stays(schema, plain):
    assert plain_schema(schema) == plain
    required = {key: value for key, value in schema.items() if (key, value) != ("required", True)}
    before, after = (jsonschema.Draft202012Validator(one) for one in ({**required, "$schema": None}, plain))
    assert [before.is_valid(value) for value in VALUES] == [after.is_valid(value) for value in VALUES]


KEPT = [
    {"type": "array", "uniqueItems": True},
    {**OBJECT, "propertyNames": {"pattern": "^a"}},
    {**OBJECT, "propertyNames": {"enum": ["a"]}},
    {**OBJECT, "propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"$ref": "#/$defs/name"}}},
    {**OBJECT, "propertyNames": {"anyOf": [{"maxLength": 3}, {"pattern": "^a"}]}},
    {**OBJECT, "propertyNames": {"type": "integer"}},
    {"type": "array", "contains": {}},
    {"type": "array", "contains": {}, "minContains": 0, "maxContains": 1},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
    {**OBJECT, "unevaluatedProperties": False},
    {**OBJECT, "dependentRequired": {"a": ["b"]}},
    {"not": {"type": "null"}},
    {"type": "string", "format": "colour"},
    {"const": None, "default": None, "x-note": 1, "description": "x"},
    {"type": "number", "exclusiveMinimum": True, "minimum": 3},
    {"enum": [None, {"required": None}]},
]


@pytest.mark.parametrize("schema", KEPT, ids=str)
def test_keywords_that_say_something_stay_as_they_are(schema):
    assert plain_schema(schema) == schema


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({**OBJECT, "required": None, "properties": None, "additionalProperties": None}, OBJECT),
        ({"type": "array", "items": None, "prefixItems": None, "minItems": None}, {"type": "array"}),
        ({"enum": None, "anyOf": None, "$ref": None, "not": None, "$defs": None, "description": None}, {}),
        ({"anyOf": [{"pattern": None}, {"maximum": None}]}, {"anyOf": [{}, {}]}),
        ({**OBJECT, "properties": {"a": {"enum": None}}}, {**OBJECT, "properties": {"a": {}}}),
        ({**OBJECT, "properties": {"properties": None}}, {**OBJECT, "properties": {"properties": None}}),
        ({"const": None, "default": None, "examples": [None]}, {"const": None, "default": None, "examples": [None]}),
    ],
)
def test_a_keyword_that_is_null_is_absent_where_null_is_no_value(schema, plain):
    assert without_nulls(schema) == plain


TREE = {**OBJECT, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
PAIR = {
    "a": {**OBJECT, "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
    "b": {**OBJECT, "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TREE, "no value of it ends: one of '#'"),
        ({"anyOf": [TREE, TREE]}, "no value of it ends"),
        ({**TREE, "properties": {"n": {"anyOf": [{"$ref": "#"}, {"enum": []}]}}}, "no value of it ends"),
        ({**TREE, "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "string", "enum": [1]}]}}}, "no value of it"),
        ({"$defs": PAIR, "$ref": "#/$defs/a"}, "no value of it ends: one of '#/$defs/"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no value of it ends"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "no value of it ends"),
        ({"allOf": [{"$ref": "#"}]}, "no value of it ends"),
        ({"anyOf": [{"$ref": "#"}, {"oneOf": [{"$ref": "#"}]}]}, "no value of it ends"),
        ({**OBJECT, "additionalProperties": {"$ref": "#"}, "required": ["x"]}, "no value of it ends"),
        ({**OBJECT, "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "no value of it ends"),
        (
            {**OBJECT, "patternProperties": {"^a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False},
            "no value of it ends",
        ),
        ({**TREE, "required": [], "minProperties": 1, "additionalProperties": False}, "no value of it ends"),
        ({**TREE, "required": [], "allOf": [{"required": ["n"]}]}, "no value of it ends"),
        ({**OBJECT, "required": ["n"], "allOf": [{"properties": {"n": {"$ref": "#"}}}]}, "no value of it ends"),
        ({"type": "string", "pattern": "a\\"}, "pattern must be a regular expression, which does not end in a single"),
        ({"pattern": "\\\\\\"}, "pattern must be"),
        ({**OBJECT, "patternProperties": {"^a\\": {}}}, "patternProperties must be"),
        ({**OBJECT, "properties": {"a": 5}}, "properties.a must be a schema: an object, true or false"),
        ({**OBJECT, "properties": {"a": None}}, "properties.a must be a schema"),
        ({**OBJECT, "properties": {"a": {"items": "string"}}}, "properties.a.items must be a schema"),
        ({"anyOf": [{}, ["x"]]}, "anyOf[1] must be a schema"),
        ({"$defs": {"x": 1}}, "$defs.x must be a schema"),
        ({**OBJECT, "propertyNames": {"$ref": "#/x/0"}, "x": [{"type": 5}], "$defs": 1}, "$defs must be an object"),
        ({**OBJECT, "required": "a"}, "required must be a list of strings"),
        ({**OBJECT, "required": [1]}, "required must be a list of strings"),
        ({"type": None}, "type must be the name of a type"),
        ({"type": ["string", None]}, "type must be the name of a type"),
        ({"enum": "a"}, "enum must be a list"),
        ({"type": "string", "minLength": -1}, "minLength must be a whole number"),
        ({"type": "string", "maxLength": 1.5}, "maxLength must be a whole number"),
        ({"type": "number", "minimum": "1"}, "minimum must be a number"),
        ({"uniqueItems": 1}, "uniqueItems must be true or false"),
        ({"not": {}}, "it allows no value"),
        (json.loads('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
    ],
)
def test_a_schema_that_is_none_or_ends_in_no_value_is_refused_by_its_place(schema, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        plain_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "properties": {"n": {"$ref": "#"}}},
        {**TREE, "required": ["m"], "minProperties": 2},
        {**TREE, "required": [], "properties": {"n": {"$ref": "#"}, "m": {}}, "minProperties": 1},
        {**OBJECT, "allOf": [{"properties": {"n": {"$ref": "#"}}}, {"required": ["m"]}]},
        {**TREE, "type": ["object", "null"]},
        {**TREE, "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "integer", "const": 1.0}]}}},
        {"properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {**OBJECT, "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {**PAIR, "a": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/d"}, "d": {}}},
        {"$ref": "https://example.com/other"},
        {**OBJECT, "properties": {"n": {"$ref": "#/x/y"}}, "required": ["n"], "x": {"y": {"allOf": 5}}},
        {"enum": [{"n": 1}], "properties": {"n": {"$ref": "#"}}, "required": ["n"], **OBJECT},
    ],
)
def test_a_schema_that_refers_to_itself_and_ends_is_taken(schema):
    assert plain_schema(schema) == schema


def test_chains_of_thousands_of_references_are_looked_at_in_little_time():
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(3_000)}
    assert plain_schema({"$defs": {**chain, "n3000": {}}, "$ref": "#/$defs/n0"})
