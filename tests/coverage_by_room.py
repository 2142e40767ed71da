"""Print the lines and branches of the engine's core that tests take, by room: `make coverage` does it.

Exit status 1 when the share of all branches is under the target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 95.0
LINES = "covered_lines", "num_statements"
BRANCHES = "covered_branches", "num_branches"
COUNTED = LINES + BRANCHES


def rooms(files: dict[str, Any]) -> Iterator[tuple[str, float, float, list[str]]]:
    """(room, share of lines, share of branches, what no test takes) of each room, and of all together at the end."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    missing: dict[str, list[str]] = defaultdict(list)
    for path, found in sorted(files.items()):
        room = Path(path).parts[1]
        for name in (room, "all"):
            counts[name].update({key: found["summary"][key] for key in COUNTED})
        lines = ", ".join(map(str, found["missing_lines"]))
        branches = ", ".join(f"{start}->{end}" for start, end in found["missing_branches"])
        if lines or branches:
            missing[room].append(f"{path}: lines {lines or '-'}; branches {branches or '-'}")
    for name in [*sorted(counts.keys() - {"all"}), "all"]:
        shares = (100 * counts[name][taken] / (counts[name][count] or 1) for taken, count in (LINES, BRANCHES))
        yield name, *shares, missing[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--missing", action="store_true", help="also list what no test reaches")
    args = parser.parse_args()
    branches = 0.0
    print(f"{'room':8} {'lines':>8} {'branches':>9}")
    for room, lines, branches, missing in rooms(json.loads(args.report.read_text(encoding="utf-8"))["files"]):
        print(f"{room:8} {lines:7.1f}% {branches:8.1f}%")
        for line in missing if args.missing else ():
            print(f"    {line}")
    if branches < TARGET:
        print(f"{branches:.1f} % of the branches are taken, under the target of {TARGET} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
