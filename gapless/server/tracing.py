"""OpenTelemetry spans of generation requests: `llm_request` and, nested in it, the phases of its time.

The SDK is imported when an endpoint for traces is given, and only then. Spans go to a bounded queue that a thread of
the SDK empties: nothing here waits for the collector, and a queue that is full drops spans. The SDK's own environment
variables hold (sampling, headers, queue, service name). Spans carry counts, settings and times, never text.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import gapless
from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.base.params import SamplingParams
from gapless.engine.outputs import RequestMetrics

MAX_NESTED = 16
"""Prompts of one request whose phases get spans of their own; a request may bring hundreds."""
FLUSH_SECONDS = 2.0
NEW_NAMES_ONLY = "gen_ai_latest_experimental"
_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_OPERATIONS = {**dict.fromkeys(_CHATS, "chat"), "/v1/completions": "text_completion"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Generated(NamedTuple):
    """Result of a generation request."""

    identity: str
    model: str
    label: str
    """The client's name for the request."""
    streamed: bool
    params: SamplingParams
    arrived: int
    """Time of the request's last byte, monotonic nanoseconds."""
    times: Sequence[RequestMetrics]
    """One for each prompt that the engine took."""
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    reasons: Sequence[str]

    @property
    def slowest(self) -> RequestMetrics:
        """Times of the prompt that ended last: the client waited for it. Without times if the engine took none."""
        return max(self.times, key=lambda each: each.last_token, default=RequestMetrics(arrival=0))


class Tracing:
    """Makes spans with an SDK's TracerProvider; `old_names` adds the attributes that vLLM's dashboards use."""

    def __init__(self, provider: Any, old_names: bool = True) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._tracer = provider.get_tracer("gapless", gapless.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._old_names = old_names

    def begin(self, path: str, headers: Mapping[str, str], began: int) -> RequestSpan:
        """The span of a request, from its head's arrival on, under the trace context that its headers name."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(headers)
        attributes = {"gen_ai.operation.name": _OPERATIONS.get(path, path), "gen_ai.provider.name": "gapless"}
        to_wall = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=began + to_wall)
        return RequestSpan(self._tracer, span, self._old_names, began, to_wall)

    async def close(self) -> None:
        """Send what waits, for CLOSE_SECONDS at most: a collector that does not answer must not hold up the exit."""
        # Not on the loop's own threads: their end would be waited for.
        closing = threading.Thread(target=self.provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_SECONDS)


@dataclass(eq=False)
class RequestSpan:
    """The spans of one request; they are made when it ends, from the moments that the engine noted anyway."""

    tracer: Any
    span: Any
    old_names: bool
    began: int
    to_wall: int
    """Difference between the engine's clock (monotonic ns) and that of spans."""
    generated: Generated | None = None
    """Set when the engine is done with it; the answer may still be in transit."""
    first_sent: int = 0

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def sending(self) -> None:
        """The first byte of the answer is about to go out."""
        self.first_sent = self.first_sent or time.monotonic_ns()

    def end(self, error: str, status: int) -> None:
        """The answer is out or given up: `error` is its code, '' for none, and `status` the HTTP status then."""
        from opentelemetry.trace import Status, StatusCode

        now = time.monotonic_ns()
        if self.span.is_recording():
            if error:
                self.span.set_attribute("error.type", error)
            if status >= 500:  # what the client did wrong is no error of a server's span
                self.span.set_status(Status(StatusCode.ERROR, error))
            if self.generated is not None:
                self._describe(self.generated, now)
        self.span.end(now + self.to_wall)

    def _describe(self, what: Generated, now: int) -> None:
        attributes = current_names(what)
        if self.old_names:
            attributes |= old_names(what, (now - self.began) / 1e9)
        self.span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if what.times:
            self._child("receive", self.began, what.arrived)
        for number, times in enumerate(what.times[:MAX_NESTED]):
            which = {"gapless.prompt.index": number} if len(what.times) > 1 else {}
            self._child("queue", what.arrived, times.started or now, which)
            if times.started:
                self._child("prefill", times.started, times.first_token or now, which)
            if times.first_token:
                self._child("decode", times.first_token, times.last_token, which)
        if what.streamed and self.first_sent:
            self._child("stream", self.first_sent, now)

    def _child(self, name: str, start: int, end: int, attributes: Mapping[str, int] | None = None) -> None:
        from opentelemetry.trace import set_span_in_context

        under = set_span_in_context(self.span)
        child = self.tracer.start_span(name, under, attributes=attributes, start_time=start + self.to_wall)
        child.end(end + self.to_wall)


def open_tracing(endpoint: str) -> Tracing:
    """Spans to an OTLP collector over HTTP. Raises ConfigError for an address that is none, or without the SDK."""
    url = collector_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    named = {SERVICE_VERSION: gapless.__version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        named[SERVICE_NAME] = "gapless"
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider, wants_old_names(os.environ))


def collector_url(endpoint: str) -> str:
    """The address that spans are posted to; a collector's root gets the standard's path. Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "otlp_traces_endpoint must be the HTTP address of an OTLP collector, like "
            f"http://localhost:4318/v1/traces (gRPC is not spoken), got {hide_password(endpoint)!r}"
        )
    if parts.query:
        raise ConfigError(
            "otlp_traces_endpoint must have no query: the exporter writes it into the log when the collector does not "
            f"answer; send keys as headers, with $OTEL_EXPORTER_OTLP_HEADERS. Got {hide_password(endpoint)!r} with one"
        )
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def wants_old_names(environment: Mapping[str, str]) -> bool:
    """Return whether the attributes of before the convention are wanted too."""
    words = environment.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
    return NEW_NAMES_ONLY not in map(str.strip, words)


def trace_id_of(headers: Mapping[str, str]) -> str:
    """The trace that a request belongs to by its traceparent header; '' for none."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return match[1] if match else ""


def current_names(what: Generated) -> dict[str, Any]:
    """Attributes of the convention for generative AI; where it has none, its name of the server metric.

    A field of None does not apply.
    """
    params, times = what.params, what.slowest
    per_token = None
    if times.generation_seconds and times.generation_tokens > params.n == 1:
        per_token = times.generation_seconds / (times.generation_tokens - 1)
    return {
        "gen_ai.request.model": what.model,
        "gen_ai.response.model": what.model,
        "gen_ai.response.id": what.identity,
        "gapless.request_id": what.label or None,
        "gen_ai.response.finish_reasons": list(what.reasons),
        "gen_ai.request.stream": what.streamed,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.usage.input_tokens": what.prompt_tokens,
        "gen_ai.usage.output_tokens": what.generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": what.cached_tokens,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gapless.prompts": len(what.times) if len(what.times) > 1 else None,
        "gen_ai.server.time_to_first_token": times.time_to_first_token,
        "gen_ai.server.time_per_output_token": per_token,
    }


def old_names(what: Generated, seconds: float) -> dict[str, Any]:
    """The attributes that vLLM puts on its `llm_request`."""
    return {
        "gen_ai.request.id": what.label or what.identity,
        "gen_ai.request.n": what.params.n,
        "gen_ai.usage.prompt_tokens": what.prompt_tokens,
        "gen_ai.usage.completion_tokens": what.generation_tokens,
        "gen_ai.latency.e2e": seconds,
        "gen_ai.latency.time_in_queue": what.slowest.queue_seconds,
        "gen_ai.latency.time_to_first_token": what.slowest.time_to_first_token,
        "gen_ai.latency.time_in_model_prefill": what.slowest.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": what.slowest.generation_seconds,
        "gen_ai.latency.time_in_model_inference": what.slowest.inference_seconds,
    }
