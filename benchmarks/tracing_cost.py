"""What the spans of one request cost the event loop: made, ended and queued; a thread of the SDK takes them from there.

python benchmarks/tracing_cost.py [--requests 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from gapless.base.params import SamplingParams
from gapless.engine.outputs import RequestMetrics
from gapless.server.tracing import Generated, Tracing

HEADERS = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def microseconds(sampler: Sampler, requests: int) -> list[float]:
    """Of each request: a span, and five nested in it."""
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracing = Tracing(provider)
    spent = []
    for _ in range(requests):
        now = time.monotonic_ns()
        times = RequestMetrics(now + 1000, now + 2000, now + 3000, now + 4000, 64)
        what = Generated("cmpl-1", "m", "label", True, SamplingParams(), now + 1000, [times], 100, 0, 64, ["length"])
        start = time.perf_counter_ns()
        span = tracing.begin("/v1/completions", HEADERS, now)
        span.sending()
        span.generated = what
        span.end("", 200)
        spent.append((time.perf_counter_ns() - start) / 1000)
        time.sleep(0.0005)  # requests do not come all at once, and the thread of the SDK has its turn
    provider.shutdown()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    requests = parser.parse_args().requests
    for name, sampler in (("sampled", ALWAYS_ON), ("not sampled", ALWAYS_OFF)):
        spent = sorted(microseconds(sampler, requests))
        print(f"{name}: median {statistics.median(spent):.0f} us a request, p90 {spent[int(0.9 * requests)]:.0f} us")


if __name__ == "__main__":
    main()
