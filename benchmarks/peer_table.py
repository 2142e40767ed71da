"""Arithmetic and text of a side-by-side measurement: ratios round by round, and how far each aim is met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS = "ours"
AGAIN = "ours-again"
"""A second run of ours in each round: its ratio to the first is the noise of the day."""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""By side: a record of figures for each round, in order. A round that failed or was left out has none."""


class Aim(NamedTuple):
    """One line of the table: `metric` of ours against the best mode of the best engine in `beside`."""

    work: str
    model: str
    concurrency: int
    metric: str
    beside: tuple[str, ...]
    bound: float
    higher: bool
    """The ratio ours/peer is to be at least `bound`; otherwise at most."""


BOTH = ("vllm", "llama")
TOKENS, TPOT, TTFT = "output_throughput", "mean_tpot_ms", "median_ttft_ms"
AIMS = (
    Aim("tiny, 1 at a time: TPOT", "tiny", 1, TPOT, ("vllm",), 0.5, False),
    Aim("tiny, 8 at a time: output tokens/s", "tiny", 8, TOKENS, BOTH, 1.3, True),
    Aim("tiny, 32 at a time: output tokens/s", "tiny", 32, TOKENS, BOTH, 1.3, True),
    Aim("small, 1 at a time: output tokens/s", "small", 1, TOKENS, BOTH, 1.0, True),
    Aim("small, 8 at a time: output tokens/s", "small", 8, TOKENS, ("vllm",), 1.1, True),
    Aim("small, 32 at a time: output tokens/s", "small", 32, TOKENS, ("vllm",), 1.1, True),
    Aim("small, TTFT of a 128-token prompt", "small", 1, TTFT, ("vllm",), 1.0, False),
)
START_AIM, MEMORY_AIM = 0.15, 0.6
OTHER_FIGURES = (TTFT, TPOT, "mean_itl_ms", "median_itl_ms", "p99_itl_ms")


class Ratio(NamedTuple):
    """Ours divided by the peer, round by round."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}..{self.high:.3g}]"


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Ratio | None:
    """None when there is nothing to divide."""
    found = [a / b for a, b in zip(ours, peer, strict=True) if b]
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def paired(runs: Runs, one: str, other: str, metric: str) -> Ratio | None:
    """The ratio of two sides over the rounds that both have."""
    a, b = ({run["round"]: run[metric] for run in runs.get(side, ()) if metric in run} for side in (one, other))
    both = sorted(a.keys() & b.keys())
    return ratios([a[k] for k in both], [b[k] for k in both])


def middle(runs: Runs, side: str, metric: str) -> float | None:
    values = [run[metric] for run in runs.get(side, ()) if metric in run]
    return statistics.median(values) if values else None


def best(runs: Runs, families: Sequence[str], metric: str, higher: bool) -> str | None:
    """The strongest side of those engines by its median; "vllm-uni1" is of the engine "vllm"."""
    found = {
        side: value
        for side in runs
        if side.partition("-")[0] in families and (value := middle(runs, side, metric)) is not None
    }
    return (max if higher else min)(found, key=lambda side: found[side]) if found else None


def verdict(ratio: Ratio, bound: float, higher: bool) -> str:
    """Met in every round, met by the median alone, or missed by how much."""
    sign = 1 if higher else -1
    worst = ratio.low if higher else ratio.high
    if sign * worst >= sign * bound:
        return "met"
    if sign * ratio.median >= sign * bound:
        return f"met by the median, not by every round (worst {worst:.3g})"
    short = (bound - ratio.median) * sign / bound
    return f"missed: {ratio.median:.3g} is {short:.0%} {'below' if higher else 'above'} {bound:g}"


def bound_text(bound: float, higher: bool) -> str:
    return f"{'≥' if higher else '≤'} {bound:g}"


def row(*cells: object) -> str:
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def aims_table(result: Mapping[str, Any]) -> list[str]:
    """The table of aims; a row that was not measured says so."""
    lines = [
        row("work", "beside", "aim", "ours", "peer", "ours/peer", "rounds", ""),
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for aim in AIMS:
        runs = runs_of(result, aim.model, aim.concurrency)
        side = best(runs, aim.beside, aim.metric, aim.higher)
        ratio = paired(runs, OURS, side, aim.metric) if side else None
        goal = bound_text(aim.bound, aim.higher)
        if side is None or ratio is None:
            lines.append(row(aim.work, "/".join(aim.beside), goal, None, None, None, 0, "not measured"))
            continue
        values = [number(middle(runs, name, aim.metric)) for name in (OURS, side)]
        told = verdict(ratio, aim.bound, aim.higher)
        lines.append(row(aim.work, side, goal, *values, ratio, ratio.rounds, told))
    return [*lines, *resource_rows(result)]


def resource_rows(result: Mapping[str, Any]) -> list[str]:
    """Start and memory, for each model that was started."""
    lines = []
    for model, starts in result.get("starts", {}).items():
        lines += resource_row(f"{model}: seconds from start to ready", starts, "ready_s", START_AIM, 1.0)
    for point in ("ready", "after load", "KV filled"):
        for model, sides in result.get("memory", {}).items():
            runs = {side: [{"round": 0, **at[point]}] for side, at in sides.items() if point in at}
            lines += resource_row(f"{model}: resident GiB (PSS), {point}", runs, "pss", MEMORY_AIM, 2.0**30)
    return lines


def resource_row(work: str, runs: Runs, metric: str, bound: float, unit: float) -> list[str]:
    side = best(runs, ("vllm",), metric, higher=False)
    ratio = paired(runs, OURS, side, metric) if side else None
    if side is None or ratio is None:
        return []
    values = [number((middle(runs, name, metric) or 0.0) / unit) for name in (OURS, side)]
    return [row(work, side, bound_text(bound, False), *values, ratio, ratio.rounds, verdict(ratio, bound, False))]


def runs_of(result: Mapping[str, Any], model: str, concurrency: int) -> Runs:
    found: Runs = {}
    for case in result["cases"]:
        if (case["model"], case["concurrency"]) == (model, concurrency):
            found = case["runs"]
    return found


def figures_table(result: Mapping[str, Any]) -> list[str]:
    """Every side of every case: medians of the rounds, and its ratio."""
    lines = [
        row(
            "case",
            "side",
            "tok/s",
            "TTFT p50",
            "TPOT",
            "ITL mean",
            "p50",
            "p99",
            "cores",
            "others",
            "client",
            "ours/it tok/s",
            "TPOT",
        ),
        "|---|---|" + "---:|" * 11,
    ]
    for case in result["cases"]:
        runs = case["runs"]
        for side in runs:
            values = [number(middle(runs, side, metric)) for metric in (TOKENS, *OTHER_FIGURES)]
            shares = [number(middle(runs, side, metric)) for metric in ("server_cores", "other_cores", "client_cores")]
            against = [None if side == OURS else paired(runs, OURS, side, metric) for metric in (TOKENS, TPOT)]
            lines.append(row(f"{case['model']} {case['concurrency']}", side, *values, *shares, *against))
    return lines


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know: noise, bandwidth, runs that do not count, what each side is."""
    lines = []
    for case in result["cases"]:
        name = f"{case['model']}, {case['concurrency']} at a time"
        if ratio := paired(case["runs"], AGAIN, OURS, TOKENS):
            lines.append(f"{name}: ours against itself {ratio} in tokens/s: less than that is noise")
        if roof := case.get("roofline"):
            lines.append(f"{name}: {roofline_text(case, roof)}")
        lines += [f"{name}: {text}" for text in case["problems"]]
        busy = [run["busy_before"] for runs in case["runs"].values() for run in runs if run["busy_before"] is not None]
        if busy and max(busy) > 0.1:
            lines.append(f"{name}: other work kept up to {max(busy):.0%} of the machine busy before a run")
    lines += [f"{side}, {model}: {text}" for model, sides in result["tokens"].items() for side, text in sides.items()]
    return lines + [f"{side}: {text}" for side, text in result.get("sides", {}).items()]


def roofline_text(case: Mapping[str, Any], roof: Mapping[str, float]) -> str:
    """Tokens a second of batch-1 decoding (1 / TPOT) as a share of what reading the weights allows."""
    bounds = [roof[when] * 1e9 / roof["bytes_per_token"] for when in ("before_gb_s", "after_gb_s")]
    shares = []
    for side in case["runs"]:
        tpot = middle(case["runs"], side, TPOT)
        if tpot:
            shares.append(f"{side} {1e3 / tpot / bounds[0]:.2f}/{1e3 / tpot / bounds[1]:.2f}")
    return (
        f"read bandwidth {roof['before_gb_s']:.1f} GB/s before, {roof['after_gb_s']:.1f} after, so at most "
        f"{bounds[0]:.1f}/{bounds[1]:.1f} tokens/s; share reached: {', '.join(shares)}"
    )


def markdown(result: Mapping[str, Any]) -> str:
    told = [f"- {line}" for line in notes(result)]
    units = "Times in ms, medians of the rounds; processor time in cores: the server, the other servers, the client."
    return "\n".join([*aims_table(result), "", units, "", *figures_table(result), "", *told]) + "\n"
