"""Prometheus text pages read back, and what happened between two of them. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Page:
    """The samples of one page by their name. Lines that are no samples are passed over."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            match = None if line.startswith("#") else _SAMPLE.fullmatch(line)
            value = _number(match[3]) if match else None
            if match and value is not None:
                labels = {name: _ESCAPE.sub(_unescape, text) for name, text in _LABEL.findall(match[2] or "")}
                self._samples.setdefault(match[1], []).append(Sample(labels, value))

    @property
    def names(self) -> set[str]:
        return set(self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        return self._samples.get(name, ())

    def total(self, *names: str) -> float | None:
        """The sum over all labels, of the first of these names that is there; None when none is."""
        for name in names:
            if name in self._samples:
                return math.fsum(sample.value for sample in self._samples[name])
        return None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for sample in self.samples(name):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def buckets(self, *names: str) -> dict[float, float]:
        """Cumulative counts by upper bound, of the first of these histograms that is there."""
        for name in names:
            found = self.by(f"{name}_bucket", "le")
            if found:
                pairs = ((_number(bound), count) for bound, count in found.items())
                return dict(sorted((bound, count) for bound, count in pairs if bound is not None))
        return {}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def grown(before: float | None, now: float | None) -> float | None:
    """By how much a counter grew. One that is smaller than before began anew with its server."""
    if now is None:
        return None
    return now - before if before is not None and now >= before else now


class Quantiles(NamedTuple):
    """Of the observations between two pages. A value beyond the last finite bound is given as that bound."""

    n: int
    p50: float
    p99: float


def quantiles(before: dict[float, float], now: dict[float, float]) -> Quantiles | None:
    """None when nothing was observed between the pages, or there is no such histogram."""
    top = now.get(math.inf, 0.0)
    again = before.keys() != now.keys() or top < before.get(math.inf, 0.0)
    counts = [(bound, count - (0.0 if again else before[bound])) for bound, count in now.items()]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    return Quantiles(round(total), _quantile(counts, 0.5 * total), _quantile(counts, 0.99 * total))


def _quantile(counts: Sequence[tuple[float, float]], rank: float) -> float:
    """Linear within the bucket that holds the rank, as Prometheus' histogram_quantile."""
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
