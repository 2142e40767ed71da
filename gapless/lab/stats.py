"""Mean, spread and percentiles of a list of numbers, as the benchmark's readers expect them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """`std` is the population's (divided by n), as in vLLM's files. All 0.0 for an empty list."""

    n: int
    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]
    """(percentile, value)"""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks of a sorted list; 0.0 when it is empty."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Iterable[float], percents: Sequence[float] = (99.0,)) -> Spread:
    ordered = sorted(values)
    count = len(ordered)
    mean = math.fsum(ordered) / count if count else 0.0
    variance = math.fsum((value - mean) ** 2 for value in ordered) / count if count else 0.0
    found = tuple((p, percentile(ordered, p)) for p in percents)
    return Spread(count, mean, percentile(ordered, 50.0), math.sqrt(variance), found)
