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
LATENCIES = tuple(f"{at}_{name}_ms" for name in ("ttft", "tpot", "itl") for at in ("median", "p99"))
GOODPUT = "request_goodput"
COMPARED = ((TOKENS, "tokens/s"), (TTFT, "TTFT p50"), ("p99_ttft_ms", "TTFT p99"), ("median_tpot_ms", "TPOT p50"))
COMPARED += (("p99_tpot_ms", "TPOT p99"), ("p99_itl_ms", "ITL p99"), (GOODPUT, "goodput"))
"""Metrics of ours and a peer in rows of several kinds; more is better for the first and the last."""
MORE_IS_BETTER = (TOKENS, GOODPUT)
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
    """Return the ratio; None if there is nothing to divide."""
    found = [a / b for a, b in zip(ours, peer, strict=True) if b]
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def paired(runs: Runs, one: str, other: str, metric: str) -> Ratio | None:
    """The ratio of two sides over the rounds that both have."""
    a, b = (
        {run["round"]: run[metric] for run in runs.get(side, ()) if run.get(metric) is not None}
        for side in (one, other)
    )
    both = sorted(a.keys() & b.keys())
    return ratios([a[k] for k in both], [b[k] for k in both])


def middle(runs: Runs, side: str, metric: str) -> float | None:
    values = [run[metric] for run in runs.get(side, ()) if run.get(metric) is not None]
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
    if value is None:
        return "-"
    short = float(f"{value:.4g}")
    return f"{short:,.0f}" if short >= 10_000 else f"{short:g}"


def aims_table(result: Mapping[str, Any]) -> list[str]:
    """The table of aims, which are about plain rows, if there are any; one that was not measured says so."""
    lines = [
        row("work", "beside", "aim", "ours", "peer", "ours/peer", "rounds", ""),
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for aim in AIMS if plain_rows(result) else ():
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


def kind_of(case: Mapping[str, Any]) -> str:
    """Return the kind of a row; results from before there were kinds hold plain rows only."""
    return str(case.get("kind", "plain"))


def row_of(case: Mapping[str, Any]) -> tuple[str, int, str]:
    return case["model"], case["concurrency"], kind_of(case)


def row_name(case: Mapping[str, Any]) -> str:
    """Return the name of a row in tables: model, kind, and requests at a time, or a second for an open row."""
    model, concurrency, kind = row_of(case)
    at = f"{case.get('rate', 0.0):.3g}/s" if kind == "open" else concurrency
    return f"{model} {at}" if kind == "plain" else f"{model} {kind} {at}"


def runs_of(result: Mapping[str, Any], model: str, concurrency: int) -> Runs:
    """Return the runs of the plain row of a model, which is the one that aims are about."""
    found: Runs = {}
    for case in result["cases"]:
        if row_of(case) == (model, concurrency, "plain"):
            found = case["runs"]
    return found


def figures_table(result: Mapping[str, Any]) -> list[str]:
    """Every side of every plain row: medians of the rounds, and its ratio."""
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
    for case in plain_rows(result):
        runs = case["runs"]
        for side in runs:
            values = [number(middle(runs, side, metric)) for metric in (TOKENS, *OTHER_FIGURES)]
            shares = [number(middle(runs, side, metric)) for metric in ("server_cores", "other_cores", "client_cores")]
            against = [None if side == OURS else paired(runs, OURS, side, metric) for metric in (TOKENS, TPOT)]
            lines.append(row(row_name(case), side, *values, *shares, *against))
    return lines


def plain_rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [case for case in result["cases"] if kind_of(case) == "plain"]


def other_rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [case for case in result["cases"] if kind_of(case) != "plain"]


def latency_table(result: Mapping[str, Any]) -> list[str]:
    """Every side of every mixed, open and shared row: medians of the rounds."""
    heads = ("tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "goodput/s", "prefix hits", "cores")
    lines = [row("row", "side", *heads, "client"), "|---|---|" + "---:|" * (len(heads) + 1)]
    for case in other_rows(result):
        for side in case["runs"]:
            metrics = (TOKENS, *LATENCIES, GOODPUT, "prefix_hits", "server_cores", "client_cores")
            lines.append(row(row_name(case), side, *(number(middle(case["runs"], side, name)) for name in metrics)))
    return lines


def behind(found: Mapping[str, Ratio | None], kind: str) -> str:
    """The figures in which ours is worse, by the median; those in which every round says so in bold.

    In an open row the load decides the tokens a second, so they say nothing there.
    """
    texts = []
    for metric, name in COMPARED:
        ratio = found.get(metric)
        if ratio is None or (kind == "open" and metric == TOKENS):
            continue
        more = metric in MORE_IS_BETTER
        if (ratio.median < 1.0) if more else (ratio.median > 1.0):
            always = (ratio.high < 1.0) if more else (ratio.low > 1.0)
            texts.append(f"**{name}**" if always else name)
    return ", ".join(texts) or "nothing"


def ratio_table(result: Mapping[str, Any]) -> list[str]:
    """Ours divided by each peer in mixed, open and shared rows, and where ours is worse."""
    heads = [name for _, name in COMPARED]
    lines = [row("row", "ours beside", *heads, "rounds", "ours is behind in"), "|---|---|" + "---:|" * 8 + "---|"]
    for case in other_rows(result):
        for side in case["runs"]:
            if side == OURS:
                continue
            found = {metric: paired(case["runs"], OURS, side, metric) for metric, _ in COMPARED}
            rounds = max((ratio.rounds for ratio in found.values() if ratio), default=0)
            told = "(noise)" if side == AGAIN else behind(found, kind_of(case)) if rounds else "not measured"
            lines.append(row(row_name(case), side, *found.values(), rounds, told))
    return lines


def machine(result: Mapping[str, Any]) -> str:
    """The processor that figures come from, and what was compared, as the line above a table."""
    host, versions = result["host"], result.get("versions", {})
    sets = f" ({' '.join(host['vector'])})" if host.get("vector") else ""
    gpus = f"; {', '.join(host['gpus'])}" if result.get("device") == "cuda" else ""
    sides = ", ".join(f"{side} {versions.get(side, '')}".strip() for side in result.get("sides", {}))
    return f"On {host['cpu']}, {host['cores']} cores{sets}{gpus}: {sides}."


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return remarks on the figures: noise, bandwidth, runs that do not count, versions of the sides."""
    lines = []
    for case in result["cases"]:
        name = row_name(case) if kind_of(case) != "plain" else f"{case['model']}, {case['concurrency']} at a time"
        if ratio := paired(case["runs"], AGAIN, OURS, TOKENS):
            lines.append(f"{name}: ours against itself {ratio} in tokens/s: less than that is noise")
        if found := case.get("capacity"):
            text = ", ".join(f"{side} {value:.3g}" for side, value in found.items())
            lines.append(f"{name}: requests/s in a closed loop of {case['concurrency']}: {text}")
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


UNITS = "Times in ms, medians of the rounds; processor time in cores: the server, the other servers, the client."
OTHER_UNITS = (
    "Times in ms, medians of the rounds; goodput is requests a second within {goals}; prefix hits is the share of the "
    "prompt tokens of a shared row that the prefix cache had: 0 where it is off, - where the server does not say."
)


def markdown(result: Mapping[str, Any]) -> str:
    """All tables, each under a line that names the processor and the versions."""
    lines = [machine(result), "", *aims_table(result), ""]
    if plain_rows(result):
        lines += [f"{machine(result)} {UNITS}", "", *figures_table(result), ""]
    if other_rows(result):
        goals = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in result.get("goodput", {}).items())
        lines += [f"{machine(result)} {OTHER_UNITS.format(goals=goals)}", "", *latency_table(result), ""]
        lines += [f"{machine(result)} Ours divided by the peer; bold: in every round.", "", *ratio_table(result), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(result))]) + "\n"
