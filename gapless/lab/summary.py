"""The numbers of a run of load, and the client's own part in them: under the ecosystem's names, as JSON and as a block.

The block is what the ecosystem's parsers know: labels in 40 columns, sections in 50.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from gapless.base.errors import ConfigError
from gapless.lab.datasets import Prompt
from gapless.lab.records import LoadRun, Sample
from gapless.lab.stats import Spread, percentile

SUMMARY_METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")
GOODPUT = ("ttft", "tpot", "e2el")
MS = 1000.0
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
LAG_FLOOR_MS = 5.0
LOOP_FLOOR_MS = 2.0
SHARE_THAT_MATTERS = 0.1
BUSY_CLIENT = 0.8


class LoadTotals(TypedDict):
    """Counts and rates of a run, by the keys of `vllm bench serve`."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """None where there was no objective"""
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int


class LoadSummary(NamedTuple):
    """One run. Failed requests count in no latency and no throughput."""

    totals: LoadTotals
    spreads: Mapping[str, Spread]
    """Milliseconds, by name of the metric."""
    client: Mapping[str, float]
    """The client's own effect on the figures. `cpu_share` is of one core."""
    input_lens: tuple[int, ...]
    """Prompt tokens by place: the server's count, or the planned length if it sends none."""


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:20"]` -> milliseconds by metric. Raises ConfigError."""
    found = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT or not limit >= 0:
            raise ConfigError(f"goodput takes pairs like ttft:200 (milliseconds) of {', '.join(GOODPUT)}, got {pair!r}")
        found[name] = limit
    return found


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`"50,99.9"` -> (50.0, 99.9). Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= p <= 100 for p in found):
        raise ConfigError(f"metric-percentiles takes numbers from 0 to 100 with commas between, got {text!r}")
    return found


def summarise(
    run: LoadRun,
    prompts: Sequence[Prompt],
    *,
    percents: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> LoadSummary:
    good = [s for s in run.samples if not s.error]
    planned = {prompt.place: prompt.input_len for prompt in prompts}
    lens = tuple(0 if s.error else s.prompt_tokens or planned.get(s.place, 0) for s in run.samples)
    made = sum(s.output_tokens for s in good)
    series = {
        **request_figures(good),
        "client_queue_time": [s.queued * MS for s in good],
        "e2el_including_client_queue": [(s.latency + s.queued) * MS for s in good],
    }

    def rate(count: int) -> float:
        return count / run.duration if run.duration else 0.0

    totals: LoadTotals = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "total_input_tokens": sum(lens),
        "total_output_tokens": made,
        "request_throughput": rate(len(good)),
        "request_goodput": rate(sum(_meets(s, goodput) for s in good)) if goodput and run.duration else None,
        "output_throughput": rate(made),
        "total_token_throughput": rate(sum(lens) + made),
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_concurrency(good),
    }
    return LoadSummary(totals, {name: Spread(values, percents) for name, values in series.items()}, _client(run), lens)


def request_figures(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Milliseconds of each request that succeeded, by METRICS; `itl` of each gap."""
    good = [s for s in samples if not s.error and s.events]
    return {
        "ttft": [s.ttft * MS for s in good],
        "tpot": [s.tpot * MS for s in good if s.output_tokens > 1],
        "itl": [gap * MS for s in good for gap in s.itls],
        "e2el": [s.latency * MS for s in good],
    }


def _meets(sample: Sample, limits: Mapping[str, float]) -> bool:
    seconds = {"ttft": sample.ttft, "tpot": sample.tpot, "e2el": sample.latency}
    return all(seconds[name] * MS <= limit for name, limit in limits.items())


def _client(run: LoadRun) -> dict[str, float]:
    lags = sorted(s.lag * MS for s in run.samples)
    late = sorted(delay * MS for delay in run.client.late)
    return {
        **{f"send_lag_{name}_ms": percentile(lags, p) for name, p in (("p50", 50), ("p99", 99), ("max", 100))},
        **{f"loop_delay_{name}_ms": percentile(late, p) for name, p in (("p99", 99), ("max", 100))},
        "cpu_share": run.client.cpu / run.client.wall if run.client.wall else 0.0,
        "tokens_counted_as_events": sum(s.counted and not s.error for s in run.samples),
    }


def peak_tokens(samples: Sequence[Sample]) -> float:
    """Most tokens in one of the seconds from the first sending on. Every event stands for an equal share of tokens."""
    start = min((s.sent for s in samples), default=0.0)
    buckets: dict[int, float] = {}
    for s in samples:
        for at in s.events:
            second = int(at - start)
            buckets[second] = buckets.get(second, 0.0) + s.output_tokens / len(s.events)
    return max(buckets.values(), default=0.0)


def peak_concurrency(samples: Sequence[Sample]) -> int:
    """Most requests under way at one moment; one that ends at the instant another begins makes room for it."""
    steps = sorted(step for s in samples for step in ((s.sent, 1), (s.ended, -1)))
    return max(itertools.accumulate(step for _, step in steps), default=0)


def result_json(summary: LoadSummary, metrics: Sequence[str]) -> dict[str, Any]:
    """The keys that `vllm bench serve` writes, and `client` for ours."""
    result = dict(summary.totals)
    for name in metrics:
        found = summary.spreads[name]
        result |= {f"mean_{name}_ms": found.mean, f"median_{name}_ms": found.median, f"std_{name}_ms": found.std}
        result |= {f"p{percent_word(p)}_{name}_ms": value for p, value in found.percentiles}
    return {**result, "client": dict(summary.client)}


def figures(summary: LoadSummary) -> dict[str, float]:
    """The figures of a run by their names in the benchmark's JSON; figures without a sample are left out."""
    held = [name for name in SUMMARY_METRICS if summary.spreads[name].n]
    values = result_json(summary, held)
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def detailed_json(summary: LoadSummary, run: LoadRun) -> dict[str, Any]:
    """A list per request each, for --save-detailed. Seconds."""
    samples = run.samples
    return {
        "input_lens": list(summary.input_lens),
        "output_lens": [0 if s.error else s.output_tokens for s in samples],
        "ttfts": [s.ttft if not s.error else 0.0 for s in samples],
        "itls": [list(s.itls) for s in samples],
        "latencies": [s.latency if not s.error else 0.0 for s in samples],
        "start_times": [s.sent for s in samples],
        "queue_times": [s.queued for s in samples],
        "scheduled_times": [s.scheduled for s in samples],
        "send_lags": [s.lag for s in samples],
        "generated_texts": [s.text for s in samples],
        "errors": [s.error for s in samples],
    }


def percent_word(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def block(
    summary: LoadSummary,
    metrics: Sequence[str],
    *,
    concurrency: int | None = None,
    rate: float = math.inf,
    side: Mapping[str, float] | None = None,
) -> Iterator[str]:
    """Yield the lines of the block."""
    totals, client = summary.totals, summary.client
    rows = {
        "Successful requests:": totals["completed"],
        "Failed requests:": totals["failed"],
        "Maximum request concurrency:": concurrency,
        "Request rate configured (RPS):": None if math.isinf(rate) else float(rate),
        "Benchmark duration (s):": totals["duration"],
        "Total input tokens:": totals["total_input_tokens"],
        "Total generated tokens:": totals["total_output_tokens"],
        "Request throughput (req/s):": totals["request_throughput"],
        "Request goodput (req/s):": totals["request_goodput"],
        "Output token throughput (tok/s):": totals["output_throughput"],
        "Peak output token throughput (tok/s):": totals["max_output_tokens_per_s"],
        "Peak concurrent requests:": float(totals["max_concurrent_requests"]),
        "Total token throughput (tok/s):": totals["total_token_throughput"],
    }
    yield f"{' Serving Benchmark Result ':=^50}"
    yield from _rows({label: value for label, value in rows.items() if value is not None})
    if side:
        yield f"{'Probe Requests':-^50}"
        yield from _rows(
            {
                "Probe requests completed:": side["probe_completed"],
                "Probe requests failed:": side["probe_failed"],
                "Median probe E2EL (ms):": side["probe_median_e2el_ms"],
                "P99 probe E2EL (ms):": side["probe_p99_e2el_ms"],
                "Max probe E2EL (ms):": side["probe_max_e2el_ms"],
            }
        )
    for name in metrics:
        short, title = TITLES[name]
        found = summary.spreads[name]
        yield f"{title:-^50}"
        yield from _rows({f"Mean {short} (ms):": found.mean, f"Median {short} (ms):": found.median})
        yield from _rows({f"P{percent_word(p)} {short} (ms):": value for p, value in found.percentiles})
    yield f"{'Load Generator':-^50}"
    yield from _rows(
        {
            "Median send lag (ms):": client["send_lag_p50_ms"],
            "P99 send lag (ms):": client["send_lag_p99_ms"],
            "Max send lag (ms):": client["send_lag_max_ms"],
            "P99 event loop delay (ms):": client["loop_delay_p99_ms"],
            "Client processor share (%):": client["cpu_share"] * 100,
        }
    )
    yield "=" * 50


def _rows(values: Mapping[str, float]) -> Iterator[str]:
    for label, value in values.items():
        shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
        yield f"{label:<40} {shown}"


def remarks(summary: LoadSummary, run: LoadRun, prompts: Sequence[Prompt], *, exact_outputs: bool) -> list[str]:
    """Caveats for a reader of the block. `exact_outputs`: every answer should have its full length."""
    return [*_failures(run), *_token_remarks(run, prompts, exact_outputs), *_client_remarks(summary)]


def _failures(run: LoadRun) -> Iterator[str]:
    errors = Counter(s.error for s in run.samples if s.error)
    for text, count in errors.most_common(10):
        yield f"{count} failed: {text}"
    if len(errors) > 10:
        yield f"and {len(errors) - 10} other errors; --save-detailed keeps all"


def _token_remarks(run: LoadRun, prompts: Sequence[Prompt], exact_outputs: bool) -> Iterator[str]:
    good = {s.place: s for s in run.samples if not s.error}
    if counted := sum(s.counted for s in good.values()):
        yield f"output tokens of {counted} answers are counted events: the server sent no usage"
    pairs = [(p, good[p.place]) for p in prompts if p.place in good]
    known = [(p.input_len, s.prompt_tokens) for p, s in pairs if p.input_len and s.prompt_tokens]
    offsets = Counter(counted - planned for planned, counted in known)
    if set(offsets) == {0} or not known:
        pass
    elif len(offsets) == 1:
        yield f"the server counts {next(iter(offsets)):+d} tokens in every prompt (a chat template, or a BOS token)"
    else:
        off = sum(count for offset, count in offsets.items() if offset)
        span = f"{min(offsets):+d} to {max(offsets):+d}"
        yield f"{off} of {len(known)} prompts have not the planned length: {span} tokens by the server's count"
    if exact_outputs and (short := sum(s.output_tokens < p.output_len for p, s in pairs if not s.counted)):
        yield f"{short} of {len(pairs)} answers are shorter than asked: the server does not heed ignore_eos"
    bundled = sum(s.output_tokens for s in good.values()) / max(1, sum(len(s.events) for s in good.values()))
    if bundled > 1.2:
        yield f"an event carries {bundled:.1f} tokens on average: read TPOT, since ITL is not per token"


def _client_remarks(summary: LoadSummary) -> Iterator[str]:
    client, ttft = summary.client, summary.spreads["ttft"].median
    lag, delay, share = client["send_lag_p99_ms"], client["loop_delay_p99_ms"], client["cpu_share"]
    if lag > max(LAG_FLOOR_MS, SHARE_THAT_MATTERS * ttft):
        yield (
            f"the client was late: P99 of send lag is {lag:.1f} ms (median TTFT {ttft:.1f} ms), so less load was "
            "offered than planned; use an idle machine, --client-priority rt, or a lower rate"
        )
    step = min((summary.spreads[name].median for name in ("tpot", "itl") if summary.spreads[name].median), default=0.0)
    if delay > max(LOOP_FLOOR_MS, SHARE_THAT_MATTERS * step):
        yield f"the client read late: times of arrival may be off by {delay:.1f} ms (P99 of event loop delay)"
    if share > BUSY_CLIENT:
        yield f"the client used {share:.0%} of a core: it may be the bottleneck"
