"""Read pages of /metrics, and find what happened between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Sample


class Page:
    """The samples of one page, by name. Raises ValueError for text that is not in Prometheus' format."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(sample)

    def samples(self, *names: str) -> Sequence[Sample]:
        """Return those of the first of these names that the page has."""
        return next((self._samples[name] for name in names if name in self._samples), ())

    def total(self, *names: str) -> float | None:
        """Sum over all labels of the first of these names that the page has; None when it has none."""
        found = self.samples(*names)
        return math.fsum(sample.value for sample in found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sum by the value of one label."""
        sums: dict[str, float] = {}
        for sample in self.samples(name):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def buckets(self, *names: str) -> dict[float, float]:
        """Return cumulative counts by upper bound, of the first of these histograms that the page has."""
        for name in names:
            found = self.by(f"{name}_bucket", "le")
            if found:
                return dict(sorted((float(bound), count) for bound, count in found.items()))
        return {}


def grown(before: float | None, now: float | None) -> float | None:
    """Return how much a counter grew. A smaller value than before means that its server restarted."""
    if now is None:
        return None
    return now - before if before is not None and now >= before else now


class Quantiles(NamedTuple):
    """Quantiles of the observations between two pages; values above the last finite bound count as that bound."""

    n: int
    p50: float
    p99: float


def quantiles(before: dict[float, float], now: dict[float, float]) -> Quantiles | None:
    """Return None when nothing was observed between the pages, or there is no such histogram."""
    restarted = before.keys() != now.keys() or now.get(math.inf, 0.0) < before.get(math.inf, 0.0)
    counts = [(bound, count - (0.0 if restarted else before[bound])) for bound, count in now.items()]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    return Quantiles(round(total), _quantile(counts, 0.5 * total), _quantile(counts, 0.99 * total))


def _quantile(counts: Sequence[tuple[float, float]], rank: float) -> float:
    """Interpolate linearly within the bucket that holds the rank, as Prometheus' histogram_quantile does."""
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
