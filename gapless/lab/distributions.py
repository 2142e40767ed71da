"""Student's t distribution and the power of its test, in plain Python: reports need no scientific library."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

_NORMAL = NormalDist()


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) of Student's t with `df` degrees of freedom, df > 0: the p-value of a two-sided test."""
    return _beta_cdf(df / (df + t * t), df / 2, 0.5)


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """Return the t below which a share `p` of the distribution is, 0 < p < 1."""
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    beyond, high = 2.0 * (1.0 - p), 1.0
    while t_two_sided(high, df) > beyond:
        high *= 2.0
    return bisect(lambda t: t_two_sided(t, df) <= beyond, 0.0, high)


def t_power(shift: float, df: float, alpha: float) -> float:
    """How often a two-sided t test at `alpha` calls a difference of `shift` standard errors.

    The noncentral t distribution, as an integral over the chi variable in its denominator (Simpson's rule).
    """
    edge = t_quantile(1.0 - alpha / 2, df)
    # The chi variable over sqrt(df) has mean about 1 and deviation about 1 / sqrt(2 df); 12 of them leave nothing out.
    reach = 12.0 / math.sqrt(2.0 * df)
    low, high = max(1e-9, 1.0 - reach), 1.0 + reach
    log_scale = math.log(2.0) + (df / 2) * math.log(df / 2) - math.lgamma(df / 2)

    def weighed(u: float) -> float:
        density = math.exp(log_scale + (df - 1.0) * math.log(u) - df * u * u / 2)
        return density * (_NORMAL.cdf(shift - edge * u) + _NORMAL.cdf(-shift - edge * u))

    return _simpson(weighed, low, high, 200)


def bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from `low` to `high` with `holds`, given that it holds from some number on."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _simpson(function: Callable[[float], float], low: float, high: float, pieces: int) -> float:
    step = (high - low) / pieces
    inner = sum((4 if k % 2 else 2) * function(low + k * step) for k in range(1, pieces))
    return (function(low) + inner + function(high)) * step / 3


def _beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # The continued fraction converges fast on one side of the mean; the other side is the complement.
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(1.0 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b), from its far end (Abramowitz and Stegun 26.5.8)."""
    value = 1.0
    for m in range(int(20 + 5 * math.sqrt(a + b)), 0, -1):  # it converges in O(sqrt(max(a, b))) terms
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        value = 1.0 + even / (1.0 + odd / value)
    return 1.0 / (1.0 - (a + b) * x / (a + 1.0) / value)
