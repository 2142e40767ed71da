"""Records what the engine answers now: `python record_tokens.py` in this folder, with the project on PYTHONPATH.

Refuses if two engines disagree.
"""

from __future__ import annotations

import json
from pathlib import Path

import demo_engines

from gapless.engine import checkers

DEMO = Path(__file__).parent / "demo.json"


def main() -> None:
    checkers.connect()
    demo: dict = {"arithmetic": demo_engines.arithmetic()}
    for kernels in demo_engines.KERNELS:
        demo[kernels] = agreed([demo_engines.play(*arm) for arm in demo_engines.ARMS if arm[0] == kernels])
    write(DEMO, demo)


def agreed(plays: list[dict]) -> dict:
    """The first, when all others say the same. The last place of a log-probability may be another."""
    first = plays[0]
    for other in plays[1:]:
        assert not list(demo_engines.differences(first, other)), "engines disagree"
    return first


def write(path: Path, record: dict) -> None:
    """A line a request, so that a change can be read."""
    lines = []
    for part, found in record.items():
        inner = [f" {json.dumps(name)}:{json.dumps(each, separators=(',', ':'))}" for name, each in found.items()]
        lines.append(f"{json.dumps(part)}:{{\n" + ",\n".join(inner) + "\n}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
