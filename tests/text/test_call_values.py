"""Types of the values that a call's arguments may have."""

from gapless.text.call_values import schema_types


def test_types_of_a_schema_that_refers_to_itself_many_times_are_found_at_once():
    """Following every reference as often as it stands would take hours."""
    knot = {"anyOf": [{"$ref": "#/$defs/knot"}] * 600 + [{"type": "string"}]}
    schema = {"$ref": "#/$defs/knot", "$defs": {"knot": knot}}
    assert schema_types(schema, schema) == {"string"}
