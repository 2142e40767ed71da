"""Times and counts of steps, kept in timed events or on the device, and collected by a thread of their own."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from contextlib import contextmanager

import torch

WIDTH, STEPS, BINS, READS = 16, 24, 4, 5


class Timed:
    """A span of a stream between two events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)


class Recorder:
    """Spans are added by the engine's thread, and read by the collector once they have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Timed] = deque()

    @contextmanager
    def span(self, name: str):
        timed = Timed(name)
        timed.begin.record()
        try:
            yield
        finally:
            timed.end.record()
            with self._lock:
                self._spans.append(timed)

    def take(self) -> list[Timed]:
        with self._lock:
            found = list(self._spans)
            self._spans.clear()
        return found


class Histogram:
    """Counts on the device by bin. A copy goes to the host when the collector asks for one."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64, device="cuda")
        self.edges = torch.linspace(-0.5, 0.5, BINS - 1, device="cuda")
        self.host = torch.zeros(BINS, dtype=torch.int64, pin_memory=True)
        self.asked = threading.Event()
        self.sent = threading.Event()
        self.copied = torch.cuda.Event(blocking=True)

    def add(self, values: torch.Tensor) -> None:
        bins = torch.bucketize(values.flatten(), self.edges)
        self.counts.index_add_(0, bins, torch.ones_like(bins))

    def serve(self) -> None:
        """Called by the engine after each step: it never waits."""
        if self.asked.is_set():
            self.asked.clear()
            self.host.copy_(self.counts, non_blocking=True)
            self.copied.record()
            self.sent.set()

    def read(self) -> list[int] | None:
        """Ask the engine for the counts; returns None if it has stopped."""
        self.asked.set()
        if not self.sent.wait(timeout=5):
            return None
        self.sent.clear()
        self.copied.synchronize()  # san: ok(the collector's own thread)
        return self.host.tolist()


class Collector(threading.Thread):
    def __init__(self, recorder: Recorder, histogram: Histogram) -> None:
        super().__init__(name="metrics")
        self.recorder, self.histogram = recorder, histogram
        self.totals: Counter[str] = Counter()
        self.seen: list[int] = []

    def run(self) -> None:
        for _ in range(READS):
            counts = self.histogram.read()
            if counts is None:
                break
            self.seen.append(sum(counts))
            self.collect()
            time.sleep(0.001)

    def collect(self) -> None:
        for timed in self.recorder.take():
            timed.end.synchronize()  # san: ok(the collector's own thread)
            assert timed.begin.elapsed_time(timed.end) >= 0
            self.totals[timed.name] += 1


def main() -> None:
    torch.manual_seed(60)
    weight = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
    x = torch.randn(8, WIDTH, device="cuda")
    recorder, histogram = Recorder(), Histogram()
    collector = Collector(recorder, histogram)
    collector.start()
    with torch.inference_mode():
        for _ in range(STEPS):
            with recorder.span("step"):
                with recorder.span("matmul"):
                    x = torch.tanh(x @ weight)
                histogram.add(x)
            histogram.serve()
        while collector.is_alive():
            histogram.serve()
            collector.join(timeout=0.001)
    collector.collect()
    assert len(collector.seen) == READS and collector.seen == sorted(collector.seen)
    print(dict(sorted(collector.totals.items())), int(histogram.counts.sum()))  # san: ok(the result)


main()
