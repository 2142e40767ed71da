"""Prometheus text exposition: the ecosystem's `vllm:` series for what exists here, and our own under `gapless:`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from gapless.engine.outputs import RequestMetrics
from gapless.engine.seam import EngineInfo, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The usual bounds begin at 10 ms and are blind below; ours hold all of them, so old queries still work.
_ITL = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 64.0)
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
"""Every bound that dashboards know, and the powers of two between them."""
BUSY_SECONDS = 10.0
"""The busy ratio looks back at least so far."""


class Histogram:
    """Counts of observations per bucket; cumulative only when rendered."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def load(self, powers: Sequence[int], total: int) -> None:
        """Take over counts by powers of two: entry b is of values above 2**(b - 1) and up to 2**b."""
        for power, count in enumerate(powers):
            self._counts[bisect_left(self._bounds, 2.0**power)] += count
        self._sum += total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """What the HTTP side counts itself. The loop's own numbers come in as Stats when rendered."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'model_name="{escape(model_name)}",engine="0"'
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)
        self.e2e_latency = Histogram(_LATENCY)
        self.queue_time = Histogram(_LATENCY)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.params_n = Histogram(_COUNTS)
        self.params_max_tokens = Histogram(_TOKENS)
        self.max_generation_tokens = Histogram(_TOKENS)
        self.prefill_computed = Histogram(_TOKENS)
        self.time_per_output_token = Histogram(_ITL)
        self.inference_time = Histogram(_LATENCY)
        self.prefill_time = Histogram(_LATENCY)
        self.decode_time = Histogram(_LATENCY)
        self.preemptions = Histogram(_COUNTS)
        self.finished: Counter[str] = Counter({reason: 0 for reason in ("stop", "length", "abort", "error")})
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        """(handler, method, '2xx') to the number of answers."""
        self._busy: deque[tuple[float, int, int]] = deque()

    def observe_request(self, times: RequestMetrics, completions: int, computed: int) -> None:
        """The moments of an ended request, `computed` of whose prompt tokens the prefix cache did not hold."""
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
        """The page. `info` is None until the engine has come up once."""
        lines: list[str] = []
        for part in (
            self._loop_lines(stats),
            self._request_lines(),
            self._own_lines(stats, up),
            self._time_lines(stats, detok_seconds),
            self._config(info),
        ):
            lines.extend(part)
        return ("\n".join(lines) + "\n").encode()

    def _loop_lines(self, stats: Stats) -> Iterator[str]:
        used = stats.pages_owned + stats.pages_fenced
        yield from self._one("vllm:num_requests_running", "gauge", "Requests in a batch now.", stats.running)
        yield from self._one("vllm:num_requests_waiting", "gauge", "Requests in the queue.", stats.waiting)
        usage = used / stats.pages_total if stats.pages_total else 0.0
        yield from self._one("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.", usage)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that left the queue, cached or not.", stats.admitted_tokens),
            ("prompt_tokens_cached", "Of these, the ones found in the prefix cache.", stats.admitted_cached),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("num_preemptions", "Requests put back to the queue.", stats.preemptions),
        ):
            yield from self._one(f"vllm:{name}_total", "counter", text, value)
        waiting = {"capacity": stats.waiting}
        name = "vllm:num_requests_waiting_by_reason"
        yield from self._family(name, "Requests in the queue, by what they wait for.", "reason", waiting, "gauge")
        cached = stats.admitted_cached
        sources = {"local_cache_hit": cached, "local_compute": stats.admitted_tokens - cached}
        name = "vllm:prompt_tokens_by_source_total"
        yield from self._family(name, "Prompt tokens by where their KV came from.", "source", sources)
        yield from _head("vllm:iteration_tokens_total", "histogram", "Tokens of a step.")
        yield from self._step_tokens(stats).lines("vllm:iteration_tokens_total", self._labels)

    def _step_tokens(self, stats: Stats) -> Histogram:
        histogram = Histogram(_STEP_TOKENS)
        histogram.load(stats.step_tokens, stats.step_tokens_sum)
        return histogram

    def _request_lines(self) -> Iterator[str]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens of one request.", self.inter_token_latency),
            ("e2e_request_latency_seconds", "From arrival to the end.", self.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step.", self.queue_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", self.generation_tokens),
            ("request_params_n", "Completions asked for.", self.params_n),
            ("request_params_max_tokens", "max_tokens where it was given.", self.params_max_tokens),
            ("request_max_num_generation_tokens", "Tokens of the longest completion.", self.max_generation_tokens),
            ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", self.prefill_computed),
            ("request_time_per_output_token_seconds", "Mean time of a later token.", self.time_per_output_token),
            ("request_inference_time_seconds", "From the queue to the last token.", self.inference_time),
            ("request_prefill_time_seconds", "From the queue to the first token.", self.prefill_time),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode_time),
            ("request_num_preemptions", "How often a request went back to the queue.", self.preemptions),
        ):
            yield from _head(f"vllm:{name}", "histogram", text)
            yield from histogram.lines(f"vllm:{name}", self._labels)
        yield from self._family("vllm:request_success_total", "Sequences ended.", "finished_reason", self.finished)
        yield from self._family("vllm:admission_rejections_total", "Requests refused.", "reason", self.rejected)
        yield from _head("http_requests_total", "counter", "HTTP answers.")
        for (handler, method, status), value in sorted(self.http.items()):
            yield f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}} {value}'

    def _own_lines(self, stats: Stats, up: bool) -> Iterator[str]:
        yield from self._one("gapless:engine_up", "gauge", "1 while the engine takes requests.", int(up))
        yield from self._one("gapless:steps_in_flight", "gauge", "Steps launched, not settled.", stats.in_flight)
        yield from self._one("gapless:depth", "gauge", "Steps in flight allowed.", stats.depth)
        kinds = {kind: getattr(stats, f"steps_{kind}") for kind in ("decode", "prefill", "mixed")}
        yield from self._family("gapless:steps_total", "Steps settled.", "kind", kinds)
        yield from self._one(
            "gapless:prefill_tokens_total",
            "counter",
            "Tokens that prefill computed, after a preemption anew.",
            stats.prompt_tokens,
        )
        yield from self._one(
            "gapless:dropped_identity_total",
            "counter",
            "Outbox entries of rows that were reused.",
            stats.dropped_identity,
        )
        declined = {
            "depth": stats.declined_depth,
            "ring": stats.declined_ring,
            "capture": stats.declined_capture,
            "queue": stats.declined_queue,
        }
        yield from self._family("gapless:declined_launches_total", "Launches put off.", "cause", declined)
        launches = {
            "graph": stats.graph_steps,
            "miss": stats.graph_misses,
            "eager": stats.steps - stats.graph_steps - stats.graph_misses,
        }
        text = "Steps launched as a graph, eagerly for want of one, or eagerly as all steps of their kind are."
        yield from self._family("gapless:launches_total", text, "how", launches)
        text = "Graphs whose capture failed; their programs run eagerly."
        yield from self._one("gapless:captures_refused_total", "counter", text, stats.captures_refused)
        text = "Device memory taken from the driver, or given back, since ready: each time the device had to be idle."
        yield from self._one("gapless:device_allocations_total", "counter", text, stats.device_allocations)
        yield from self._one(
            "gapless:chained_steps_total",
            "counter",
            "Steps enqueued in one visit of the host with the step before.",
            stats.chained_steps,
        )
        states = ("free", "cached", "owned", "fenced")
        pages = {state: getattr(stats, f"pages_{state}") for state in states}
        yield from self._family("gapless:kv_pages", "KV pages by state.", "state", pages, "gauge")

    def _time_lines(self, stats: Stats, detok_seconds: float) -> Iterator[str]:
        """Where the device's time went, and the host's. The device need not be a GPU; the names are the known ones."""
        idle = stats.idle_ns
        rest = idle.pop("no_work")
        yield from self._one("gapless:gpu_busy_seconds_total", "counter", "Steps ran.", stats.busy_ns / 1e9)
        yield from self._one("gapless:gpu_idle_seconds_total", "counter", "There was nothing to run.", rest / 1e9)
        bubbles = {cause: ns / 1e9 for cause, ns in idle.items()}
        name = "gapless:gpu_bubble_seconds_total"
        yield from self._family(name, "No step ran although there was work, by cause.", "cause", bubbles)
        ratio = self._busy_ratio(stats, time.monotonic())
        yield from self._one("gapless:gpu_busy_ratio", "gauge", "Share of the last seconds in which steps ran.", ratio)
        phases = {phase: ns / 1e9 for phase, ns in stats.host_ns.items()}
        phases |= {"forward": stats.busy_ns / 1e9, "detok": detok_seconds}
        yield from _head("gapless:step_seconds", "summary", "Time of all steps by phase; forward is the device's.")
        for phase, seconds in sorted(phases.items()):
            yield f'gapless:step_seconds_sum{{{self._labels},phase="{phase}"}} {seconds!r}'
            yield f'gapless:step_seconds_count{{{self._labels},phase="{phase}"}} {stats.steps}'

    def _busy_ratio(self, stats: Stats, now: float) -> float:
        """Over the last BUSY_SECONDS, or the time since the look before those."""
        looks = self._busy
        if not looks or now - looks[-1][0] >= 1.0:
            looks.append((now, stats.wall_ns, stats.busy_ns))
        while len(looks) > 1 and now - looks[1][0] >= BUSY_SECONDS:
            looks.popleft()
        _, wall, busy = looks[0]
        if len(looks) == 1:  # since the start
            wall = busy = 0
        # No time may have been accounted for: the engine is down.
        return (stats.busy_ns - busy) / max(1, stats.wall_ns - wall)

    def _config(self, info: EngineInfo | None) -> Iterator[str]:
        if info is None:
            return
        facts = {"block_size": info.page_size, "num_gpu_blocks": info.pages, "cache_dtype": info.dtype}
        labels = ",".join(f'{name}="{escape(str(value))}"' for name, value in facts.items())
        yield from _head("vllm:cache_config_info", "gauge", "The KV cache's settings.")
        yield f'vllm:cache_config_info{{{labels},engine="0"}} 1'

    def _one(self, name: str, kind: str, text: str, value: float) -> Iterator[str]:
        yield from _head(name, kind, text)
        yield f"{name}{{{self._labels}}} {value}"

    def _family(
        self, name: str, text: str, label: str, values: Mapping[str, float], kind: str = "counter"
    ) -> Iterator[str]:
        yield from _head(name, kind, text)
        for key, value in sorted(values.items()):
            yield f'{name}{{{self._labels},{label}="{key}"}} {value}'


def escape(value: str) -> str:
    """A label value in the exposition format."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
