"""An A/B report as one JSON object. Markdown, HTML, the live page and the rules for CI all read this object alone.

Schema 1. Shares such as `delta` are of A's mean (0.03 is 3 %); times are milliseconds unless the name says otherwise.

    schema, kind ("gapless-ab"), version, created, command
    design      unit, order, pairs, planned_pairs, looks, test, alpha, power, seed
    metadata    what the user wanted kept
    workload    what every run played
    arms        two of {letter, name, url, flags, own_flags, server, completed, failed, duration_s: [least, most], ...}
    host        cpu, vector, cores, memory_bytes, system, python, gpus
    metrics     one object a metric: gapless.lab.compare.MetricRow, the metric's own fields laid in
    runs        one object a run, in the order of time
    requests    by figure: quantiles (0 to 100 %) of all requests of an arm, and what pairs of requests say
    tokens      gapless.lab.same_tokens.Sameness
    warnings    texts
    rules       what --fail-if said: {rule, failed, why}
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gapless
from gapless.lab.arms import LETTERS, Arm, Live, shown_flags
from gapless.lab.compare import MetricRow, Pair, Rules
from gapless.lab.records import LoadRun
from gapless.lab.same_tokens import Sameness
from gapless.lab.stats import percentile

SCHEMA = 1
KIND = "gapless-ab"
FIGURES = ("ttft", "tpot", "itl", "e2el")
_POINTS = 100


class ArmRun(NamedTuple):
    """One run of load on one arm."""

    letter: str
    pair: int
    first: bool
    """It was the first of its pair."""
    seed: int
    began: float
    """Seconds from the start of the experiment."""
    busy_before: float | None
    load_average: float | None
    gpus: Sequence[Mapping[str, str]]
    load: LoadRun
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()


class Experiment(NamedTuple):
    """All that was done, before anybody judges it. `asked` are the metrics to be judged."""

    asked: Sequence[str]

    arms: tuple[Arm, Arm]
    servers: tuple[Live, Live]
    workload: Mapping[str, Any]
    runs: tuple[ArmRun, ...]
    seed: int
    planned_pairs: int
    looks: Sequence[int]
    """Numbers of pairs after which the runs could have ended."""
    host: Mapping[str, Any]
    created: str
    command: Sequence[str]
    quiet: float
    """Share of busy processors up to which the machine counted as quiet."""
    metadata: Mapping[str, str]


def pairs_of(runs: Sequence[ArmRun]) -> list[Pair]:
    """Whole pairs, in the order of time."""
    by_pair: dict[int, dict[str, ArmRun]] = {}
    for run in runs:
        by_pair.setdefault(run.pair, {})[run.letter] = run
    whole = [sides for _, sides in sorted(by_pair.items()) if len(sides) == len(LETTERS)]
    return [
        Pair(s["A"].first, s["A"].metrics, s["B"].metrics, request_figures(s["A"].load), request_figures(s["B"].load))
        for s in whole
    ]


def request_figures(load: LoadRun) -> dict[str, list[float]]:
    """Milliseconds of each request that succeeded; `itl` of each gap."""
    good = [sample for sample in load.samples if not sample.error and sample.events]
    return {
        "ttft": [s.ttft * 1e3 for s in good],
        "tpot": [s.tpot * 1e3 for s in good if s.output_tokens > 1],
        "itl": [gap * 1e3 for s in good for gap in s.itls],
        "e2el": [s.latency * 1e3 for s in good],
    }


def build_report(done: Experiment, rows: Sequence[MetricRow], rules: Rules, tokens: Sameness) -> dict[str, Any]:
    """The object that this module's docstring describes; `rules` stays empty until gapless.lab.rules fills it."""
    pairs = pairs_of(done.runs)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "version": gapless.__version__,
        "created": done.created,
        "command": shown_flags(done.command),
        "design": {
            "unit": "run",
            "order": "".join(run.letter for run in done.runs),
            "pairs": len(pairs),
            "planned_pairs": done.planned_pairs,
            "looks": list(done.looks),
            "seed": done.seed,
            **rules._asdict(),
        },
        "metadata": dict(done.metadata),
        "workload": dict(done.workload),
        "arms": [_arm(done, k) for k in range(len(LETTERS))],
        "host": dict(done.host),
        "metrics": [_metric(row) for row in rows],
        "runs": [_run(run) for run in done.runs],
        "requests": {name: _requests(done.runs, pairs, name) for name in FIGURES},
        "tokens": {**tokens._asdict(), "first": tokens.first._asdict() if tokens.first else None},
        "warnings": _warnings(done, rows, tokens),
        "rules": [],
    }


def _arm(done: Experiment, k: int) -> dict[str, Any]:
    arm, server = done.arms[k], done.servers[k]
    runs = [run for run in done.runs if run.letter == arm.letter]
    samples = [run.load.samples for run in runs]
    failed = [sum(bool(sample.error) for sample in run) for run in samples]
    busy = [run.busy_before for run in runs if run.busy_before is not None]
    loads = [run.load_average for run in runs if run.load_average is not None]
    return {
        "letter": arm.letter,
        "name": " ".join(shown_flags(arm.name.split(" "))),
        "url": arm.url,
        "flags": shown_flags(arm.flags),
        "own_flags": shown_flags(arm.own),
        "server": dict(server.facts),
        "runs": len(runs),
        "completed": sum(map(len, samples)) - sum(failed),
        "failed": sum(failed),
        "completed_a_run": _mean_std([len(run) - bad for run, bad in zip(samples, failed, strict=True)]),
        "prompt_tokens": sum(s.prompt_tokens for run in samples for s in run if not s.error),
        "output_tokens": sum(s.output_tokens for run in samples for s in run if not s.error),
        "duration_s": _range([run.load.duration for run in runs]),
        "busy_before": _range(busy),
        "load_average": _range(loads),
    }


def _mean_std(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def _range(values: Sequence[float]) -> list[float] | None:
    return [round(min(values), 4), round(max(values), 4)] if values else None


def _metric(row: MetricRow) -> dict[str, Any]:
    fields = row._asdict()
    metric = fields.pop("metric")
    for name in ("drift", "a_tail", "b_tail"):
        fields[name] = fields[name]._asdict() if fields[name] is not None else None
    return {**metric._asdict(), **fields}


def _run(run: ArmRun) -> dict[str, Any]:
    lags = sorted(sample.lag for sample in run.load.samples)
    return {
        "arm": run.letter,
        "pair": run.pair,
        "first": run.first,
        "seed": run.seed,
        "began_s": round(run.began, 2),
        "duration_s": round(run.load.duration, 4),
        "completed": sum(not sample.error for sample in run.load.samples),
        "failed": sum(bool(sample.error) for sample in run.load.samples),
        "busy_before": run.busy_before,
        "load_average": run.load_average,
        "client_lag_p99_ms": round(percentile(lags, 99) * 1e3, 3),
        "gpus": [dict(state) for state in run.gpus],
        "notes": list(run.notes),
        "metrics": {key: round(value, 6) for key, value in run.metrics.items()},
    }


def _requests(runs: Sequence[ArmRun], pairs: Sequence[Pair], name: str) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for letter in LETTERS:
        values = sorted(v for run in runs if run.letter == letter for v in request_figures(run.load)[name])
        points = [percentile(values, 100 * k / _POINTS) for k in range(_POINTS + 1)] if values else []
        sides[letter] = {"n": len(values), "quantiles": [float(f"{point:.5g}") for point in points]}
    return {**sides, "paired": _paired_requests(runs, name)}


def _paired_requests(runs: Sequence[ArmRun], name: str) -> dict[str, Any] | None:
    """What the same prompt took in B minus in A. A description and no test: see gapless.lab.significance."""
    if name == "itl":
        return None
    by_run: dict[tuple[int, str], dict[int, float]] = {}
    for run in runs:
        good = [s for s in run.load.samples if not s.error and s.events]
        attribute = "latency" if name == "e2el" else name
        by_run[run.pair, run.letter] = {s.place: getattr(s, attribute) * 1e3 for s in good}
    deltas = sorted(
        by_run[pair, "B"][place] - value
        for (pair, letter), a in by_run.items()
        if letter == "A"
        for place, value in a.items()
        if place in by_run.get((pair, "B"), {})
    )
    if not deltas:
        return None
    return {
        "n": len(deltas),
        "p10": round(percentile(deltas, 10), 4),
        "median": round(percentile(deltas, 50), 4),
        "p90": round(percentile(deltas, 90), 4),
        "lower_in_b": round(sum(d < 0 for d in deltas) / len(deltas), 4),
    }


def _warnings(done: Experiment, rows: Sequence[MetricRow], tokens: Sameness) -> list[str]:
    judged = {row.metric.key for row in rows}
    lost = [key for key in done.asked if key not in judged]
    missing = [f"not judged, since a run has no such figure: {', '.join(lost)}"] if lost else []
    return [*missing, *_about_runs(done), *_about_rows(rows), *_about_tokens(tokens)]


def _about_runs(done: Experiment) -> list[str]:
    found = []
    failed = {
        letter: sum(bool(s.error) for r in done.runs if r.letter == letter for s in r.load.samples)
        for letter in LETTERS
    }
    for letter, count in failed.items():
        if count:
            first = next(s.error for r in done.runs if r.letter == letter for s in r.load.samples if s.error)
            found.append(f"{count} requests of arm {letter} failed, the first with: {first}")
    noted = [run for run in done.runs if run.notes]
    if noted:
        first = f"{noted[0].letter} of pair {noted[0].pair + 1}: {noted[0].notes[0]}"
        found.append(f"{len(noted)} of {len(done.runs)} runs carry notes of the load generator, the first {first}")
    busy = sum(run.busy_before is not None and run.busy_before > done.quiet for run in done.runs)
    if busy:
        found.append(
            f"{busy} of {len(done.runs)} runs began while other processes kept more than {done.quiet:.0%} of the "
            "processors busy: expect more noise than the machine has when quiet"
        )
    output = {
        letter: sum(s.output_tokens for r in done.runs if r.letter == letter for s in r.load.samples if not s.error)
        for letter in LETTERS
    }
    if not any(failed.values()) and output["A"] != output["B"]:
        found.append(
            f"the arms generated different numbers of tokens ({output['A']} and {output['B']}): latencies of whole "
            "requests do not compare"
        )
    return found


def _about_rows(rows: Sequence[MetricRow]) -> list[str]:
    found = []
    for row in rows:
        if row.a_tail and row.a_tail.behind_a_run < 3:
            found.append(
                f"{row.metric.label} of a run is its {_worst(row.a_tail.behind_a_run)} of "
                f"{row.a_tail.samples // row.n} samples: more requests a run make it a tail"
            )
        if row.drift and row.drift.p < 0.01 and abs(row.drift.slope) * row.n > 0.02:
            found.append(
                f"{row.metric.label} drifted by {row.drift.slope * (row.n - 1):+.1%} over the experiment "
                f"(p = {row.drift.p:.2g}); ABBA order keeps a steady drift out of Δ"
            )
    if any(row.verdict == "unknown" for row in rows):
        found.append("too few runs to judge: at least 4 an arm are needed")
    return found


def _worst(count: int) -> str:
    return "worst one" if count == 1 else f"{count} worst"


def _about_tokens(tokens: Sameness) -> list[str]:
    found = []
    if tokens.differ:
        found.append(
            f"{tokens.differ} of {tokens.compared} answers differ between the arms. Where a batch's size changes the "
            "rounding (bfloat16), that alone can do it: compare with --max-concurrency 1, or an arm with itself"
        )
    if tokens.compared == 0:
        found.append("no answer could be compared between the arms")
    return found
