"""An A/B report as one JSON object. Markdown, HTML, the live page and the rules for CI all read this object alone.

Schema 1. Shares such as `delta` are of A's mean (0.03 is 3 %); times are milliseconds unless the name has another unit.

    schema, kind ("gapless-ab"), version, created, command
    design      unit, order, pairs, planned_pairs, looks, test, alpha, power, seed
    metadata    what the user wanted kept
    workload    what every run played
    arms        two of {letter, name, url, flags, own_flags, server, completed, failed, duration_s: [least, most], ...}
    host        cpu, vector, cores, memory_bytes, system, python, gpus
    metrics     one object a metric, as gapless.lab.compare.compare describes it
    runs        one object a run, in the order of time
    requests    by figure: quantiles (0 to 100 %) of all requests of an arm, and figures of pairs of requests
    tokens      what gapless.lab.same_tokens.compare_tokens found
    warnings    texts
    rules       results of --fail-if: {rule, failed, why}
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gapless
from gapless.lab import environment
from gapless.lab.ab_plan import Setup
from gapless.lab.arms import LETTERS, Arm, Live, shown_flags
from gapless.lab.compare import ArmRun, MetricRow, Pair, compare
from gapless.lab.same_tokens import Sameness, compare_tokens
from gapless.lab.stats import percentile
from gapless.lab.summary import SUMMARY_METRICS, request_figures

SCHEMA = 1
REPORT_KIND = "gapless-ab"
_POINTS = 100


def pairs_of(runs: Sequence[ArmRun]) -> list[Pair]:
    """The runs of A and B of each pair that has both, in the order of time."""
    by_place = {(run.pair, run.letter): run for run in runs}
    return [
        (by_place[k, "A"], by_place[k, "B"])
        for k in sorted({run.pair for run in runs})
        if (k, "A") in by_place and (k, "B") in by_place
    ]


def judge(
    setup: Setup, workload: Mapping[str, Any], runs: Sequence[ArmRun], servers: Sequence[Live], created: str
) -> dict[str, Any]:
    """The report of runs, as this module's docstring describes it; its `rules` are left to gapless.lab.rules."""
    flags, pairs = setup.flags, pairs_of(runs)
    rules = flags.rules_at(len(pairs))
    rows = compare(pairs, flags.judged, rules)
    tokens = compare_tokens([(a.seed, a.load.samples, b.load.samples) for a, b in pairs])
    return {
        "schema": SCHEMA,
        "kind": REPORT_KIND,
        "version": gapless.__version__,
        "created": created,
        "command": shown_flags(setup.command),
        "design": {
            "unit": "run",
            "order": "".join(run.letter for run in runs),
            "pairs": len(pairs),
            "planned_pairs": flags.runs,
            "looks": flags.looks(),
            "seed": setup.load.work.seed,
            **rules._asdict(),
        },
        "metadata": dict(setup.metadata),
        "workload": dict(workload),
        "arms": [_arm(*side, runs) for side in zip(setup.arms, servers, strict=True)],
        "host": environment.describe_host(),
        "metrics": rows,
        "runs": [_run(run) for run in runs],
        "requests": {name: _requests(runs, name) for name in SUMMARY_METRICS},
        "tokens": tokens,
        "warnings": [
            *_not_judged(flags.judged, rows),
            *_about_runs(runs, flags.quiet),
            *_about_rows(rows),
            *_about_tokens(tokens),
        ],
        "rules": [],
    }


def _arm(arm: Arm, server: Live, every: Sequence[ArmRun]) -> dict[str, Any]:
    runs = [run for run in every if run.letter == arm.letter]
    good = [[sample for sample in run.load.samples if not sample.error] for run in runs]
    return {
        "letter": arm.letter,
        "name": " ".join(shown_flags(arm.name.split(" "))),
        "url": arm.url,
        "flags": shown_flags(arm.flags),
        "own_flags": shown_flags(arm.own),
        "server": dict(server.facts),
        "runs": len(runs),
        "completed": sum(map(len, good)),
        "failed": sum(len(run.load.samples) for run in runs) - sum(map(len, good)),
        "completed_a_run": _mean_std([len(samples) for samples in good]),
        "prompt_tokens": sum(s.prompt_tokens for samples in good for s in samples),
        "output_tokens": sum(s.output_tokens for samples in good for s in samples),
        "duration_s": _range([run.load.duration for run in runs]),
        "busy_before": _range([run.busy_before for run in runs if run.busy_before is not None]),
        "load_average": _range([run.load_average for run in runs if run.load_average is not None]),
    }


def _mean_std(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def _range(values: Sequence[float]) -> list[float] | None:
    return [round(min(values), 4), round(max(values), 4)] if values else None


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


def _requests(runs: Sequence[ArmRun], name: str) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for letter in LETTERS:
        values = sorted(v for run in runs if run.letter == letter for v in request_figures(run.load.samples)[name])
        points = [percentile(values, 100 * k / _POINTS) for k in range(_POINTS + 1)] if values else []
        sides[letter] = {"n": len(values), "quantiles": [float(f"{point:.5g}") for point in points]}
    return {**sides, "paired": None if name == "itl" else _paired_requests(runs, name)}


def _paired_requests(runs: Sequence[ArmRun], name: str) -> dict[str, Any] | None:
    """The time of the same prompt in B minus in A. A description and no test: see gapless.lab.significance."""

    def by_place(run: ArmRun) -> dict[int, float]:
        good = [s for s in run.load.samples if not s.error and s.events]
        return {s.place: getattr(s, "latency" if name == "e2el" else name) * 1e3 for s in good}

    sides = [(by_place(a), by_place(b)) for a, b in pairs_of(runs)]
    deltas = sorted(b[place] - value for a, b in sides for place, value in a.items() if place in b)
    if not deltas:
        return None
    return {
        "n": len(deltas),
        **{name: round(percentile(deltas, p), 4) for name, p in (("p10", 10), ("median", 50), ("p90", 90))},
        "lower_in_b": round(sum(d < 0 for d in deltas) / len(deltas), 4),
    }


def _not_judged(asked: Sequence[str], rows: Sequence[MetricRow]) -> Iterator[str]:
    judged = {row["key"] for row in rows}
    if lost := [key for key in asked if key not in judged]:
        yield f"not judged, since a run has no such figure: {', '.join(lost)}"


def _about_runs(runs: Sequence[ArmRun], quiet: float) -> Iterator[str]:
    samples = {letter: [s for run in runs if run.letter == letter for s in run.load.samples] for letter in LETTERS}
    errors = {letter: [s.error for s in each if s.error] for letter, each in samples.items()}
    for letter, each in errors.items():
        if each:
            yield f"{len(each)} requests of arm {letter} failed, the first with: {each[0]}"
    if noted := [run for run in runs if run.notes]:
        first = f"{noted[0].letter} of pair {noted[0].pair + 1}: {noted[0].notes[0]}"
        yield f"{len(noted)} of {len(runs)} runs carry notes of the load generator, the first {first}"
    if busy := sum(run.busy_before is not None and run.busy_before > quiet for run in runs):
        yield (
            f"{busy} of {len(runs)} runs began while other processes kept more than {quiet:.0%} of the "
            "processors busy: expect more noise than the machine has when quiet"
        )
    a, b = (sum(s.output_tokens for s in samples[letter] if not s.error) for letter in LETTERS)
    if not any(errors.values()) and a != b:
        counts = f"different numbers of tokens ({a} and {b})"
        yield f"the arms generated {counts}: latencies of whole requests do not compare"


def _about_rows(rows: Sequence[MetricRow]) -> Iterator[str]:
    for row in rows:
        label, tail, drift = row["label"], row["a_tail"], row["drift"]
        if tail and tail["behind_a_run"] < 3:
            worst = "worst one" if tail["behind_a_run"] == 1 else f"{tail['behind_a_run']} worst"
            samples = tail["samples"] // row["n"]
            yield f"{label} of a run is its {worst} of {samples} samples: more requests a run make it a tail"
        if drift and drift["p"] < 0.01 and abs(drift["slope"]) * row["n"] > 0.02:
            yield (
                f"{label} drifted by {drift['slope'] * (row['n'] - 1):+.1%} over the experiment "
                f"(p = {drift['p']:.2g}); ABBA order keeps a steady drift out of Δ"
            )
    if any(row["verdict"] == "unknown" for row in rows):
        yield "too few runs to judge: at least 4 an arm are needed"


def _about_tokens(tokens: Sameness) -> Iterator[str]:
    if tokens["differ"]:
        yield (
            f"{tokens['differ']} of {tokens['compared']} answers differ between the arms. Where a batch's size changes "
            "the rounding (bfloat16), that alone can do it: compare with --max-concurrency 1, or an arm with itself"
        )
    if tokens["compared"] == 0:
        yield "no answer could be compared between the arms"
