"""The block of results that the ecosystem's parsers know: labels in 40 columns, sections in 50."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gapless.lab.datasets import Prompt
from gapless.lab.load import SideResult
from gapless.lab.records import LoadRun
from gapless.lab.summary import LoadSummary, percent_word

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


def row(label: str, value: int | float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {shown}"


def block(
    summary: LoadSummary,
    metrics: Sequence[str],
    *,
    concurrency: int | None = None,
    rate: float = math.inf,
    side: SideResult | None = None,
) -> Iterator[str]:
    """Yield the lines of the block."""
    yield f"{' Serving Benchmark Result ':=^50}"
    yield row("Successful requests:", summary.completed)
    yield row("Failed requests:", summary.failed)
    if concurrency is not None:
        yield row("Maximum request concurrency:", concurrency)
    if not math.isinf(rate):
        yield row("Request rate configured (RPS):", float(rate))
    yield row("Benchmark duration (s):", summary.duration)
    yield row("Total input tokens:", summary.input_tokens)
    yield row("Total generated tokens:", summary.output_tokens)
    yield row("Request throughput (req/s):", summary.request_throughput)
    if summary.goodput is not None:
        yield row("Request goodput (req/s):", summary.goodput)
    yield row("Output token throughput (tok/s):", summary.output_throughput)
    yield row("Peak output token throughput (tok/s):", summary.peak_tokens)
    yield row("Peak concurrent requests:", float(summary.peak_concurrency))
    yield row("Total token throughput (tok/s):", summary.total_throughput)
    yield from _side_lines(side) if side else ()
    for name in metrics:
        short, title = TITLES[name]
        found = summary.spreads[name]
        yield f"{title:-^50}"
        yield row(f"Mean {short} (ms):", found.mean)
        yield row(f"Median {short} (ms):", found.median)
        for p, value in found.percentiles:
            yield row(f"P{percent_word(p)} {short} (ms):", value)
    yield f"{'Load Generator':-^50}"
    yield row("Median send lag (ms):", summary.lag.p50)
    yield row("P99 send lag (ms):", summary.lag.p99)
    yield row("Max send lag (ms):", summary.lag.max)
    yield row("P99 event loop delay (ms):", summary.lag.loop_p99)
    yield row("Client processor share (%):", summary.lag.cpu_share * 100)
    yield "=" * 50


def _side_lines(side: SideResult) -> Iterator[str]:
    yield f"{'Probe Requests':-^50}"
    yield row("Probe requests completed:", len(side.latencies))
    yield row("Probe requests failed:", side.failed)
    for name, value in zip(("Median", "P99", "Max"), side.numbers(), strict=True):
        yield row(f"{name} probe E2EL (ms):", value)


def remarks(summary: LoadSummary, run: LoadRun, prompts: Sequence[Prompt], *, exact_outputs: bool) -> list[str]:
    """What a reader must know before believing the block. `exact_outputs`: every answer should have its full length."""
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
    lag, ttft = summary.lag, summary.spreads["ttft"].median
    if lag.p99 > max(LAG_FLOOR_MS, SHARE_THAT_MATTERS * ttft):
        yield (
            f"the client was late: P99 of send lag is {lag.p99:.1f} ms (median TTFT {ttft:.1f} ms), so less load was "
            "offered than planned; use an idle machine, --client-priority rt, or a lower rate"
        )
    step = min((summary.spreads[name].median for name in ("tpot", "itl") if summary.spreads[name].median), default=0.0)
    if lag.loop_p99 > max(LOOP_FLOOR_MS, SHARE_THAT_MATTERS * step):
        yield f"the client read late: times of arrival may be off by {lag.loop_p99:.1f} ms (P99 of event loop delay)"
    if lag.cpu_share > BUSY_CLIENT:
        yield f"the client used {lag.cpu_share:.0%} of a core: it may be the bottleneck"
