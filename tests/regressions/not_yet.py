"""Failures that this engine lacks the parts for, and the part that each one waits for.

The change that builds such a part takes its rows out of this table and writes their scenarios. `python not_yet.py`
prints the table; `python not_yet.py --document` prints docs/reference/regressions.md, which a test holds to be current.
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
    "77": "two-batch overlap, expert parallelism: here a step is one batch on one stream",
}


TEXT = """\
# Failures of other engines

85 failures and ten lifetime bugs that engines shipped once host and device overlapped. {covered} of them are covered:
by a scenario, which drives the real engine through the circumstances and compares with a direct computation, or by a
safeguard that is taken away from the simulator or an oracle, which must notice. {waiting} wait for a part that this
engine does not have. Numbers without a name are threads of vLLM. `python tests/regressions/not_yet.py --document`
prints this page.

| row | class | fault | seen in | guarded by |
|---|---|---|---|---|
{lines}
"""


class Scenario(NamedTuple):
    row: str
    file: str
    name: str


def scenarios() -> list[Scenario]:
    """Every test and fault of this folder that is named by a row, in the order of the rows."""
    found = [
        Scenario(row, path.name, node.name)
        for path in sorted(HERE.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (row := row_of(node.name))
    ]
    order = list(FAILURES)
    return sorted(found, key=lambda scenario: order.index(scenario.row))


def row_of(name: str) -> str | None:
    """The row that a name says: test_row_007_... and row_007_... are 7, test_lifetime_L4_... is L4."""
    match = re.match(r"(?:test_)?(?:row_(\d{3})|lifetime_(L\d+))_", name)
    return (match[2] or str(int(match[1]))) if match else None


def table() -> str:
    return "\n".join(f"{row:>3}  {part:<52}  {FAILURES[row].what}" for row, part in NOT_YET.items())


def document() -> str:
    """The text of docs/reference/regressions.md."""
    covered = scenarios()
    rows = {scenario.row for scenario in covered} | {*HELD}
    lines = [_line(row, [one for one in covered if one.row == row]) for row in FAILURES]
    return TEXT.format(covered=len(rows), waiting=len(NOT_YET), lines="\n".join(lines))


def _line(row: str, ours: list[Scenario]) -> str:
    kind, seen, what = FAILURES[row]
    files = sorted({one.file for one in ours})
    links = [f"[{name.removesuffix('.py')}](../../tests/regressions/{name})" for name in files]
    guard = ", ".join(links + [f"[{site}](../../tests/mutation/sites.py)" for site in HELD.get(row, ())])
    return f"| {row} | {kind} | {what} | {seen} | {guard or f'nothing yet: needs {NOT_YET[row]}'} |"


if __name__ == "__main__":
    sys.stdout.write(document() if sys.argv[1:] == ["--document"] else f"{table()}\n")
