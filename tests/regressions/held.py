"""Failures that a safeguard holds which the mutation check takes away: rows without a scenario of their own.

Each was a scenario, and went when the simulator had noticed the same protection missing. A line of held.txt has the
row, the sites, and the rule that holds here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    sites: tuple[str, ...]
    holds: str


def _rows() -> dict[str, Held]:
    lines = (Path(__file__).parent / "held.txt").read_text().splitlines()
    return {row: Held(tuple(sites.split("; ")), holds) for row, sites, holds in (line.split(" | ") for line in lines)}


HELD = _rows()
