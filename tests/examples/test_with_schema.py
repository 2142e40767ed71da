"""The demo model with schemas: every answer is valid, and no fewer are right."""

import pytest

from examples.demo_model.with_schema import is_valid, report, schema_of


@pytest.mark.seeds
def test_with_a_schema_every_answer_of_the_demo_model_is_valid(capsys):
    lines = report("demo", 12, 3)
    assert [line[0] for line in lines] == [
        f"{family}, {how} a schema" for family in ("extraction", "tool_call") for how in ("without", "with")
    ]
    for (_, asked, _, free), (name, held, valid, right) in zip(lines[::2], lines[1::2], strict=True):
        assert asked == held == valid and right >= free, name
    assert "100.0% valid" in capsys.readouterr().out


def test_a_schema_of_a_value_holds_it_and_no_other_keys():
    schema = schema_of({"a": 1, "b": ["x"], "c": True})
    assert is_valid({"a": 2, "b": [], "c": False}, schema)
    assert not is_valid({"a": 2, "b": []}, schema) and not is_valid({"a": "2", "b": [], "c": True}, schema)
    assert not is_valid(None, schema)
