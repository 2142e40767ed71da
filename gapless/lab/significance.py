"""Is B different from A? Tests over *runs*: a run of load gives one number a metric, and that number is the sample.

Requests within a run are not independent (they share batches, a queue and a moment of the machine), so a test over
requests would call noise a difference; a test over runs does not.

The runs come in pairs: run k of A and run k of B play the same prompts with the same seed, one right after the other,
in the order AB, BA, AB, BA, ... So the design is a two-period cross-over, and `crossover` is its textbook analysis.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from operator import mul
from typing import NamedTuple

from gapless.lab.distributions import bisect, t_power, t_quantile, t_two_sided

MIN_PAIRS = 3
"""Fewer pairs have no spread to judge by."""
_EXACT_FLIPS = 14
_DRAWN_FLIPS = 20_000
_RESAMPLES = 1000


class Difference(NamedTuple):
    """B minus A, in the unit of the values."""

    delta: float
    error: float
    """Standard error of delta."""
    df: float
    """Degrees of freedom."""
    order: float
    """How much the second run of a pair exceeds the first, whatever the arm; 0.0 where it was not looked at."""

    @property
    def p(self) -> float:
        """Two-sided p-value of "no difference"."""
        return _p_of(self.delta, self.error, self.df)

    def interval(self, alpha: float) -> tuple[float, float]:
        """The 1 - alpha confidence interval of delta."""
        reach = t_quantile(1.0 - alpha / 2, self.df) * self.error
        return self.delta - reach, self.delta + reach


def crossover(a: Sequence[float], b: Sequence[float], a_first: Sequence[bool]) -> Difference:
    """B minus A from pairs, with what the order within a pair does taken out.

    A linear drift of the machine, or a second run that profits from the first, adds +o to the pairs in one order and -o
    to pairs in the other. The mean over both orders is free of it, and so is the spread, at the price of one degree of
    freedom (Hills and Armitage 1979; Jones and Kenward, Design and Analysis of Cross-Over Trials). Needs both orders
    and three pairs.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    ab = [d for d, first in zip(differences, a_first, strict=True) if first]
    ba = [d for d, first in zip(differences, a_first, strict=True) if not first]
    assert ab and ba and len(differences) >= MIN_PAIRS, "a cross-over has both orders and three pairs or more"
    df = len(differences) - 2
    pooled = sum(len(one) * statistics.pvariance(one) for one in (ab, ba)) / df
    delta = (statistics.fmean(ab) + statistics.fmean(ba)) / 2
    error = math.sqrt(pooled * (1 / len(ab) + 1 / len(ba))) / 2
    return Difference(delta, error, df, (statistics.fmean(ab) - statistics.fmean(ba)) / 2)


def welch(a: Sequence[float], b: Sequence[float]) -> Difference:
    """B minus A from two independent groups of runs (Welch 1947): for runs that are not paired."""
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    below = va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)
    df = (va + vb) ** 2 / below if below else float(len(a) + len(b) - 2)
    return Difference(statistics.fmean(b) - statistics.fmean(a), math.sqrt(va + vb), df, 0.0)


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935): no normal distribution is assumed.

    If A and B are the same, each pair's difference could as well have the other sign. All 2^n flips up to 14 pairs,
    20,000 drawn ones above. It cannot fall below 2 / 2^n: 6 pairs are needed for 0.05.
    """
    size, pairs = abs(math.fsum(differences)) * (1 - 1e-12), len(differences)
    exact, rng = pairs <= _EXACT_FLIPS, random.Random(seed)
    flips = product((1, -1), repeat=pairs) if exact else (rng.choices((1, -1), k=pairs) for _ in range(_DRAWN_FLIPS))
    as_large: list[bool] = [abs(sum(map(mul, signs, differences))) >= size for signs in flips]
    # Among drawn flips the data themselves count as one more.
    return sum(as_large) / len(as_large) if exact else (sum(as_large) + 1) / (len(as_large) + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values raised so that the chance of one false call in the whole list is held (Holm 1979), in the same order."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(order):
        least = max(least, min(1.0, p_values[k] * (len(p_values) - rank)))
        adjusted[k] = least
    return adjusted


def detectable(error: float, df: float, alpha: float, power: float) -> float:
    """The smallest true difference that is called in a share `power` of experiments like this one."""
    return error * _shift_for(df, alpha, power)


def pairs_needed(effect: float, spread: float, alpha: float, power: float, most: int = 10_000) -> int:
    """Pairs that a cross-over needs to call a true difference of `effect` in a share `power` of experiments.

    `spread` is the standard deviation of the pair differences, order taken out. `most` where more would be needed.
    """

    def enough(pairs: int) -> bool:
        error = spread / math.sqrt(pairs) if pairs % 2 == 0 else spread * math.sqrt(pairs / (pairs * pairs - 1))
        return error == 0 or t_power(effect / error, pairs - 2, alpha) >= power

    return MIN_PAIRS + bisect_left(range(MIN_PAIRS, most), True, key=enough)


class Drift(NamedTuple):
    """A straight line through the pairs in the order of time."""

    slope: float
    """Change from one pair to the next, in the unit of the values."""
    p: float


def drift(values: Sequence[float]) -> Drift | None:
    """Least squares over 0, 1, 2, ... with the t test of its slope; None with fewer than four values."""
    n = len(values)
    if n < 4:
        return None
    squares = n * (n * n - 1) / 12
    slope, start = statistics.linear_regression(range(n), values)
    rest = sum((v - start - slope * k) ** 2 for k, v in enumerate(values))
    return Drift(slope, _p_of(slope, math.sqrt(rest / (n - 2) / squares), n - 2))


def spread_of(difference: Difference, pairs: int) -> float:
    """Standard deviation of pair differences, from the error of a cross-over (`pairs` even, or nearly)."""
    return difference.error * math.sqrt(pairs)


@lru_cache(maxsize=64)
def _shift_for(df: float, alpha: float, power: float) -> float:
    guess = t_quantile(1.0 - alpha / 2, df) + abs(t_quantile(power, df))
    return bisect(lambda shift: t_power(shift, df, alpha) >= power, 0.0, 2 * guess)


def _p_of(value: float, error: float, df: float) -> float:
    if error == 0.0:
        return 1.0 if value == 0.0 else 0.0
    return t_two_sided(value / error, df)


def behind(samples: int, quantile: float) -> int:
    """How many of `samples` lie at or beyond a high quantile: a P99 of 384 is 4 samples."""
    return math.ceil(round(samples * (1.0 - quantile), 9))


class Tail:
    """A high quantile of all runs of an arm, pooled, with a percentile-bootstrap interval over runs.

    Runs are resampled, not requests (Davison and Hinkley, section 3.8): one run shares hiccups. With fewer
    than about ten runs such an interval is too narrow, as every bootstrap over few groups is.
    """

    def __init__(self, runs: Sequence[Sequence[float]], quantile: float) -> None:
        # Falling values with the run they came from: a resample gives each run a weight, and is walked from the top.
        falling = sorted(((value, k) for k, run in enumerate(runs) for value in run), reverse=True)
        sizes = [len(run) for run in runs]
        rng = random.Random(0)
        values = []
        for _ in range(_RESAMPLES):
            weights = [0] * len(runs)
            for k in rng.choices(range(len(runs)), k=len(runs)):
                weights[k] += 1
            values.append(_from_top(falling, weights, sizes, quantile))
        values.sort()
        self.quantile = quantile
        self.value = _from_top(falling, [1] * len(runs), sizes, quantile)
        self.low, self.high = values[int(0.025 * _RESAMPLES)], values[int(0.975 * _RESAMPLES)]
        """95 % interval."""
        self.samples = sum(sizes)
        self.behind = behind(self.samples, quantile)
        """Samples at or beyond the quantile, in all runs."""
        self.behind_a_run = behind(min(sizes), quantile)
        """Samples there in the smallest run; 1 means that the quantile is the run's single worst sample."""


def _from_top(
    falling: Sequence[tuple[float, int]], weights: Sequence[int], sizes: Sequence[int], quantile: float
) -> float:
    left = behind(sum(w * n for w, n in zip(weights, sizes, strict=True)), quantile)
    for value, k in falling:
        left -= weights[k]
        if left <= 0:
            return value
    raise AssertionError("a quantile is within its samples")
