"""The choice of one of several engines for a request: the one that has most of its prompt, unless it is busier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LOAD_WEIGHT = 1.0
"""[share of a prompt] Worth of as many requests above the mean as the mean: with 1, an engine that has all of a prompt
gets it until it has twice as many requests as the mean."""


class Candidate(NamedTuple):
    """An engine that could take a request."""

    number: int
    open: int
    """Number of its requests in flight"""
    matched: float = 0.0
    """Share of the prompt that it has, 0 to 1"""


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """Return the number of the engine with the best score; of equal ones that with the fewest requests, of these the
    next one from number `turn` on."""
    mean = sum(one.open for one in candidates) / len(candidates)
    last = max(one.number for one in candidates) + 1

    def rank(one: Candidate) -> tuple[float, int, int]:
        score = one.matched - LOAD_WEIGHT * (one.open - mean) / max(1.0, mean)
        return round(score, 9), -one.open, -((one.number - turn) % last)

    return max(candidates, key=rank).number
