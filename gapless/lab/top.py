"""A server's work between two pages of its /metrics, ours or any that has vLLM's series: as figures and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gapless.engine.series import GAUGE, SERIES

if TYPE_CHECKING:
    from prometheus_client.core import Sample

TOP_WIDTH = 80
LABEL = 10
BAR, SHORT_BAR = 16, 10
"""Characters of a bar, and of one in a terminal narrower than that."""
GAP = "   "
_EIGHTHS = " ▏▎▍▌▋▊▉█"
KNOWN = ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")


class Page:
    """The samples of one page, by name. Raises ValueError for text that is not in Prometheus' format."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(sample)

    def samples(self, *names: str) -> Sequence[Sample]:
        """Return the series of the first of these names that the page has."""
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


class TopView:
    """A server's work in the `seconds` between two of its pages.

    Rates are per second, shares from 0 to 1; None if the server does not report them.
    """

    def __init__(self, before: Page, now: Page, seconds: float) -> None:
        def grew(*names: str) -> float | None:
            return grown(before.total(*names), now.total(*names))

        def rate(*names: str) -> float | None:
            growth = grew(*names)
            return growth / seconds if growth is not None else None

        def grew_by(name: str, label: str) -> dict[str, float]:
            earlier = before.by(name, label)
            return {key: grown(earlier.get(key), value) or 0.0 for key, value in now.by(name, label).items()}

        def seen(*names: str) -> Quantiles | None:
            return quantiles(before.buckets(*names), now.buckets(*names))

        self.models = tuple(sorted(now.by("vllm:num_requests_running", "model_name")))
        self.running = now.total("vllm:num_requests_running")
        self.waiting = now.total("vllm:num_requests_waiting")
        self.prompt_rate = rate("vllm:prompt_tokens_total")
        self.generation_rate = rate("vllm:generation_tokens_total")
        ended = grew_by("vllm:request_success_total", "finished_reason")
        self.finished = {reason: n / seconds for reason, n in ended.items() if n}
        """Rate by finish reason, without reasons that did not occur."""
        self.ttft = seen("vllm:time_to_first_token_seconds")
        self.itl = seen("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        self.e2e = seen("vllm:e2e_request_latency_seconds")
        self.kv_usage = _mean(now, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        self.hit_rate = _share(
            grew("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            grew("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        )
        titled = [row for row in SERIES if row.title]
        counts = {row.title: now.total(row.name) if row.kind is GAUGE else grew(f"{row.name}_total") for row in titled}
        self.counts = {title: count for title, count in counts.items() if count is not None}
        """Series with a title in the table of metrics: the growth of counters, and gauges"""
        self.depth = now.total("gapless:depth")
        self.in_flight = now.total("gapless:steps_in_flight")
        busy, idle = grew("gapless:gpu_busy_seconds_total"), grew("gapless:gpu_idle_seconds_total")
        bubbles = grew_by("gapless:gpu_bubble_seconds_total", "cause")
        accounted = busy + idle + sum(bubbles.values()) if busy is not None and idle is not None else 0.0
        self.busy = _share(busy, accounted)
        self.no_work = _share(idle, accounted)
        self.bubbles = {cause: lost / accounted for cause, lost in bubbles.items()} if accounted else {}
        """Share of the device's time by cause; empty where the server has no such series."""
        lags, waits = now.by("gapless:rank_lag_steps", "rank"), grew_by("gapless:rank_wait_seconds_total", "rank")
        self.ranks = {rank: (lag, waits.get(rank, 0.0) / seconds) for rank, lag in lags.items()}
        """Steps that each rank is behind, and the share of the time that it waited for others"""
        self.http = grew_by("http_requests_total", "status")
        """Answers by class of status ("2xx")."""
        self.refused = grew("vllm:admission_rejections_total")


def known(page: Page) -> bool:
    """Return whether the page has anything that a TopView could show."""
    return bool(page.samples(*KNOWN))


def _mean(page: Page, *names: str) -> float | None:
    """Average over the engines of the server."""
    values = [sample.value for sample in page.samples(*names)]
    return sum(values) / len(values) if values else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


class TopRow(NamedTuple):
    """One line of the screen. `kind` chooses its colour: "", "good", "bad" or the name of a cause."""

    label: str
    bar: str
    text: str
    kind: str = ""


def rows(seen: TopView, width: int = TOP_WIDTH) -> list[TopRow]:
    """Return the figures, one subject per row; a row that is too wide continues in the next. All bars have one scale:
    full is all of the time, or of the cache."""
    many = BAR if width >= TOP_WIDTH else SHORT_BAR
    found: list[TopRow] = []

    def add(label: str, parts: Iterable[str], share: float | None = None, kind: str = "") -> None:
        drawn = "" if share is None else bar(share, many)
        first, *more = fitted(parts, width - LABEL - (len(drawn) + 2 if drawn else 0))
        found.append(TopRow(label, drawn, first, kind))
        found.extend(TopRow("", "", (" " * (len(drawn) + 2) if drawn else "") + text, kind) for text in more)

    add("Requests", _requests(seen))
    rates = (("prompt", seen.prompt_rate), ("generated", seen.generation_rate))
    add("Tokens/s", [f"{rate:,.1f} {what}" for what, rate in rates if rate is not None])
    for label, latency in (("TTFT", seen.ttft), ("ITL", seen.itl), ("E2E", seen.e2e)):
        add(label, [_latency(latency)])
    if seen.kv_usage is not None:
        add("KV cache", _cache(seen), seen.kv_usage)
    if seen.busy is not None:
        add("Device", _device(seen), seen.busy, "good")
    for number, (cause, share) in enumerate(seen.bubbles.items()):  # zeros too, so that a cause stays on its line
        add("" if number else "Bubbles", [f"{percent(share):>7}  {cause}"], share, cause)
    if seen.ranks:
        add("Ranks", [f"{rank}: {lag:.0f} behind, waits {percent(wait)}" for rank, (lag, wait) in seen.ranks.items()])
    if seen.counts:
        add("Counts", [f"{count:.0f} {title}" for title, count in seen.counts.items()])
    if seen.http or seen.refused is not None:
        bad = any(count for status, count in seen.http.items() if status >= "4") or bool(seen.refused)
        add("HTTP", _http(seen), kind="bad" if bad else "")
    return found


def fitted(parts: Iterable[str], width: int) -> list[str]:
    """Join parts into lines of at most `width` characters; a part is never cut."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{GAP}{part}" if lines[-1] else part
        lines[-1:] = [longer] if len(longer) <= width or not lines[-1] else [lines[-1], part]
    return lines


def block(seen: TopView, heading: Sequence[str], width: int = TOP_WIDTH) -> str:
    """Return the rows as plain text under the parts of a heading."""
    lines = fitted(heading, width)
    for row in rows(seen, width):
        shown = f"{row.bar}  {row.text}" if row.bar else row.text
        lines.append(f"{row.label:<{LABEL}}{shown}".rstrip())
    return "\n".join(lines)


def line(seen: TopView, clock: str) -> str:
    """Return the most important figures on one line."""
    parts = [clock, f"running {_count(seen.running)} waiting {_count(seen.waiting)}"]
    if seen.prompt_rate is not None and seen.generation_rate is not None:
        parts.append(f"tokens/s {seen.prompt_rate:,.1f} in {seen.generation_rate:,.1f} out")
    for label, latency in (("TTFT", seen.ttft), ("ITL", seen.itl)):
        if latency is not None:
            parts.append(f"{label} p50 {duration(latency.p50)} p99 {duration(latency.p99)}")
    if seen.kv_usage is not None:
        parts.append(f"KV {percent(seen.kv_usage)}")
    if seen.hit_rate is not None:
        parts.append(f"hits {percent(seen.hit_rate)}")
    if seen.busy is not None:
        listed = " ".join(f"{cause} {percent(share)}" for cause, share in seen.bubbles.items() if share >= 0.0005)
        parts.append(f"bubbles {listed or 'none'}")
    errors = sum(count for status, count in seen.http.items() if status >= "4")
    if seen.http:
        parts.append(f"errors {errors:.0f}")
    return " | ".join(parts)


def _requests(seen: TopView) -> list[str]:
    parts = [f"{_count(seen.running)} running", f"{_count(seen.waiting)} waiting"]
    if seen.finished:
        listed = ", ".join(f"{reason} {rate:.1f}" for reason, rate in seen.finished.items())
        parts.append(f"{sum(seen.finished.values()):.1f} ended/s ({listed})")
    return parts


def _latency(latency: Quantiles | None) -> str:
    if latency is None:
        return "-"
    return f"p50 {duration(latency.p50):>8}   p99 {duration(latency.p99):>8}   of {latency.n:,}"


def _cache(seen: TopView) -> list[str]:
    parts = [f"{percent(seen.kv_usage or 0.0):>7}  in use"]
    if seen.hit_rate is not None:
        parts.append(f"{percent(seen.hit_rate)} prefix hits")
    return parts


def _device(seen: TopView) -> list[str]:
    parts = [f"{percent(seen.busy or 0.0):>7}  busy", f"{percent(seen.no_work or 0.0)} no work"]
    if seen.depth is not None:
        parts.append(f"depth {seen.depth:.0f}, {_count(seen.in_flight)} in flight")
    return parts


def _http(seen: TopView) -> list[str]:
    parts = [f"{count:.0f} {status}" for status, count in sorted(seen.http.items())]
    return [*parts, *([f"{seen.refused:.0f} refused"] if seen.refused is not None else [])]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Write three digits, in milliseconds below a second."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 2)}f} {unit}"


def bar(share: float, width: int = BAR) -> str:
    """Draw a share from 0 to 1 as blocks, in eighths, with dots for the rest."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return text + "·" * (width - len(text))
