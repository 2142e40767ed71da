"""Print branch coverage of the engine's core by room, from coverage's data: `make coverage` does it.

Exit status 1 when the total is under the target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 95.0


def rooms(files: dict[str, Any]) -> Iterator[tuple[str, int, int, list[str]]]:
    """(room, taken, all, files with their untaken lines and branches) of each room, and of all together at the end."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    missing: dict[str, list[str]] = defaultdict(list)
    for path, found in sorted(files.items()):
        room, summary = Path(path).parts[1], found["summary"]
        for name in (room, "all"):
            counts[name][0] += summary["covered_lines"] + summary["covered_branches"]
            counts[name][1] += summary["num_statements"] + summary["num_branches"]
        lines = ", ".join(map(str, found["missing_lines"]))
        ways = ", ".join(f"{start}->{end}" for start, end in found["missing_branches"] if start > 0)
        if lines or ways:
            missing[room].append(f"{path}: lines {lines or '-'}; branches {ways or '-'}")
    for name in [*sorted(counts.keys() - {"all"}), "all"]:
        yield name, *counts[name], missing[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--missing", action="store_true", help="also list what no test reaches")
    args = parser.parse_args()
    share = 0.0
    print(f"{'room':8} {'taken':>6} {'of':>6} {'share':>7}")
    for room, taken, count, missing in rooms(json.loads(args.report.read_text(encoding="utf-8"))["files"]):
        share = 100 * taken / count
        print(f"{room:8} {taken:6} {count:6} {share:6.1f}%")
        for line in missing if args.missing else ():
            print(f"    {line}")
    if share < TARGET:
        print(f"coverage is {share:.1f} %, under the target of {TARGET} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
