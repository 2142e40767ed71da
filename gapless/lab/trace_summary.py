"""A recording in a screenful: steps, busy and idle time by cause, the worst gaps, host phases."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gapless.engine.trace import Gap, Recording, StepTable, all_gaps, kind_of
from gapless.lab.trace import lines_of


class Idle(NamedTuple):
    """Idle time of one cause, ns."""

    cause: str
    total: int
    gaps: int
    longest: int


class TraceSummary(NamedTuple):
    """What `gapless trace summary` shows. Times are ns."""

    steps: int
    kinds: dict[str, int]
    missing: int
    """Steps that the recording lacks in its middle; the time around them is left out of everything here."""
    span: int
    busy: int
    enqueueing: int
    """The part of `busy` in which the host was still enqueueing that very step."""
    idle: list[Idle]
    worst: list[Gap]
    start: int
    phases: dict[str, tuple[float, float]]
    """Median and 99th percentile of a step."""
    requests: int


PHASES = {
    "plan": ("planning_at", "planned_at"),
    "pack": ("planned_at", "packed_at"),
    "launch": ("packed_at", "launched_at"),
    "observe": ("observing_at", "observed_at"),
    "commit": ("observed_at", "committed_at"),
    "on the device": ("device_start", "device_end"),
}
"""Columns at which each phase of a step begins and ends."""


def summarise(recording: Recording, worst: int = 5) -> TraceSummary:
    """Numbers of a recording. The span is what its steps and the gaps between them cover."""
    steps: StepTable = recording.steps
    rows, gaps = steps.rows, all_gaps(steps)
    busy = int((rows["device_end"] - rows["device_start"]).sum())
    enqueueing = np.minimum(rows["launched_at"], rows["device_end"]) - rows["device_start"]
    missing = steps[-1].step - steps[0].step + 1 - len(steps) if steps else 0
    return TraceSummary(
        len(steps),
        dict(Counter(kind_of(step) for step in steps)),
        missing,
        busy + sum(gap.end - gap.start for gap in gaps),
        busy,
        int(enqueueing.clip(min=0).sum()),
        _idle(gaps),
        sorted((gap for gap in gaps if gap.cause != "no_work"), key=lambda gap: gap.start - gap.end)[:worst],
        steps[0].planning_at if steps else 0,
        {name: _spread((rows[end] - rows[begin]).tolist()) for name, (begin, end) in PHASES.items()} if steps else {},
        len(recording.requests),
    )


def _idle(gaps: Sequence[Gap]) -> list[Idle]:
    lengths: dict[str, list[int]] = {}
    for gap in gaps:
        lengths.setdefault(gap.cause, []).append(gap.end - gap.start)
    found = [Idle(cause, sum(each), len(each), max(each)) for cause, each in lengths.items()]
    return sorted(found, key=lambda idle: -idle.total)


def _spread(values: Sequence[int]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def text_of(summary: TraceSummary) -> str:
    """The summary for a terminal."""
    return "\n".join(_lines(summary))


def _lines(found: TraceSummary) -> Iterator[str]:
    if not found.steps:
        yield "no steps in this recording"
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.kinds.items()))
    yield f"{found.steps:,} steps ({kinds}) in {found.span / 1e9:.3f} s, {found.requests:,} requests"
    if found.missing:
        yield f"{found.missing:,} steps are missing in between; the time around them is not counted"
    yield f"device busy {_share(found.busy, found.span)}"
    yield f"  {_share(found.enqueueing, found.busy)} of it while the host was still enqueueing that very step,"
    yield "  where the device may have waited inside of it"
    if found.idle:
        rows: list[tuple[str, ...]] = [("idle by cause", "ms", "of the time", "gaps", "longest us")]
        for cause, total, gaps, longest in found.idle:
            name = f"{cause} (nothing to do)" if cause == "no_work" else cause
            rows.append((name, f"{total / 1e6:.3f}", _share(total, found.span), f"{gaps:,}", f"{longest / 1e3:.1f}"))
        yield from lines_of(rows)
    if found.worst:
        rows = [("worst bubbles", "at s", "us", "before step")]
        for gap in found.worst:
            at = (gap.start - found.start) / 1e9
            rows.append((gap.cause, f"{at:.6f}", f"{(gap.end - gap.start) / 1e3:.1f}", str(gap.step)))
        yield from lines_of(rows)
    rows = [("time of a step", "median us", "p99 us")]
    rows += [(name, f"{median / 1e3:.1f}", f"{p99 / 1e3:.1f}") for name, (median, p99) in found.phases.items()]
    yield from lines_of(rows)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0 %"
