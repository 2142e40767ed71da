"""How much a P99 is worth: the number of samples beyond it, and an interval for it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

_RESAMPLES = 1000


class Tail(NamedTuple):
    """A high quantile of all runs of an arm, pooled."""

    quantile: float
    value: float
    low: float
    """95 % interval, by resampling whole runs."""
    high: float
    samples: int
    behind: int
    """Samples at or beyond the quantile, in all runs."""
    behind_a_run: int
    """Such samples in the smallest run; 1 means that the run's quantile is its one worst sample."""


def behind(samples: int, quantile: float) -> int:
    """How many of `samples` lie at or beyond a high quantile: a P99 of 384 is 4 samples."""
    return math.ceil(round(samples * (1.0 - quantile), 9))


def tail(runs: Sequence[Sequence[float]], quantile: float, seed: int = 0) -> Tail:
    """The pooled quantile with a percentile-bootstrap interval over runs (Davison and Hinkley, section 3.8).

    Runs are resampled, not requests: those of one run share its hiccups. With fewer than about ten runs such an
    interval is too narrow, as every bootstrap over few groups is.
    """
    # Falling values with the run they came from: a resample gives each run a weight, and is walked from the top.
    falling = sorted(((value, k) for k, run in enumerate(runs) for value in run), reverse=True)
    sizes = [len(run) for run in runs]
    rng = random.Random(seed)
    values = []
    for _ in range(_RESAMPLES):
        weights = [0] * len(runs)
        for k in rng.choices(range(len(runs)), k=len(runs)):
            weights[k] += 1
        values.append(_from_top(falling, weights, sizes, quantile))
    values.sort()
    low, high = values[int(0.025 * _RESAMPLES)], values[int(0.975 * _RESAMPLES)]
    total = sum(sizes)
    value = _from_top(falling, [1] * len(runs), sizes, quantile)
    return Tail(quantile, value, low, high, total, behind(total, quantile), behind(min(sizes), quantile))


def _from_top(
    falling: Sequence[tuple[float, int]], weights: Sequence[int], sizes: Sequence[int], quantile: float
) -> float:
    left = behind(sum(w * n for w, n in zip(weights, sizes, strict=True)), quantile)
    for value, k in falling:
        left -= weights[k]
        if left <= 0:
            return value
    raise AssertionError("a quantile lies within its samples")
