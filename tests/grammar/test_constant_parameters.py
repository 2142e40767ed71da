"""Parameters that are one of some constants, in the forms of calls that write each by itself: written and read back."""

import json

import jsonschema
import pytest
from sharpest import sharpest
from test_call_grammar import NAMES, Drawn, forms_of, marks_of, speaker

from gapless.text.reply_tables import TOOL_TABLES
from gapless.text.tools import check_tools

FORMS = [name for name, table in TOOL_TABLES.items() if table.form.parameter]
PROPERTIES = {
    "a": {"const": "5"},
    "b": {"anyOf": [{"const": "5"}, {"const": "true"}]},
    "c": {"enum": ["5", 6, None, True]},
    "d": {"$ref": "#/$defs/kind"},
    "e": {"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}], "default": None},
    "f": {"type": "string", "enum": ["a", "long"], "maxLength": 2, "description": "x", "x-order": 1},
    "g": {"type": "string", "contentMediaType": "text/plain", "minimum": 4, "maxLength": 3},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "minProperties": 0,
    "propertyNames": {"type": "string"},
    "$defs": {"kind": {"oneOf": [{"const": "1"}, {"const": "x"}]}},
}


def tool(schema):
    return [{"type": "function", "function": {"name": "now", "parameters": schema}}]


@pytest.mark.parametrize("name", sharpest(FORMS, keep=2))
def test_constants_are_written_and_read_back_as_what_they_are(name):
    voice, seen = speaker(marks_of(name)), set()
    for seed in range(15):
        drawn = Drawn(voice, forms_of(voice, name), seed, tools=tool(SCHEMA), parallel=False)
        arguments = json.loads(drawn.arguments[0])
        if not TOOL_TABLES[name].form.parameter.python:
            assert len(arguments["f"]) <= 2
        jsonschema.Draft202012Validator(SCHEMA).validate(arguments)
        seen.update((key, json.dumps(value)) for key, value in arguments.items())
    assert {("a", '"5"'), ("d", '"1"'), ("d", '"x"'), ("e", "null"), ("c", "6")} <= seen


@pytest.mark.parametrize("name", FORMS)
def test_a_schema_that_is_a_reference_is_that_of_the_parameters(name):
    voice = speaker(marks_of(name))
    schema = {
        "$ref": "#/$defs/all",
        "$defs": {"all": {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}},
    }
    drawn = Drawn(voice, forms_of(voice, name), 1, tools=tool(schema), parallel=False)
    assert json.loads(drawn.arguments[0]) == {"a": 7}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [{}, {"parameters": None}, {"parameters": None, "strict": True}, {"strict": True}])
def test_a_function_without_parameters_takes_none(name, extra):
    voice = speaker(marks_of(name))
    tools = [{"type": "function", "function": {"name": "now", "description": None, **extra}}]
    use = check_tools(tools, "required", False)
    assert use.tools[0]["function"].keys() == {"name", "strict"} - ({"strict"} - extra.keys())
    for seed in range(4):
        (arguments,) = Drawn(voice, forms_of(voice, name), seed, tools=tools, parallel=False).arguments
        assert json.loads(arguments) == {}


def test_empty_parameters_may_be_any_object():
    voice, found = speaker(marks_of("hermes")), set()
    for parameters in ({}, {"type": "object"}, {"type": None}, {"type": ["object", "null"]}, {"properties": None}):
        for seed in range(8):
            drawn = Drawn(voice, forms_of(voice, "hermes"), seed, tools=tool(parameters), parallel=False)
            found.add(drawn.arguments[0])
            assert isinstance(json.loads(drawn.arguments[0]), dict)
    assert found > {"{}"}
