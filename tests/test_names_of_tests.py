"""Names of tests are sentences: subject, condition, outcome.

CONTRIBUTING.md has the rule; here is what of it can be counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import house
import pytest

LEAST_WORDS = 4
NO_OUTCOME = {"works", "correctly", "properly", "successfully"}
VERBS = """
aborts accepts accesses act add added adds agree agrees allows answer answers are arrive arrives asked asks assigns
attributes be beats become becomes been begin begins belongs bound bounds breaks bring brings builds can cannot
captured carries carry caught change changes closes come comes commits compiled compiles compute computes continues
copies cost costs count counted counts cover covers cuts decides declares denies depends did differ differs digest
disturb disturbs divided do does doubles draw draws dropped drops echoed end ends equal equals excuses exist exits fail
failed fails fall falls fills find finds fit fits fixes follow follows forgets found get gets give given gives go goes
gone grows had hands hangs happens has have held hold holds hosts ignored ignores imports interrupts is join joins keep
keeps kept know knows lacks lasts learns leases leave leaves left lends lengthens let lets lie limits lists lives loads
loses lost made make makes marks match matters may means measures merged misses move moves multiply must name named
names need needs open opens orders outgrow outlive pass passes plugs poisons polls prepares print printed prints probes
published publishes put puts raised raises reach reaches read reads refused refuses released remembers renders renewed
repeat repeats replays report reported reports reserved restores rests return returned returns rings rises rotates run
runs said sampled satisfy save say says scored scores searches see seen sees sends sent serves sets share shares show
shows shrinks skips sleeps spans spoils start starts stay stays stop stops straddles streamed streams sum survive
survives synchronises take taken takes tells times tokenizes told touches trains travel turn turns uploads use uses
wait waited waits wakes wants was weighs were widens will win wins would write writes written
"""
"""The verbs of the names there are; a name that needs another one adds it."""


def faults(name: str) -> list[str]:
    """What keeps `test_NAME` from being a sentence with an outcome."""
    words = name.removeprefix("test_").split("_")
    found = [f"{word!r} is no outcome" for word in words if word in NO_OUTCOME]
    if len(words) < LEAST_WORDS:
        found.append(f"has {len(words)} words, at least {LEAST_WORDS} make a sentence")
    if not set(VERBS.split()) & set(words):
        found.append("has no verb of VERBS: what must be seen?")
    return found


def names_of_tests() -> Iterator[tuple[Path, str]]:
    for path in house.python_files(Path(__file__).parent):
        for node in ast.walk(house.parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node.name


@pytest.fixture(scope="module", autouse=True)
def parsed_code_is_forgotten() -> Iterator[None]:
    yield
    house.forget()


def test_the_name_of_every_test_is_a_sentence() -> None:
    named = list(names_of_tests())
    assert len(named) > 2_000
    wrong = [f"{path.name}: {name} {fault}" for path, name in named for fault in faults(name)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["test_exit_codes", "test_a_slot_of_the_ring_behind_a_fence", "test_the_ring_of_packets_works_correctly"]
)
def test_a_name_without_an_outcome_is_found(name: str) -> None:
    assert faults(name)
