"""Failures that this engine lacks the parts for, and the part that each one waits for.

The change that builds such a part takes its rows out of this table and writes their scenarios. `python not_yet.py`
prints the table; `python not_yet.py --document` prints docs/regressions.md, which a test holds to be current.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

from failures import FAILURES
from held import HELD

HERE = Path(__file__).parent

NOT_YET = {
    "3": "multimodal inputs",
    "4": "multimodal inputs",
    "7": "data parallelism",
    "12": "page zeroing for hybrid models",
    "14": "prompt embeddings",
    "16": "hybrid models",
    "20": "context parallelism",
    "54": "multimodal inputs",
    "55": "multimodal inputs",
    "63": "data parallelism",
    "64": "pipeline parallelism",
    "69": "pipeline parallelism",
    "70": "pipeline parallelism",
    "77": "two-batch overlap, expert parallelism: here a step is one batch on one stream, with no collectives",
    "L8": "tensor parallelism",
}


TEXT = """\
# Regression scenarios

What other engines shipped broken once host and device overlapped: 85 failures and ten lifetime bugs, by row.
{covered} of them are covered, {held} by a safeguard that the [mutation check](proof.md#the-mutation-check) takes away
and the others by a scenario; the other {waiting} wait for a part that this engine does not have yet.

A scenario drives the real engine through the circumstances of the failure and holds the result against a direct
computation, or states the invariant that was missing. Most run a second time on an engine with one protection
taken away, and must fail then. Numbers without a name are threads of vLLM.

This file is printed by `python tests/regressions/not_yet.py --document`; a test holds it to be current.

## Covered

| Row | Class | Seen in | What broke there | What holds here | Scenario |
|---|---|---|---|---|---|
{covered_lines}

## Not yet

| Row | Class | Seen in | What broke there | Part needed |
|---|---|---|---|---|
{waiting_lines}
"""


class Scenario(NamedTuple):
    row: str
    file: str
    name: str
    doc: str
    """The docstring on one line."""


def scenarios() -> list[Scenario]:
    """Every test of this folder that is named by a row, in the order of the rows."""
    found = [
        Scenario(row, path.name, node.name, " ".join((ast.get_docstring(node) or "").split()))
        for path in sorted(HERE.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (row := row_of(node.name))
    ]
    order = list(FAILURES)
    return sorted(found, key=lambda scenario: order.index(scenario.row))


def row_of(name: str) -> str | None:
    """The row that a test's name says: test_row_007_... is 7, test_lifetime_L4_... is L4."""
    match = re.match(r"test_(?:row_(\d{3})|lifetime_(L\d+))_", name)
    return (match[2] or str(int(match[1]))) if match else None


def table() -> str:
    return "\n".join(f"{row:>3}  {part:<52}  {FAILURES[row].what}" for row, part in NOT_YET.items())


def document() -> str:
    """The text of docs/regressions.md."""
    covered = scenarios()
    rows = {scenario.row for scenario in covered} | {*HELD}
    there = [_covered_line(row, [one for one in covered if one.row == row]) for row in FAILURES if row in rows]
    waiting = [f"| {row} | {' | '.join(FAILURES[row])} | {part} |" for row, part in NOT_YET.items()]
    return TEXT.format(
        covered=len(rows),
        held=len(HELD),
        waiting=len(NOT_YET),
        covered_lines="\n".join(there),
        waiting_lines="\n".join(waiting),
    )


def _covered_line(row: str, ours: list[Scenario]) -> str:
    if row in HELD:
        sites, holds = HELD[row]
        links = ", ".join(f"[{site}](../tests/mutation/sites.py)" for site in sites)
    else:
        holds = ours[0].doc.partition(" Here ")[2]
        links = ", ".join(f"[{one.name}](../tests/regressions/{one.file})" for one in ours)
    return f"| {row} | {' | '.join(FAILURES[row])} | {holds[:1].upper()}{holds[1:]} | {links} |"


if __name__ == "__main__":
    sys.stdout.write(document() if sys.argv[1:] == ["--document"] else f"{table()}\n")
