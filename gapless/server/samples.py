"""The last half hour, a sample a second: what the live page shows of the time before it was opened."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from gapless.base import host
from gapless.base.records import CAUSES
from gapless.engine.series import COUNTER, SERIES
from gapless.engine.stats import Stats
from gapless.server.metrics import Histogram, Metrics

SAMPLE_SECONDS = 1.0
KEPT = 1800
"""Samples that are kept."""
WINDOW, LONG_WINDOW = 10, 60
"""Number of samples behind the quantiles."""
SAMPLED = tuple(row for row in SERIES if row.column)
SAMPLE_COLUMNS = (
    *("time", *(row.column for row in SAMPLED), "right_drafts", "cpu"),
    *("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_max", "queue_p50", "queue_p99", "busy"),
    *(cause.value for cause in CAUSES),
)
Value = float | None


class LatencyWindow:
    """Quantiles of one histogram over its latest observations, from its counts a second apart."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._counts: deque[tuple[int, ...]] = deque([histogram.counts], LONG_WINDOW + 1)

    def look(self) -> None:
        self._counts.append(self._histogram.counts)

    def quantiles(self, samples: int, *shares: float) -> list[Value]:
        """Return quantiles of what the last `samples` looks found; None where they found nothing."""
        counts = self._grown(samples)
        return [quantile(self._histogram.bounds, counts, share) for share in shares]

    def many(self, samples: int) -> int:
        return sum(self._grown(samples))

    def _grown(self, samples: int) -> list[int]:
        before = self._counts[max(0, len(self._counts) - 1 - samples)]
        return [now - then for now, then in zip(self._counts[-1], before, strict=True)]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> Value:
    """Interpolate within the bucket that holds the rank. The largest value counts as its bucket's upper bound."""
    rank, below, low = share * sum(counts), 0, 0.0
    if not rank:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return low


class CountsAt(NamedTuple):
    """The counters at the last sample."""

    at: float
    stats: Stats
    cpu: tuple[int, int]


class SampleLog:
    """The newest samples, in the order of COLUMNS; sample number `ended` comes next."""

    def __init__(self, metrics: Metrics) -> None:
        self.ttft = LatencyWindow(metrics.time_to_first_token)
        self.itl = LatencyWindow(metrics.inter_token_latency)
        self.queue = LatencyWindow(metrics.queue_time)
        self.ended = 0
        self._samples: deque[tuple[Value, ...]] = deque(maxlen=KEPT)
        self._before: CountsAt | None = None

    def take(self, stats: Stats) -> None:
        """Add the sample of the time since the last call; the first call adds none."""
        now, before = CountsAt(time.monotonic(), stats, host.processor_time()), self._before
        self._before = now
        for window in (self.ttft, self.itl, self.queue):
            window.look()
        if before is not None:
            values = [*_rates(before, now), *self._latencies(), *_shares(before.stats, stats)]
            self._samples.append(tuple(None if value is None else round(value, 5) for value in values))
            self.ended += 1

    def after(self, number: int) -> tuple[int, list[tuple[Value, ...]]]:
        """Return the number of the first kept sample from `number` on, and it and all later ones."""
        oldest = self.ended - len(self._samples)
        first = number if oldest <= number <= self.ended else oldest
        return first, list(islice(self._samples, first - oldest, None))

    def latency(self) -> dict[str, dict[str, Value]]:
        """Return the quantiles of the last minute, in seconds, and how many values they are of."""
        found: dict[str, dict[str, Value]] = {}
        for name, window in (("ttft", self.ttft), ("itl", self.itl), ("queue", self.queue)):
            p50, p99 = window.quantiles(LONG_WINDOW, 0.5, 0.99)
            found[name] = {"p50": p50, "p99": p99, "many": window.many(LONG_WINDOW)}
        return found

    def _latencies(self) -> list[Value]:
        longest = self.itl.quantiles(1, 1.0)
        both = (0.5, 0.99)
        ttft, itl, queue = (window.quantiles(WINDOW, *both) for window in (self.ttft, self.itl, self.queue))
        return [*ttft, *itl, *longest, *queue]


def _rates(before: CountsAt, now: CountsAt) -> list[Value]:
    seconds = max(now.at - before.at, 1e-3)
    old, new = before.stats, now.stats
    grown = [row.sum(new) - (row.kind is COUNTER and row.sum(old)) for row in SAMPLED]
    verified = new.drafts.draft_tokens - old.drafts.draft_tokens
    busy, all_of_it = (now.cpu[place] - before.cpu[place] for place in (0, 1))
    return [
        time.time(),
        *[number / seconds if row.kind is COUNTER else number for row, number in zip(SAMPLED, grown, strict=True)],
        (new.drafts.right - old.drafts.right) / verified if verified > 0 else None,
        busy / all_of_it if all_of_it > 0 else None,
    ]


def _shares(before: Stats, now: Stats) -> list[Value]:
    """Return shares of the device's time: busy, then idle by cause. None while the engine has reported none."""
    old, new = before.device, now.device
    wall = new.wall_ns - old.wall_ns
    if wall <= 0:
        return [None] * (1 + len(CAUSES))
    idle = [new.idle_ns[cause] - old.idle_ns[cause] for cause in CAUSES]
    return [ns / wall for ns in (new.busy_ns - old.busy_ns, *idle)]


async def sample(log: SampleLog, stats: Callable[[], Stats]) -> None:
    """Take samples until cancelled."""
    while True:
        log.take(stats())
        await asyncio.sleep(SAMPLE_SECONDS)
