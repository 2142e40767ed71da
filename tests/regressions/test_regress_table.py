"""Every failure of the list is covered by a scenario or waits for a named part; the document says the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from failures import FAILURES
from held import HELD
from mutation.sites import SITES
from not_yet import HERE, NOT_YET, document, row_of, scenarios

ROOT = HERE.parents[1]


def test_the_list_is_complete():
    assert list(FAILURES) == [*map(str, range(1, 86)), *(f"L{number}" for number in range(1, 11))]


def test_every_row_is_covered_or_waits_for_a_part_and_never_both():
    covered = {scenario.row for scenario in scenarios()}
    assert covered | {*HELD} | set(NOT_YET) == set(FAILURES)
    assert not (covered & {*HELD} or (covered | {*HELD}) & set(NOT_YET))
    assert {site for sites in HELD.values() for site in sites} <= {site.name for site in SITES}
    assert all(part for part in NOT_YET.values())
    order = list(FAILURES)
    assert list(NOT_YET) == sorted(NOT_YET, key=order.index), "in the order of the rows"


def test_the_document_is_current():
    assert (ROOT / "docs" / "reference" / "regressions.md").read_text() == document(), (
        "run python tests/regressions/not_yet.py --document > docs/reference/regressions.md"
    )


def test_the_table_can_be_printed():
    script = Path("tests", "regressions", "not_yet.py")
    printed = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in printed.splitlines()] == list(NOT_YET)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("test_row_007_x", "7"),
        ("test_row_085_x", "85"),
        ("test_lifetime_L4_x", "L4"),
        ("row_021_x", "21"),
        ("test_row_7_x", None),
        ("x", None),
    ],
)
def test_the_name_of_a_scenario_names_its_row(name, row):
    assert row_of(name) == row
