"""The form of tests' names that CONTRIBUTING.md asks for, so far as it can be counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.house
LEAST_WORDS = 4
NO_THING = re.compile(r"test_(what|who|whose|so|those|it|they|how|where|that|such|its|also|and|but|nor)_")
RIDDLE = re.compile(r"_(what_it|of_which|works|correctly|properly|successfully)(_|$)")


def faults(name: str) -> list[str]:
    found = ["begins with no thing"] if NO_THING.match(name) else []
    found += [f"holds {match[1]!r}, which says nothing" for match in RIDDLE.finditer(name)]
    found += [f"has fewer than {LEAST_WORDS} words"] if name.count("_") < LEAST_WORDS else []
    return found


def wrong_names(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    wrong = {name for name in re.findall(r"def (test_\w+)", text) if faults(name)}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)  # and no text of a program
    own = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, functions)] if wrong else []
    return [f"{path.name}: {name} {'; '.join(faults(name))}" for name in own if name in wrong]


def test_a_name_is_a_thing_and_what_that_does() -> None:
    wrong = [name for path in Path(__file__).parent.rglob("*.py") for name in wrong_names(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["exit_codes", "what_a_token_of_a_row_reads", "a_stream_gives_what_it_read", "the_ring_of_packets_works"]
)
def test_a_name_that_breaks_the_rule_is_found(name: str) -> None:
    assert faults(f"test_{name}")
