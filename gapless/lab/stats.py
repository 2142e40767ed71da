"""Mean, spread and percentiles of a list of numbers, as the benchmark's readers expect them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks of a sorted list; 0.0 when it is empty."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


class Spread:
    """Mean, median, standard deviation and `percents` of values; all 0.0 where there are none."""

    def __init__(self, values: Iterable[float], percents: Sequence[float] = (99.0,)) -> None:
        ordered = sorted(values)
        self.n = len(ordered)
        self.mean = math.fsum(ordered) / self.n if self.n else 0.0
        self.median = percentile(ordered, 50.0)
        variance = math.fsum((value - self.mean) ** 2 for value in ordered) / self.n if self.n else 0.0
        self.std = math.sqrt(variance)
        """The population's (divided by n), as in vLLM's files."""
        self.percentiles = tuple((p, percentile(ordered, p)) for p in percents)
        """(percentile, value)"""
