"""Turns the runs of two arms into one row a metric: means, difference, interval, p-value, verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gapless.lab.records import LoadRun
from gapless.lab.significance import (
    MIN_PAIRS,
    Drift,
    Tail,
    crossover,
    detectable,
    drift,
    holm,
    pairs_needed,
    sign_flip_p,
    spread_of,
    tail,
    welch,
)
from gapless.lab.summary import request_figures

TESTS = ("crossover", "permutation", "welch")
EFFECTS = (0.01, 0.03)
"""Relative differences for which a row says how many pairs they would take."""


class Metric(NamedTuple):
    """One figure of a run."""

    key: str
    """Name of the figure in the JSON that benchmarks write."""
    label: str
    unit: str
    higher_is_better: bool
    figure: str = ""
    """Which figure of a request it sums up: ttft, tpot, itl or e2el; "" for a rate."""
    quantile: float | None = None
    """Set for high quantiles, which rest on few samples."""


METRICS = {
    metric.key: metric
    for metric in (
        Metric("request_throughput", "Requests/s", "1/s", True),
        Metric("output_throughput", "Output tokens/s", "1/s", True),
        Metric("total_token_throughput", "Total tokens/s", "1/s", True),
        *(
            Metric(f"{kind}_{figure}_ms", f"{kind.capitalize()} {figure.upper()}", "ms", False, figure, quantile)
            for figure in ("ttft", "tpot", "itl", "e2el")
            for kind, quantile in (("mean", None), ("median", None), ("p99", 0.99))
        ),
    )
}
JUDGED = (
    "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms",
)  # fmt: skip
"""The metrics that get a verdict by default. A longer list costs power: Holm pays for every member."""


class ArmRun(NamedTuple):
    """One run of load on one arm."""

    letter: str
    pair: int
    first: bool
    """Whether it was the first of its pair."""
    seed: int
    began: float
    """Seconds from the start of the experiment."""
    busy_before: float | None
    load_average: float | None
    gpus: Sequence[Mapping[str, str]]
    load: LoadRun
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()


Pair = tuple[ArmRun, ArmRun]
"""Runs of A and of B that played the same prompts, one right after the other."""


class Rules(NamedTuple):
    """How verdicts are reached. Fixed before the first run."""

    test: str = "crossover"
    alpha: float = 0.05
    power: float = 0.8


class MetricRow(NamedTuple):
    """One line of the table. `delta`, `low`, `high`, `detectable` are shares of A's mean: 0.03 is 3 %."""

    metric: Metric
    n: int
    a_mean: float
    a_std: float
    b_mean: float
    b_std: float
    """Sample standard deviations over runs (n - 1)."""
    delta: float
    drift: Drift | None
    """Over the pairs in time; the slope is a share of A's mean a pair."""
    a_tail: Tail | None
    b_tail: Tail | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    """Raised for the length of the list; the verdict goes by it."""
    p_permutation: float | None = None
    verdict: str = "unknown"
    """better, worse, same (the difference could be noise), or unknown (too few runs)"""
    detectable: float | None = None
    """The smallest difference that this many runs call with the wanted power, for a list of this length."""
    needed: Mapping[str, int] = {}
    """Pairs that would find a difference of 1 % and of 3 %."""
    order: float | None = None
    """How much the second run of a pair differs from the first, as a share."""


def compare(pairs: Sequence[Pair], keys: Sequence[str], rules: Rules) -> list[MetricRow]:
    """A row for each of `keys` that every run has a figure for."""
    held = [METRICS[key] for key in keys if all(key in run.metrics for pair in pairs for run in pair)]
    rows = [_described(pairs, metric) for metric in held]
    if len(pairs) < MIN_PAIRS:
        return rows
    rows = [_judged(row, pairs, rules, len(held)) for row in rows]
    raised = holm([row.p for row in rows if row.p is not None])
    return [
        row._replace(p_holm=p_holm, verdict=_verdict(row, p_holm, rules.alpha))
        for row, p_holm in zip(rows, raised, strict=True)
    ]


def _values(pairs: Sequence[Pair], metric: Metric) -> tuple[list[float], list[float]]:
    return [a.metrics[metric.key] for a, _ in pairs], [b.metrics[metric.key] for _, b in pairs]


def _described(pairs: Sequence[Pair], metric: Metric) -> MetricRow:
    """The row of a metric that is not judged."""
    a, b = _values(pairs, metric)
    (a_mean, b_mean), unit = (statistics.fmean(a), statistics.fmean(b)), statistics.fmean(a) or 1.0
    moved = drift([(x + y) / 2 for x, y in zip(a, b, strict=True)])
    shares = Drift(moved.slope / unit, moved.p) if moved else None
    tails = _tails(pairs, metric)
    return MetricRow(metric, len(a), a_mean, _std(a), b_mean, _std(b), (b_mean - a_mean) / unit, shares, *tails)


def _judged(row: MetricRow, pairs: Sequence[Pair], rules: Rules, family: int) -> MetricRow:
    """The row with what the test says, for a list of `family` metrics; not its verdict."""
    a, b = _values(pairs, row.metric)
    difference = welch(a, b) if rules.test == "welch" else crossover(a, b, [run.first for run, _ in pairs])
    flipped = sign_flip_p([y - x for x, y in zip(a, b, strict=True)])
    unit, alpha = row.a_mean or 1.0, rules.alpha / family
    low, high = (edge / unit for edge in difference.interval(rules.alpha))
    spread = spread_of(difference, row.n) / abs(unit)
    return row._replace(
        delta=difference.delta / unit,
        low=low,
        high=high,
        p=flipped if rules.test == "permutation" else difference.p,
        p_permutation=flipped,
        detectable=detectable(difference.error, difference.df, alpha, rules.power) / abs(unit),
        needed={str(effect): pairs_needed(effect, spread, alpha, rules.power) for effect in EFFECTS},
        order=difference.order / unit if rules.test != "welch" else None,
    )


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _verdict(row: MetricRow, p_holm: float, alpha: float) -> str:
    if p_holm >= alpha:
        return "same"
    return "better" if (row.delta > 0) == row.metric.higher_is_better else "worse"


def _tails(pairs: Sequence[Pair], metric: Metric) -> tuple[Tail | None, Tail | None]:
    if metric.quantile is None:
        return None, None
    sides = ([request_figures(run.load.samples)[metric.figure] for run in runs] for runs in zip(*pairs, strict=True))
    a, b = (tail(side, metric.quantile) if all(side) else None for side in sides)
    return a, b
