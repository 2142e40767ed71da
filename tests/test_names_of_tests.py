"""The form of tests' names that CONTRIBUTING.md asks for, so far as it can be counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import house
import pytest

AT_MOST = 202
"""Names that still break the rule: this only falls."""
LEAST_WORDS = 4
NO_THING = re.compile(r"test_(what|who|whose|so|those|it|they|how|where|that|such|its|also|and|but|nor)_")
RIDDLE = re.compile(r"_(what_it|of_which|works|correctly|properly|successfully)(_|$)")


def faults(name: str) -> list[str]:
    found = ["begins with no thing"] if NO_THING.match(name) else []
    found += [f"holds {match[1]!r}, which says nothing" for match in RIDDLE.finditer(name)]
    found += [f"has fewer than {LEAST_WORDS} words"] if name.count("_") < LEAST_WORDS else []
    return found


def test_a_name_is_a_thing_and_what_that_does() -> None:
    trees = [(path, house.parsed(path)) for path in house.python_files(Path(__file__).parent)]
    named = [
        (path, node.name)
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    house.forget()
    assert len(named) > 2_000
    wrong = [f"{path.name}: {name} {'; '.join(found)}" for path, name in named if (found := faults(name))]
    assert len(wrong) <= AT_MOST, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["exit_codes", "what_a_token_of_a_row_reads", "a_stream_gives_what_it_read", "the_ring_of_packets_works"]
)
def test_a_name_that_breaks_the_rule_is_found(name: str) -> None:
    assert faults(f"test_{name}")
