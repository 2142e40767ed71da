"""Writes a TopView as text: rows for a screen, one line for a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from gapless.lab.exposition import Quantiles
from gapless.lab.top import TopView

BAR = 24
FULL_BUBBLE = 0.1
"""A bubble's bar is full at this share of the time, or at the largest bubble when that is larger."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class TopRow(NamedTuple):
    """One line of the screen. `kind` chooses its colour: "", "good", "bad" or the name of a cause."""

    label: str
    bar: str
    text: str
    kind: str = ""


def rows(view: TopView) -> list[TopRow]:
    """Return what is known, one subject per row."""
    found = [TopRow("Requests", "", _requests(view))]
    rates = (("prompt", view.prompt_rate), ("generated", view.generation_rate))
    found.append(TopRow("Tokens/s", "", _joined(f"{rate:,.1f} {what}" for what, rate in rates if rate is not None)))
    for label, latency in (("TTFT", view.ttft), ("ITL", view.itl), ("E2E", view.e2e)):
        found.append(TopRow(label, "", _latency(latency)))
    if view.kv_usage is not None:
        found.append(TopRow("KV cache", bar(view.kv_usage), _cache(view)))
    if view.busy is not None:
        found.append(TopRow("Device", bar(view.busy), _device(view), "good"))
    full = max(FULL_BUBBLE, *view.bubbles.values()) if view.bubbles else FULL_BUBBLE
    for number, (cause, share) in enumerate(view.bubbles.items()):  # zeros too, so that a cause stays on its line
        scale = f"   (a full bar is {percent(full)})" if not number else ""
        label = "" if number else "Bubbles"
        found.append(TopRow(label, bar(share / full), f"{percent(share):>7}  {cause}{scale}", cause))
    if view.http or view.refused is not None:
        bad = any(count for status, count in view.http.items() if status >= "4") or bool(view.refused)
        found.append(TopRow("HTTP", "", _http(view), "bad" if bad else ""))
    return found


def block(view: TopView, heading: str) -> str:
    """Return the rows as plain text."""
    lines = [heading]
    for row in rows(view):
        shown = f"{row.bar}  {row.text}" if row.bar else row.text
        lines.append(f"{row.label:<10}{shown}".rstrip())
    return "\n".join(lines)


def line(view: TopView, clock: str) -> str:
    """Return the most important figures on one line."""
    parts = [clock, f"running {_count(view.running)} waiting {_count(view.waiting)}"]
    if view.prompt_rate is not None and view.generation_rate is not None:
        parts.append(f"tokens/s {view.prompt_rate:,.1f} in {view.generation_rate:,.1f} out")
    for label, latency in (("TTFT", view.ttft), ("ITL", view.itl)):
        if latency is not None:
            parts.append(f"{label} p50 {duration(latency.p50)} p99 {duration(latency.p99)}")
    if view.kv_usage is not None:
        parts.append(f"KV {percent(view.kv_usage)}")
    if view.hit_rate is not None:
        parts.append(f"hits {percent(view.hit_rate)}")
    if view.busy is not None:
        listed = " ".join(f"{cause} {percent(share)}" for cause, share in view.bubbles.items() if share >= 0.0005)
        parts.append(f"bubbles {listed or 'none'}")
    errors = sum(count for status, count in view.http.items() if status >= "4")
    if view.http:
        parts.append(f"errors {errors:.0f}")
    return " | ".join(parts)


def _requests(view: TopView) -> str:
    parts = [f"{_count(view.running)} running", f"{_count(view.waiting)} waiting"]
    if view.finished:
        listed = ", ".join(f"{reason} {rate:.1f}" for reason, rate in view.finished.items())
        parts.append(f"{sum(view.finished.values()):.1f} ended a second ({listed})")
    return _joined(parts)


def _latency(latency: Quantiles | None) -> str:
    if latency is None:
        return "-"
    return f"p50 {duration(latency.p50):>8}   p99 {duration(latency.p99):>8}   of {latency.n:,}"


def _cache(view: TopView) -> str:
    parts = [f"{percent(view.kv_usage or 0.0):>7}  in use"]
    if view.hit_rate is not None:
        parts.append(f"{percent(view.hit_rate)} prefix hits")
    if view.preemptions is not None:
        parts.append(f"{view.preemptions:.0f} preemptions")
    return _joined(parts)


def _device(view: TopView) -> str:
    parts = [f"{percent(view.busy or 0.0):>7}  busy", f"{percent(view.no_work or 0.0)} without work"]
    if view.depth is not None:
        parts.append(f"depth {view.depth:.0f}, {_count(view.in_flight)} in flight")
    return _joined(parts)


def _http(view: TopView) -> str:
    parts = [f"{count:.0f} {status}" for status, count in sorted(view.http.items())]
    return _joined([*parts, *([f"{view.refused:.0f} refused"] if view.refused is not None else [])])


def _joined(parts: Iterable[str]) -> str:
    return "   ".join(parts)


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
