"""Turns the runs of two arms into one row a metric: means, difference, interval, p-value, verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from gapless.lab.records import LoadRun
from gapless.lab.significance import (
    MIN_PAIRS,
    Tail,
    crossover,
    detectable,
    drift,
    holm,
    pairs_needed,
    sign_flip_p,
    spread_of,
    welch,
)
from gapless.lab.summary import request_figures

TESTS = ("crossover", "permutation", "welch")
EFFECTS = (0.01, 0.03)
"""Relative differences whose number of pairs a row estimates."""


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


class Judgement(TypedDict):
    """The test's result for one metric. Differences are shares of A's mean: 0.03 is 3 %."""

    delta: float
    """B less A"""
    low: float | None
    high: float | None
    """The interval of delta"""
    p: float | None
    p_permutation: float | None
    detectable: float | None
    """The smallest difference that this many runs call with the wanted power, in such a list"""
    needed: dict[str, int | None]
    """Pairs that would find a difference of 1 % and of 3 %"""
    order: float | None
    """How much the second run of a pair differs from the first"""


class Description(TypedDict):
    """The runs' figures of one metric: the fields of its Metric, and figures of `n` pairs."""

    key: str
    label: str
    unit: str
    higher_is_better: bool
    figure: str
    quantile: float | None
    n: int
    a_mean: float
    a_std: float
    """Sample standard deviation over runs (n - 1)"""
    b_mean: float
    b_std: float
    drift: dict[str, float] | None
    """`slope`, a share of A's mean a pair, and `p`, over the pairs in time"""
    a_tail: dict[str, Any] | None
    b_tail: dict[str, Any] | None
    """significance.Tail of a high quantile"""


class MetricRow(Description, Judgement):
    """A row of the report."""

    p_holm: float | None
    """The p-value, raised for the length of the list; the verdict goes by it"""
    verdict: str
    """better, worse, same (the difference could be noise), or unknown (too few runs)"""


def compare(pairs: Sequence[Pair], keys: Sequence[str], rules: Rules) -> list[MetricRow]:
    """Return a row for each of `keys` that every run has a figure for."""
    held = [METRICS[key] for key in keys if all(key in run.metrics for pair in pairs for run in pair)]
    rows = [_described(pairs, metric) for metric in held]
    if len(pairs) < MIN_PAIRS:
        return [{**row, **_unjudged(row), "p_holm": None, "verdict": "unknown"} for row in rows]
    judged = [_judged(row, pairs, rules, len(held)) for row in rows]
    raised = holm([one["p"] for one in judged if one["p"] is not None])
    return [
        {**row, **one, "p_holm": p_holm, "verdict": _verdict(row, one, p_holm, rules.alpha)}
        for row, one, p_holm in zip(rows, judged, raised, strict=True)
    ]


def _values(pairs: Sequence[Pair], key: str) -> tuple[list[float], list[float]]:
    return [a.metrics[key] for a, _ in pairs], [b.metrics[key] for _, b in pairs]


def _described(pairs: Sequence[Pair], metric: Metric) -> Description:
    a, b = _values(pairs, metric.key)
    a_mean, b_mean = statistics.fmean(a), statistics.fmean(b)
    moved = drift([(x + y) / 2 for x, y in zip(a, b, strict=True)])
    a_tail, b_tail = _tails(pairs, metric)
    return {
        "key": metric.key,
        "label": metric.label,
        "unit": metric.unit,
        "higher_is_better": metric.higher_is_better,
        "figure": metric.figure,
        "quantile": metric.quantile,
        "n": len(a),
        "a_mean": a_mean,
        "a_std": _std(a),
        "b_mean": b_mean,
        "b_std": _std(b),
        "drift": {"slope": moved.slope / (a_mean or 1.0), "p": moved.p} if moved else None,
        "a_tail": a_tail,
        "b_tail": b_tail,
    }


def _unjudged(row: Description) -> Judgement:
    delta = (row["b_mean"] - row["a_mean"]) / (row["a_mean"] or 1.0)
    return {
        "delta": delta, "low": None, "high": None, "p": None, "p_permutation": None, "detectable": None, "needed": {},
        "order": None,
    }  # fmt: skip


def _judged(row: Description, pairs: Sequence[Pair], rules: Rules, family: int) -> Judgement:
    """Judge the row of a metric, for a list of `family` of them."""
    a, b = _values(pairs, row["key"])
    difference = welch(a, b) if rules.test == "welch" else crossover(a, b, [run.first for run, _ in pairs])
    flipped = sign_flip_p([y - x for x, y in zip(a, b, strict=True)])
    unit, alpha = row["a_mean"] or 1.0, rules.alpha / family
    low, high = (edge / unit for edge in difference.interval(rules.alpha))
    spread = spread_of(difference, row["n"]) / abs(unit)
    return {
        "delta": difference.delta / unit,
        "low": low,
        "high": high,
        "p": flipped if rules.test == "permutation" else difference.p,
        "p_permutation": flipped,
        "detectable": detectable(difference.error, difference.df, alpha, rules.power) / abs(unit),
        "needed": {str(effect): pairs_needed(effect, spread, alpha, rules.power) for effect in EFFECTS},
        "order": difference.order / unit if rules.test != "welch" else None,
    }


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _verdict(row: Description, judged: Judgement, p_holm: float, alpha: float) -> str:
    if p_holm >= alpha:
        return "same"
    return "better" if (judged["delta"] > 0) == row["higher_is_better"] else "worse"


def _tails(pairs: Sequence[Pair], metric: Metric) -> Iterator[dict[str, Any] | None]:
    """Yield that of A, and that of B."""
    for runs in zip(*pairs, strict=True):
        values = [request_figures(run.load.samples)[metric.figure] for run in runs] if metric.quantile else []
        yield vars(Tail(values, metric.quantile)) if metric.quantile and all(values) else None
