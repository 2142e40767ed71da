"""Prometheus text exposition: the ecosystem's `vllm:` series for what exists here, and our own under `gapless:`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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


class Histogram:
    """Counts of observations per bucket; cumulative only when rendered."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

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
        self.finished: Counter[str] = Counter({reason: 0 for reason in ("stop", "length", "abort", "error")})
        self.cached_tokens = 0
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        """(handler, method, '2xx') to the number of answers."""

    def render(self, stats: Stats, info: EngineInfo | None, up: bool) -> bytes:
        """The page. `info` is None until the engine has come up once."""
        lines: list[str] = []
        for part in (self._loop_lines(stats), self._request_lines(), self._own_lines(stats, up), self._config(info)):
            lines.extend(part)
        return ("\n".join(lines) + "\n").encode()

    def _loop_lines(self, stats: Stats) -> Iterator[str]:
        used = stats.pages_owned + stats.pages_fenced
        yield from self._one("vllm:num_requests_running", "gauge", "Requests in a batch now.", stats.running)
        yield from self._one("vllm:num_requests_waiting", "gauge", "Requests in the queue.", stats.waiting)
        usage = used / stats.pages_total if stats.pages_total else 0.0
        yield from self._one("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.", usage)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that left the queue, cached or not.", stats.prefix_queries),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("num_preemptions", "Requests put back to the queue.", stats.preemptions),
        ):
            yield from self._one(f"vllm:{name}_total", "counter", text, value)

    def _request_lines(self) -> Iterator[str]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens of one request.", self.inter_token_latency),
            ("e2e_request_latency_seconds", "From arrival to the end.", self.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step.", self.queue_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", self.generation_tokens),
            ("request_params_n", "Completions asked for.", self.params_n),
        ):
            yield from _head(f"vllm:{name}", "histogram", text)
            yield from histogram.lines(f"vllm:{name}", self._labels)
        yield from self._one(
            "vllm:prompt_tokens_cached_total", "counter", "Prompt tokens that needed no work.", self.cached_tokens
        )
        yield from self._family("vllm:request_success_total", "Sequences ended.", "finished_reason", self.finished)
        yield from self._family("vllm:admission_rejections_total", "Requests refused.", "reason", self.rejected)
        yield from _head("http_requests_total", "counter", "HTTP answers.")
        for (handler, method, status), value in sorted(self.http.items()):
            yield f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}} {value}'

    def _own_lines(self, stats: Stats, up: bool) -> Iterator[str]:
        yield from self._one("gapless:engine_up", "gauge", "1 while the engine takes requests.", int(up))
        yield from self._one("gapless:steps_in_flight", "gauge", "Steps launched, not settled.", stats.in_flight)
        yield from self._one("gapless:steps_total", "counter", "Steps settled.", stats.steps)
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
        declined = {"depth": stats.declined_depth, "ring": stats.declined_ring}
        yield from self._family("gapless:declined_launches_total", "Launches put off.", "cause", declined)
        states = ("free", "cached", "owned", "fenced")
        pages = {state: getattr(stats, f"pages_{state}") for state in states}
        yield from self._family("gapless:kv_pages", "KV pages by state.", "state", pages, "gauge")

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
        self, name: str, text: str, label: str, values: Mapping[str, int], kind: str = "counter"
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
