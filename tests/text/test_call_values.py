"""Values of parameters that are written as plain text: JSON of the type that the schema says, constants included."""

import json

import pytest

from gapless.text.items import Items
from gapless.text.replies import ReplyReader
from gapless.text.reply_parser import ReplyFormat
from gapless.text.reply_tables import TOOL_TABLES
from gapless.text.schemas import meaning_of

FORMS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
REST = {"$defs": {"five": {"const": "5"}, "number": {"enum": [5, 6]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
DIGITS = [
    {"const": "5"},
    {"enum": ["5", "6"]},
    {"enum": ["5", 6, None]},
    {"anyOf": [{"const": "5"}, {"const": "6"}]},
    {"oneOf": [{"const": "5"}, {"type": "null"}]},
    {"allOf": [{"const": "5"}]},
    {"allOf": [{"type": ["string", "integer"]}, {"const": "5"}]},
    {"type": ["string", "integer"], "enum": ["5", "6"]},
    {"$ref": "#/$defs/five"},
    {"anyOf": [{"anyOf": [{"$ref": "#/$defs/five"}]}, {"type": "boolean"}]},
    {"anyOf": [{"const": "5"}, {"type": "number", "minimum": 10}]},
    {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/five"}]},
]
NUMBERS = [
    {"const": 5},
    {"enum": [5, "6"]},
    {"$ref": "#/$defs/number"},
    {"anyOf": [{"const": "6"}, {"type": "integer"}]},
    {"allOf": [{"type": "number"}, {"enum": [5, "5"]}]},
    {"type": "integer", "enum": [5, 6]},
]


def read(name, schema, text, **parameters):
    parameters = parameters or {"type": "object", "properties": {"v": schema}, **REST}
    reader = ReplyReader(ReplyFormat(TOOL_TABLES[name]), {"f": parameters})
    items = Items()
    items.take(reader.feed([], FORMS[name].format(text)) + reader.finish())
    return json.loads(items.calls[0].function.arguments)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("schema", DIGITS, ids=json.dumps)
def test_a_constant_of_digits_stays_a_string(name, schema):
    assert read(name, schema, "5") == {"v": "5"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("schema", NUMBERS, ids=json.dumps)
def test_a_constant_that_is_a_number_stays_one(name, schema):
    assert read(name, schema, "5") == {"v": 5}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"const": "true"}, "true", "true"),
        ({"const": True}, "True", True),
        ({"enum": ["null", 1]}, "null", "null"),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["a", None]}, "a", "a"),
        ({"const": ""}, "", ""),
        ({"enum": ["[1]", [2]]}, "[1]", "[1]"),
        ({"enum": ["[1]", [2]]}, "[2]", [2]),
    ],
)
def test_constants_of_other_types_are_read_as_they_are(schema, text, value):
    assert read("qwen3_coder", schema, text) == {"v": value}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "additionalProperties": {"const": "5"}},
        {"type": "object", "allOf": [{"properties": {"v": {"const": "5"}}}]},
        {"anyOf": [{"properties": {"w": {"const": 5}}}, {"oneOf": [{"properties": {"v": {"enum": ["5", "6"]}}}]}]},
        {
            "properties": {"w": {}},
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}],
            "$defs": {"a": {"properties": {"v": {"const": "5"}}}},
        },
        {"$ref": "#/$defs/all", "$defs": {"all": {"type": "object", "properties": {"v": {"const": "5"}}}}},
        {"type": "object", "properties": {"v": {"$ref": "#/properties/w"}, "w": {"enum": ["5"]}}},
        {"type": "object", "properties": {"v": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": {"const": "5"}}},
        {"type": "object", "properties": {"v": {"$ref": "#/x/0"}}, "x": [{"const": "5"}]},
    ],
)
def test_the_schema_of_a_parameter_is_found_where_it_may_stand(parameters):
    assert read("qwen3_coder", None, "5", **parameters) == {"v": "5"}


def test_types_of_a_schema_that_refers_to_itself_many_times_are_found_at_once():
    """Following every reference as often as it stands would take hours."""
    knot = {"anyOf": [{"$ref": "#/$defs/knot"}] * 600 + [{"type": "string"}]}
    schema = {"$ref": "#/$defs/knot", "$defs": {"knot": knot}}
    assert meaning_of(schema, schema).types == {"string"}


def test_references_that_go_round_or_deep_say_what_they_can():
    assert meaning_of({"$ref": "#"}, {"$ref": "#"}).types == frozenset()
    deep = {"type": "string"}
    for _ in range(900):
        deep = {"allOf": [deep]}
    assert meaning_of(deep, deep).types == frozenset()
    wide = {"anyOf": [{"$ref": "#/$defs/a"}] * 50, "$defs": {"a": {"anyOf": [{"type": "string"}] * 50}}}
    assert meaning_of(wide, wide).types == {"string"}
