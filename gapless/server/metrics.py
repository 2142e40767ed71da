"""The /metrics page: the ecosystem's `vllm:` series for what exists here, and our own under `gapless:`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from gapless.engine.outputs import RequestMetrics
from gapless.engine.seam import EngineInfo
from gapless.engine.series import COUNTER, GAUGE, HISTOGRAM, LOWER, NS, SERIES, SUMMARY, Series, SeriesKind
from gapless.engine.stats import Stats
from gapless.server.kv_events import EventCounts

_SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *_SECONDS, 160, 640, 2560)
_USUAL_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *_SECONDS)
# The usual bounds are blind below 10 ms; ours include all of them, so that existing queries still work.
_ITL = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, *_USUAL_ITL)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
# A short queue differs from none.
_QUEUE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_LATENCY)
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_COUNTS = (1, 2, 5, 10, 20, 64)
POWERS = 15
"""Bounds of a histogram by powers of two"""
FAMILIES: dict[SeriesKind, Callable[..., Metric]] = {
    GAUGE: GaugeMetricFamily,
    COUNTER: CounterMetricFamily,
    SUMMARY: SummaryMetricFamily,
}
Labels = tuple[str, ...]
OF_ENGINES = [
    Series("gapless:engine_up", GAUGE, "1 while the engine takes requests.", "up"),
    Series("gapless:placed_requests", COUNTER,
        "Requests that an engine of several got: by their rank, since another died, for their prefix, or as the one "
        "with the fewest.", "placed", "by"),
]  # fmt: skip
"""Series of each engine: their paths begin at its EngineNumbers."""
FRONT = [
    Series("gapless:adapters", GAUGE, "Adapters that requests may ask for.", "adapters"),
    Series("gapless:gpu_busy_ratio", GAUGE, "Share of the last seconds in which steps ran.", "busy_ratio"),
    Series("gapless:step_seconds", SUMMARY, "Time of all steps by phase; forward is the device's.", "phases", "phase",
        total="stats.steps.steps"),
    Series("vllm:request_success", COUNTER, "Sequences ended.", "metrics.finished", "finished_reason"),
    Series("vllm:admission_rejections", COUNTER, "Requests refused.", "metrics.rejected", "reason"),
    Series("gapless:requests_resumed", COUNTER,
        "Requests open when an engine died, by their end: finished by the next, aborted, or lost.",
        "metrics.resumed", "outcome"),
    Series("gapless:adapter_requests", COUNTER, "Requests that ended, by adapter.", "metrics.by_adapter", "adapter"),
    Series("gapless:kv_event_batches", COUNTER,
        "Batches of KV events by what became of them; lost ones found the queue full.", "event_batches", "outcome"),
    Series("gapless:kv_event_batches_held", GAUGE,
        "Batches of KV events that wait for their turn, and those that can be asked for again.", "held_batches",
        "place"),
]  # fmt: skip
"""Series of the front's own numbers: their paths begin at a _Page."""
BUSY_SECONDS = 10.0
"""The busy ratio is a mean over at least this time."""


class Histogram:
    """Counts observations per bucket; they are summed up only for a page.

    A histogram of prometheus_client takes three times as long to observe a value, and every token is observed.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations so far: one number for each bound, and the number above the last."""
        return tuple(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def take(self) -> tuple[tuple[int, ...], float]:
        """Return the counts so far and their sum, and begin again at zero."""
        taken = self.counts, self._sum
        self._counts, self._sum = [0] * len(self._counts), 0.0
        return taken

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add what another histogram of these bounds took."""
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        self._sum += total

    def family(self, labels: Mapping[str, str]) -> Metric:
        """Return the counts so far as a family with one set of labels."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        bounds = (*map(str, self._bounds), "+Inf")
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class MovedCounts(NamedTuple):
    """Counts of one front since the last time, for the front whose page shows it."""

    histograms: tuple[tuple[tuple[int, ...], float], ...]
    """(observations for each bound and above the last, their sum), in the order of Metrics.histograms"""
    counters: tuple[dict[str, int], ...]
    """finished, rejected, by_adapter and resumed of Metrics"""
    http: tuple[tuple[tuple[str, str, str], int], ...]


class Metrics:
    """Counts what the HTTP side sees. The loop's own numbers come in as Stats when a page is rendered."""

    def __init__(self, model_name: str, engines: int = 1) -> None:
        self.labels = {"model_name": model_name, "engine": "0" if engines == 1 else "all"}
        self.histograms: list[Histogram] = []
        make = self._histogram
        self.time_to_first_token = make("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.inter_token_latency = make("inter_token_latency_seconds", "Between tokens of one request.", _ITL)
        self.e2e_latency = make("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.queue_time = make("request_queue_time_seconds", "From arrival to the first step.", _QUEUE)
        self.prompt_tokens = make("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = make("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.params_n = make("request_params_n", "Completions asked for.", _COUNTS)
        self.params_max_tokens = make("request_params_max_tokens", "max_tokens if it was given.", _TOKENS)
        text = "Tokens of the longest completion."
        self.max_generation_tokens = make("request_max_num_generation_tokens", text, _TOKENS)
        text = "Prompt tokens not found in the cache."
        self.prefill_computed = make("request_prefill_kv_computed_tokens", text, _TOKENS)
        text = "Mean time of a later token."
        self.time_per_output_token = make("request_time_per_output_token_seconds", text, _ITL)
        text = "From the queue to the last token."
        self.inference_time = make("request_inference_time_seconds", text, _LATENCY)
        self.prefill_time = make("request_prefill_time_seconds", "From the queue to the first token.", _LATENCY)
        self.decode_time = make("request_decode_time_seconds", "From the first token to the last.", _LATENCY)
        self.preemptions = make("request_num_preemptions", "How often a request went back to the queue.", _COUNTS)
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.rejected: Counter[str] = Counter()
        self.by_adapter: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter(dict.fromkeys(("finished", "aborted", "lost"), 0))
        self.http: Counter[tuple[str, str, str]] = Counter()
        """(handler, method, '2xx') to the number of answers."""
        self.kv_events: Callable[[], EventCounts] | None = None
        """Counts of KV events, if they are published."""
        self.busy_looks: deque[tuple[float, int, int]] = deque()

    def take(self) -> MovedCounts:
        """Return the counts so far, and begin again at zero."""
        http, self.http = tuple(self.http.items()), Counter()
        named = tuple(dict(counter) for counter in self._named)
        for counter in self._named:
            counter.clear()
        return MovedCounts(tuple([histogram.take() for histogram in self.histograms]), named, http)

    def add(self, moved: MovedCounts) -> None:
        """Add what another front took."""
        for histogram, (counts, total) in zip(self.histograms, moved.histograms, strict=True):
            histogram.add(counts, total)
        for counter, counted in zip(self._named, moved.counters, strict=True):
            counter.update(counted)
        self.http.update(dict(moved.http))

    @property
    def _named(self) -> tuple[Counter[str], ...]:
        return self.finished, self.rejected, self.by_adapter, self.resumed

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        self.histograms.append(Histogram(f"vllm:{name}", text, bounds))
        return self.histograms[-1]

    def observe_start(self, times: RequestMetrics) -> None:
        """Count a request's waits in the queue and for its first token, as far as they have ended."""
        if times.queue_seconds is not None:
            self.queue_time.observe(times.queue_seconds)
        if times.time_to_first_token is not None:
            self.time_to_first_token.observe(times.time_to_first_token)

    def observe_request(self, times: RequestMetrics, completions: int, computed: int) -> None:
        """Count the times of an ended request. The prefix cache lacked `computed` of its prompt tokens."""
        later = times.generation_tokens / completions - 1  # of each completion, on average
        if times.generation_seconds is not None and later > 0:
            self.time_per_output_token.observe(times.generation_seconds / later)
        for histogram, seconds in (
            (self.inference_time, times.inference_seconds),
            (self.prefill_time, times.prefill_seconds),
            (self.decode_time, times.generation_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if times.started:
            self.preemptions.observe(times.preemptions)
            self.prefill_computed.observe(computed)

    def render(
        self,
        stats: Stats,
        info: EngineInfo | None,
        up: bool,
        detok_seconds: float = 0.0,
        engines: Sequence[EngineNumbers] = (),
    ) -> bytes:
        """Return the page. `info` is None until the engine has started once. If there are several `engines`, the
        numbers are sums, and the front's own series have the label engine="all"."""
        return generate_latest(_Page(self, EngineNumbers(stats, info, up), detok_seconds, engines))

    def busy_ratio(self, stats: Stats, now: float) -> float:
        """Return the share of busy time in the last BUSY_SECONDS, or since the last look before them."""
        looks, device = self.busy_looks, stats.device
        if not looks or now - looks[-1][0] >= 1.0:
            looks.append((now, device.wall_ns, device.busy_ns))
        while len(looks) > 1 and now - looks[1][0] >= BUSY_SECONDS:
            looks.popleft()
        _, wall, busy = looks[0]
        if len(looks) == 1:  # since the start
            wall = busy = 0
        # No time may have been accounted for: the engine is down.
        return (device.busy_ns - busy) / max(1, device.wall_ns - wall)


class EngineNumbers(NamedTuple):
    """An engine as a page shows it."""

    stats: Stats
    info: EngineInfo | None
    up: bool
    placed: Mapping[str, int] = {}
    """Requests that it got of several engines, by the reason"""


class _Page(Collector):
    """Collects the families of one page."""

    def __init__(
        self, metrics: Metrics, whole: EngineNumbers, detok_seconds: float, engines: Sequence[EngineNumbers]
    ) -> None:
        self.metrics, self.stats, self.info = metrics, whole.stats, whole.info
        self.engines: Mapping[Labels, EngineNumbers] = {
            (str(number),): one for number, one in enumerate(engines or (whole,))
        }
        self.detok_seconds = detok_seconds
        self.event_batches, self.held_batches = metrics.kv_events() if metrics.kv_events else ({}, {})

    @property
    def adapters(self) -> int:
        return len(self.info.adapters) if self.info else 0

    @property
    def busy_ratio(self) -> float:
        return self.metrics.busy_ratio(self.stats, time.monotonic())

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of all steps by phase"""
        host = {phase: ns / NS for phase, ns in asdict(self.stats.host_ns).items()}
        return {**host, "forward": self.stats.device.busy_ns / NS, "detok": self.detok_seconds}

    def collect(self) -> Iterator[Metric]:
        stats: Mapping[Labels, Stats] = {engine: one.stats for engine, one in self.engines.items()}
        tiers: Mapping[Labels, object] = {
            (*engine, tier): counts
            for engine, one in self.engines.items()
            for tier, counts in zip(one.info.tiers if one.info else (), one.stats.lower, strict=False)
        }
        front: Mapping[Labels, _Page] = {(self.metrics.labels["engine"],): self}
        yield from [self._family(row, stats) for row in SERIES]
        yield from [self._family(row, tiers, "tier") for row in LOWER]
        yield from [self._family(row, self.engines) for row in OF_ENGINES]
        yield from [self._family(row, front) for row in FRONT]
        yield from [histogram.family(self.metrics.labels) for histogram in self.metrics.histograms]
        name = self.metrics.labels["model_name"]
        answers = CounterMetricFamily(
            "http_requests", "HTTP answers.", labels=("handler", "method", "status", "model_name")
        )
        for labels, count in sorted(self.metrics.http.items()):
            answers.add_metric((*labels, name), count)
        yield answers
        if self.info is not None:
            names = ("block_size", "num_gpu_blocks", "cache_dtype", "engine")
            cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=names)
            dtype = self.info.dtype if self.info.kv_cache_dtype == "auto" else self.info.kv_cache_dtype
            for engine, one in self.engines.items():
                pages = one.info.pages if one.info else 0
                cache.add_metric((str(self.info.page_size), str(pages), dtype, *engine), 1)
            yield cache

    def _family(self, row: Series, roots: Mapping[Labels, object], *more: str) -> Metric:
        """Return a row's family. Its paths begin at `roots`, by their values of the labels engine and `more`.
        The page appends `_total` to the names of counters."""
        names, values = [*self.metrics.labels, *more], [self.metrics.labels["model_name"]]
        if row.kind is HISTOGRAM:
            return _by_powers(row, roots, names, values)
        family: Any = FAMILIES[row.kind](row.name, row.text, labels=[*names, row.label] if row.label else names)
        for labels, root in roots.items():
            total = [attrgetter(row.total)(root)] if row.total else []
            for value, number in row.values(root).items():
                family.add_metric([*values, *labels, value] if row.label else [*values, *labels], *total, number)
        found: Metric = family
        return found


def _by_powers(row: Series, roots: Mapping[Labels, object], names: Sequence[str], values: Sequence[str]) -> Metric:
    bounds = [*(str(2.0**power) for power in range(POWERS)), "+Inf"]
    family = HistogramMetricFamily(row.name, row.text, labels=names)
    for labels, stats in roots.items():
        counts = [*row.values(stats).values()]
        below = [sum(counts[: power + 1]) for power in range(POWERS)]
        buckets = list(zip(bounds, [*below, sum(counts)], strict=True))
        family.add_metric([*values, *labels], buckets, attrgetter(row.total)(stats))
    return family
