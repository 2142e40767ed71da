"""The /metrics page: the ecosystem's `vllm:` series for what exists here, and our own under `gapless:`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

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
from gapless.engine.seam import GAUGES, EngineInfo, Stats
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
_STEP_TOKENS = tuple(2**power for power in range(15))
COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
MetricFamily = type[CounterMetricFamily | GaugeMetricFamily]
_FIELDS = {
    "vllm:num_requests_running": ("running", "Requests in a batch now."),
    "vllm:num_requests_waiting": ("waiting", "Requests in the queue."),
    "gapless:steps_in_flight": ("in_flight", "Steps launched, not settled."),
    "gapless:depth": ("depth", "Steps in flight allowed."),
    "gapless:kv_tier_slots": ("tier_slots", "Pages of which the host tier can hold a copy."),
    "gapless:kv_tier_used": ("tier_used", "Pages of which the host tier holds a copy."),
    "gapless:kv_tier_pinned": ("tier_pinned", "Copies, borrowed ones too, that transfers, tiers below or peers use."),
    "gapless:grammars_waiting": ("grammars_waiting", "Requests whose form of output is being compiled."),
    "vllm:prompt_tokens": ("admitted_tokens", "Prompt tokens of requests that left the queue, cached or not."),
    "vllm:prompt_tokens_cached": ("admitted_cached", "Of these, the ones found in the prefix cache."),
    "vllm:generation_tokens": ("generation_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "vllm:num_preemptions": ("preemptions", "Requests put back to the queue."),
    "gapless:prefill_tokens": ("prompt_tokens", "Tokens that prefill computed; after a preemption they count again."),
    "gapless:dropped_identity": ("dropped_identity", "Outbox entries of rows that were reused."),
    "gapless:captures_refused": ("captures_refused", "Graphs whose capture failed; their programs run eagerly."),
    "gapless:chained_steps": ("chained_steps", "Steps enqueued in one visit of the host with the step before."),
    "gapless:grammar_held_rows": ("held_rows", "Rows that a step held, since their grammar's mask was late."),
    "gapless:grammar_masks": ("masks", "Masks written from grammars."),
    "vllm:spec_decode_num_drafts": ("drafts", "Rows that ran drafts, each step for itself."),
    "vllm:spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens that were verified."),
    "gapless:device_allocations": (
        "device_allocations",
        "Device memory taken from the driver, or given back, since ready: each time the device had to be idle.",
    ),
    "gapless:kv_tier_late": ("tier_late", "Requests that stopped waiting for a load from the host tier, and computed."),
    "gapless:kv_tier_slower": ("tier_slower", "Loads that were not begun: computing takes less."),
    "gapless:grammar_hits": ("grammar_hits", "Requests whose form of output had been compiled for another."),
    "gapless:grammars_refused": (
        "grammars_refused",
        "Requests whose form of output could not be compiled, or in time.",
    ),
}
"""Series that show one field of Stats, and their help texts."""
_LOWER = {
    "gapless:kv_lower_tier_pages": (
        "Pages by what a tier below the host tier did with them; refused ones were loaded, and not what was stored. Of "
        "the loaded ones, those lent were read where a peer has them.",
        "event",
        {"hit": "hits", **{event: event for event in ("missed", "stored", "loaded", "lent", "refused")}},
    ),
    "gapless:kv_lower_tier_dropped": (
        "Pages that a tier below the host tier does not get.",
        "reason",
        {reason: f"dropped_{reason}" for reason in ("busy", "slow", "gone", "failed")},
    ),
    "gapless:kv_lower_tier_moving": (
        "Pages that a tier below the host tier loads and stores now, and those that wait for their store; quarantined: "
        "pages of loads that no request waits for and that have not ended.",
        "state",
        {state: state for state in ("loading", "quarantined", "storing", "waiting")},
    ),
    "gapless:kv_lower_tier_room_bytes": (
        "Bytes of pages in a tier below the host tier, and how many it may keep; 0 if it does not say.",
        "kind",
        {"used": "used_bytes", "size": "size_bytes"},
    ),
    "gapless:kv_lower_tier_seconds": (
        "Time that loads from and stores to a tier below the host tier took.",
        "direction",
        {"read": "read_ns", "written": "written_ns"},
    ),
    "gapless:kv_lower_tier_bytes": (
        "Bytes to and from a tier below the host tier.",
        "direction",
        {"read": "read_bytes", "written": "written_bytes"},
    ),
    "gapless:kv_lower_tier_waits": (
        "Waits for a tier below the host tier that brought less than it had: loads that failed or were cancelled, "
        "requests that gave up.",
        "outcome",
        {outcome: outcome for outcome in ("failed", "cancelled", "late")},
    ),
}
"""Series by tier: the help text, the second label, and its values with the ends of the fields."""
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

    def load(self, powers: Sequence[int], total: int) -> None:
        """Add counts by powers of two: entry b counts values above 2**(b - 1) and up to 2**b."""
        for power, count in enumerate(powers):
            self._counts[bisect_left(self._bounds, 2.0**power)] += count
        self._sum += total

    def family(self, labels: Mapping[str, str]) -> Metric:
        """Return the counts so far as a family with one set of labels."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        bounds = (*map(str, self._bounds), "+Inf")
        family.add_metric(list(labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class Metrics:
    """Counts what the HTTP side sees. The loop's own numbers come in as Stats when a page is rendered."""

    def __init__(self, model_name: str) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
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
        self.http: Counter[tuple[str, str, str]] = Counter()
        """(handler, method, '2xx') to the number of answers."""
        self.kv_events: Callable[[], EventCounts] | None = None
        """Counts of KV events, if they are published."""
        self.busy_looks: deque[tuple[float, int, int]] = deque()

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

    def render(self, stats: Stats, info: EngineInfo | None, up: bool, detok_seconds: float = 0.0) -> bytes:
        """Return the page. `info` is None until the engine has started once."""
        return generate_latest(_Page(self, stats, info, up, detok_seconds))

    def busy_ratio(self, stats: Stats, now: float) -> float:
        """Return the share of busy time in the last BUSY_SECONDS, or since the last look before them."""
        looks = self.busy_looks
        if not looks or now - looks[-1][0] >= 1.0:
            looks.append((now, stats.wall_ns, stats.busy_ns))
        while len(looks) > 1 and now - looks[1][0] >= BUSY_SECONDS:
            looks.popleft()
        _, wall, busy = looks[0]
        if len(looks) == 1:  # since the start
            wall = busy = 0
        # No time may have been accounted for: the engine is down.
        return (stats.busy_ns - busy) / max(1, stats.wall_ns - wall)


class _Page(Collector):
    """Collects the families of one page."""

    def __init__(self, metrics: Metrics, stats: Stats, info: EngineInfo | None, up: bool, detok_seconds: float) -> None:
        self._metrics, self._stats, self._info, self._up = metrics, stats, info, up
        self._detok_seconds = detok_seconds
        self._names, self._values = list(metrics.labels), list(metrics.labels.values())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for name, (field, text) in _FIELDS.items():
            yield self._one(_kind(field), name, text, getattr(stats, field))
        yield from self._host_tier()
        yield from self._lower_tiers()
        yield from self._kv_events()
        yield from self._steps()
        yield from self._requests()
        yield from self._times()
        yield from self._config()

    def _host_tier(self) -> Iterator[Metric]:
        stats = self._stats
        events = self._fields("tier", "hit", "missed", "stored", "loaded", "refused", "evicted")
        text = (
            "Pages by what the host tier did with them. A prompt's pages that the device lacked are hit, or missed and "
            "computed; refused ones were loaded, and not what had been stored."
        )
        yield self._by("event", COUNTER, "gapless:kv_tier_pages", text, events)
        dropped = self._fields("tier_dropped", "full", "gone", "failed")
        text = "Pages without a copy in the host tier."
        yield self._by("reason", COUNTER, "gapless:kv_tier_dropped", text, dropped)
        moving = {"read": stats.tier_loading, "written": stats.tier_storing}
        yield self._by("direction", GAUGE, "gapless:kv_tier_moving", "Pages between host tier and device.", moving)
        nbytes = {"read": stats.tier_read_bytes, "written": stats.tier_written_bytes}
        text = "Bytes read from and written to the host tier."
        yield self._by("direction", COUNTER, "gapless:kv_tier_bytes", text, nbytes)
        seconds = {"read": stats.tier_read_ns / 1e9, "written": stats.tier_written_ns / 1e9}
        text = "Time that transfers between host tier and device took, beside the steps."
        yield self._by("direction", COUNTER, "gapless:kv_tier_seconds", text, seconds)

    def _lower_tiers(self) -> Iterator[Metric]:
        """Yield what the tiers below the host tier do: series without values where there are none."""
        for name, (text, label, ends) in _LOWER.items():
            kind = _kind(f"lower_{next(iter(ends.values()))}")
            family = kind(name, text, labels=[*self._names, "tier", label])
            for value, end in ends.items():
                counts = getattr(self._stats, f"lower_{end}")
                for tier, count in zip(self._info.tiers if self._info else (), counts, strict=False):
                    family.add_metric([*self._values, tier, value], count / 1e9 if end.endswith("_ns") else count)
            yield family

    def _kv_events(self) -> Iterator[Metric]:
        """Yield how the batches of KV events fare: series without values where none are published."""
        batches, held = self._metrics.kv_events() if self._metrics.kv_events else ({}, {})
        text = "Batches of KV events by what became of them; lost ones found the queue full."
        yield self._by("outcome", COUNTER, "gapless:kv_event_batches", text, batches)
        text = "Batches of KV events that wait for their turn, and those that can be asked for again."
        yield self._by("place", GAUGE, "gapless:kv_event_batches_held", text, held)

    def _steps(self) -> Iterator[Metric]:
        """Yield the figures derived from the loop's numbers."""
        stats = self._stats
        yield self._one(GAUGE, "gapless:engine_up", "1 while the engine takes requests.", int(self._up))
        used = (stats.pages_owned + stats.pages_fenced) / max(1, stats.pages_total)
        yield self._one(GAUGE, "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        name, text = "vllm:num_requests_waiting_by_reason", "Requests in the queue, by what they wait for."
        yield self._by("reason", GAUGE, name, text, {"capacity": stats.waiting})
        steps = self._fields("steps", "decode", "prefill", "mixed")
        yield self._by("kind", COUNTER, "gapless:steps", "Steps settled.", steps)
        declined = self._fields("declined", "depth", "ring", "capture", "queue")
        yield self._by("cause", COUNTER, "gapless:declined_launches", "Launches put off.", declined)
        over, text = self._fields("over_itl", "rows", "chunk", "late"), "Steps of decoding rows longer than max_itl."
        yield self._by("cause", COUNTER, "gapless:steps_over_max_itl", text, over)
        pages = self._fields("pages", "free", "cached", "owned", "fenced")
        yield self._by("state", GAUGE, "gapless:kv_pages", "KV pages by state.", pages)
        cached, loaded = stats.admitted_cached, stats.admitted_loaded
        sources = {"local_cache_hit": cached - loaded, "external_kv_transfer": loaded}
        sources["local_compute"] = stats.admitted_tokens - cached
        text = "Prompt tokens by where their KV came from."
        yield self._by("source", COUNTER, "vllm:prompt_tokens_by_source", text, sources)
        eager = stats.steps - stats.graph_steps - stats.graph_misses
        launches = {"graph": stats.graph_steps, "miss": stats.graph_misses, "eager": eager}
        text = "Steps launched as a graph, eagerly for want of one, or eagerly as all steps of their kind are."
        yield self._by("how", COUNTER, "gapless:launches", text, launches)
        verified = {str(place): count for place, count in enumerate(stats.verified)}
        right = {str(place): count for place, count in enumerate(stats.accepted)}
        text = "Draft tokens that were right."
        yield self._one(COUNTER, "vllm:spec_decode_num_accepted_tokens", text, sum(stats.accepted))
        text = "Draft tokens that were right, by their place. A place that falls far behind is a fault of the drafter."
        yield self._by("position", COUNTER, "vllm:spec_decode_num_accepted_tokens_per_pos", text, right)
        text = "Draft tokens that were verified, by their place."
        yield self._by("position", COUNTER, "gapless:spec_decode_num_draft_tokens_per_pos", text, verified)
        step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        step_tokens.load(stats.step_tokens, stats.step_tokens_sum)
        yield step_tokens.family(self._metrics.labels)

    def _requests(self) -> Iterator[Metric]:
        metrics = self._metrics
        for histogram in metrics.histograms:
            yield histogram.family(metrics.labels)
        yield self._by("finished_reason", COUNTER, "vllm:request_success", "Sequences ended.", metrics.finished)
        yield self._by("reason", COUNTER, "vllm:admission_rejections", "Requests refused.", metrics.rejected)
        text = "Requests that ended, by adapter."
        yield self._by("adapter", COUNTER, "gapless:adapter_requests", text, metrics.by_adapter)
        loaded = len(self._info.adapters) if self._info else 0
        yield self._one(GAUGE, "gapless:adapters", "Adapters that requests may ask for.", loaded)
        name = metrics.labels["model_name"]
        answers = COUNTER("http_requests", "HTTP answers.", labels=("handler", "method", "status", "model_name"))
        for labels, count in sorted(metrics.http.items()):
            answers.add_metric((*labels, name), count)
        yield answers

    def _times(self) -> Iterator[Metric]:
        """Yield the device's and the host's times. The names have GPU, as in dashboards; a CPU counts as a device."""
        stats = self._stats
        idle = {cause: ns / 1e9 for cause, ns in stats.idle_ns.items()}
        no_work, busy = idle.pop("no_work"), stats.busy_ns / 1e9
        yield self._one(COUNTER, "gapless:gpu_busy_seconds", "Steps ran.", busy)
        yield self._one(COUNTER, "gapless:gpu_idle_seconds", "There was nothing to run.", no_work)
        text = "No step ran although there was work, by cause."
        yield self._by("cause", COUNTER, "gapless:gpu_bubble_seconds", text, idle)
        text = "From looking at a token to the mask of the next one."
        yield self._one(COUNTER, "gapless:grammar_mask_seconds", text, stats.mask_ns / 1e9)
        ratio = self._metrics.busy_ratio(stats, time.monotonic())
        yield self._one(GAUGE, "gapless:gpu_busy_ratio", "Share of the last seconds in which steps ran.", ratio)
        text = "Time to compile a form of output."
        compiled = SummaryMetricFamily("gapless:grammar_compile_seconds", text, labels=self._names)
        compiled.add_metric(self._values, stats.grammars_compiled, stats.grammars_ns / 1e9)
        yield compiled
        phases = {phase: ns / 1e9 for phase, ns in stats.host_ns.items()}
        phases |= {"forward": busy, "detok": self._detok_seconds}
        text = "Time of all steps by phase; forward is the device's."
        seconds = SummaryMetricFamily("gapless:step_seconds", text, labels=[*self._names, "phase"])
        for phase, value in sorted(phases.items()):
            seconds.add_metric([*self._values, phase], stats.steps, value)
        yield seconds

    def _config(self) -> Iterator[Metric]:
        info = self._info
        if info is None:
            return
        labels = ("block_size", "num_gpu_blocks", "cache_dtype", "engine")
        family = GAUGE("vllm:cache_config_info", "The KV cache's settings.", labels=labels)
        family.add_metric((str(info.page_size), str(info.pages), info.dtype, "0"), 1)
        yield family

    def _fields(self, start: str, *ends: str) -> dict[str, int]:
        """Return the fields of Stats whose names begin and end so, by their ends."""
        return {end: getattr(self._stats, f"{start}_{end}") for end in ends}

    def _one(self, kind: MetricFamily, name: str, text: str, value: float) -> Metric:
        """Return a family with one value. The page appends `_total` to the names of counters."""
        family = kind(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _by(self, label: str, kind: MetricFamily, name: str, text: str, values: Mapping[str, float]) -> Metric:
        """Return a family with one value for each key, which `label` holds."""
        family = kind(name, text, labels=[*self._names, label])
        for key, value in sorted(values.items()):
            family.add_metric([*self._values, key], value)
        return family


def _kind(field: str) -> MetricFamily:
    return GAUGE if field in GAUGES else COUNTER
