"""The lint beside the guard: of the lines that the guard reports in this project's own programs it names half, and of
sound programs none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gapless.guard.lint import lint
from gapless.guard.sync_rules import RULES

HERE = Path(__file__).parent
SAN = HERE.parents[1] / "examples" / "san"
FAULTY = [
    HERE / "step_programs.py", *sorted((HERE / "real").glob("*.py")), *sorted((HERE / "kinds").rglob("*_bad.py")),
    *sorted(SAN.glob("*_bad.py")),
]  # fmt: skip
SOUND = [
    *sorted((HERE / "sound").rglob("*.py")), *sorted((HERE / "kinds").rglob("*_good.py")),
    *sorted(SAN.glob("*_good.py")),
]  # fmt: skip
MARK = re.compile(r"# (?:.*; )?(waits unseen|waits|costs|(?:finds|loop|once): [\w ,;:-]+)$")


def faulty_lines(path: Path) -> Iterator[int]:
    """Yield the lines that the guard reports for a wait or its cost, by the comments of the program."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = MARK.search(line)
        words = set(re.split(r"[\s,;:]+", mark[1])) if mark else set()
        if words & {"waits", "costs", *RULES}:
            yield number


@cache
def linted_lines(path: Path) -> dict[int, str]:
    entries = lint([str(path)]).entries()
    return {entry.finding.site.line: entry.finding.text() for entry in entries if entry.excuse is None}


def test_the_lint_names_half_of_the_lines_that_the_guard_reports():
    faulty = [(path, line) for path in FAULTY for line in faulty_lines(path)]
    named = [(path, line) for path, line in faulty if line in linted_lines(path)]
    print(f"\n{len(named)} of {len(faulty)} faulty lines are named")
    assert len(faulty) > 50 and 2 * len(named) >= len(faulty)


def test_the_lint_names_no_line_of_a_faulty_program_but_its_faults():
    """In step_programs the set-up of a program is a lambda like its step, and the guard does not look at set-ups."""
    for path in FAULTY[1:]:
        others = {line: text for line, text in linted_lines(path).items() if line not in set(faulty_lines(path))}
        assert others == {}, path


def test_the_lint_reports_nothing_in_sound_programs():
    print(f"\n{len(SOUND)} sound programs")
    reports = [text for path in SOUND for text in linted_lines(path).values()]
    assert reports == []
