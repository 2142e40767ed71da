"""The race programs of examples/san: each fault is caught, each correct one is silent and computes what it should."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from gapless.guard.race import no_race

FOLDER = Path(__file__).parents[2] / "examples" / "san"

EXPECTED = {
    "06_staging_reuse": ([0.0, 4.0, 8.0, 12.0], "thread MainThread takes", "for a fence of stream compute"),
    "07_event_rerecorded": ([[1.0] * 4, [2.0] * 4], "thread MainThread reads", "for a fence of stream bulk_out"),
    "08_offload_before_compute": ([7.0] * 3, "stream bulk_out (program store) reads", "of stream compute"),
    "09_freed_page": ([5.0] * 3, "stream bulk_in (program load) writes", "of stream compute"),
    "10_token_copy": ([0.0, 1.0, 2.0, 3.0], "stream compute (program step) writes", "of stream token_out"),
}


def run(name: str):
    main = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    with no_race("record", track="all") as checker:
        result = main()
    return result, checker.races


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fault_is_caught(name):
    result, races = run(f"{name}_bad")
    expected, who, whom = EXPECTED[name]
    assert result != expected, "the fault was meant to show"
    assert races
    race = next(race for race in races if race.rule == "race")
    assert who in race.missing and whom in race.missing, race.missing
    for side in (race.first, race.second):
        assert Path(side.site.file).name == f"{name}_bad.py", side


@pytest.mark.parametrize("name", EXPECTED)
def test_the_correct_version_is_silent(name):
    result, races = run(f"{name}_good")
    assert races == []
    assert result == EXPECTED[name][0]
