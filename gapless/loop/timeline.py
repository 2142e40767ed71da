"""The timeline: the device's time, every nanosecond busy or idle with a cause.

Idle time runs from the end of a step on the device to the start of the next. It is cut, in this order, into at most
five parts, any of which may be empty:

1. `no_work`: until the loop got work that could run. Such idle time is not a bubble.
2. `copy_wait`: until the host had the tokens of the step that the depth limit made this one wait for. The device had
   ended that step, and only the copy of its tokens kept the host waiting. Or until a transfer of pages ended, if
   nothing else could run.
3. `capture`: until the graphs were captured for which the loop let the device come to rest.
4. `depth`, `graph_miss` or `host_late`: until the host had enqueued the step. `depth` if there was work, and the limit
   made the step wait for the very step whose end began the gap: one more in flight would have filled it. `graph_miss`
   if the step was enqueued kernel by kernel because its shape was not captured. `host_late` in all other cases: the
   host could have come in time and did not.
5. `launch`: the step was enqueued and the device had not begun it; a stream's own time between two steps.

A step whose rows all lacked masks counts as idle with the cause `grammar`. Any other counts as busy from its first to
its last event, but for the time that it waited for other ranks, cause `ranks`: many short waits, which are shown as one
at its end. If the host enqueues a step kernel by kernel while it runs, the device may have waited inside it, which no
event shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from gapless.base.records import CAUSES, Cause, Int64s
from gapless.loop.records import COLUMNS, StepRows, StepTable

TOKEN_BUCKETS = 33
_NO_WORK, _COPY_WAIT, _LAUNCH = (CAUSES.index(cause) for cause in (Cause.NO_WORK, Cause.COPY_WAIT, Cause.LAUNCH))
_GRAMMAR, _CAPTURE = CAUSES.index(Cause.GRAMMAR), CAUSES.index(Cause.CAPTURE)
_RANKS = CAUSES.index(Cause.RANKS)
_HOST_LATE, _GRAPH_MISS, _DEPTH = (CAUSES.index(cause) for cause in (Cause.HOST_LATE, Cause.GRAPH_MISS, Cause.DEPTH))


class Gap(NamedTuple):
    """Idle time of the device from `start` to `end`, before `step` or in it."""

    start: int
    end: int
    cause: str
    step: int


class IdleParts(NamedTuple):
    """The idle time before each of n steps, cut into its five parts."""

    edges: Int64s
    """[6, n] boundaries of the parts, ns, ascending."""
    late: Int64s
    """[n] causes of the fourth part, as places in CAUSES; the other parts have fixed causes."""

    def causes(self) -> Int64s:
        """Return the causes of all parts, [5, n]."""
        ones = np.ones_like(self.late)
        return np.stack([_NO_WORK * ones, _COPY_WAIT * ones, _CAPTURE * ones, self.late, _LAUNCH * ones])


def idle_parts(rows: StepRows, idle_from: Int64s) -> IdleParts:
    """Cut the idle time of each step, from `idle_from` [n], the end of the step before, to its own start."""
    work_at, held_until = rows["work_at"], rows["held_until"]
    edges = np.empty((6, len(rows)), np.int64)
    edges[0], edges[5] = idle_from, np.maximum(rows["device_start"], idle_from)
    for place, until in enumerate((work_at, held_until, rows["capture_until"], rows["launched_at"]), 1):
        np.minimum(np.maximum(until, edges[place - 1]), edges[5], out=edges[place])
    held_by = rows["held_by"]
    for_depth = (held_by > 0) & (held_by == rows["step"] - 1) & (held_until >= work_at)
    late = np.where(for_depth, _DEPTH, np.where(rows["missed"], _GRAPH_MISS, _HOST_LATE))
    return IdleParts(edges, late)


def gaps_before(rows: StepRows, idle_from: Int64s) -> list[Gap]:
    """Return the non-empty parts of the idle time before each step, in order of time."""
    parts = idle_parts(rows, idle_from)
    edges, causes = parts.edges, parts.causes()
    places, kinds = np.nonzero((edges[1:] > edges[:-1]).T)
    columns = (edges[kinds, places], edges[kinds + 1, places], causes[kinds, places], rows["step"][places])
    found = zip(*(column.tolist() for column in columns), strict=True)
    return [Gap(start, end, str(CAUSES[cause]), step) for start, end, cause, step in found]


def all_gaps(steps: StepTable) -> list[Gap]:
    """Return every gap between consecutive steps; nothing is guessed around missing steps."""
    rows = steps.rows
    follows = rows["step"][1:] == rows["step"][:-1] + 1
    return gaps_before(rows[1:][follows], rows["device_end"][:-1][follows])


def gaps_within(steps: StepTable) -> list[Gap]:
    """Return the idle times inside of steps, which count as neither busy nor between two of them."""
    rows = steps.rows
    starts = np.where(rows["in_vain"] != 0, rows["device_start"], rows["device_end"] - rows["ranks_ns"])
    # Two clocks may disagree a little.
    np.maximum(starts[1:], np.maximum.accumulate(rows["device_end"])[:-1], out=starts[1:])
    places = np.flatnonzero(starts < rows["device_end"])
    columns = (starts, rows["device_end"], rows["in_vain"], rows["step"])
    found = zip(*(column[places].tolist() for column in columns), strict=True)
    return [Gap(start, end, Cause.GRAMMAR if in_vain else Cause.RANKS, step) for start, end, in_vain, step in found]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """The device's time since the start, ns: `wall_ns` is `busy_ns` and all of `idle_ns`."""

    wall_ns: int = 0
    busy_ns: int = 0
    idle_ns: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))

    @property
    def no_work_ns(self) -> int:
        return self.idle_ns[Cause.NO_WORK]

    @property
    def bubbles_ns(self) -> dict[Cause, int]:
        """Idle time although there was work, by cause"""
        return {cause: ns for cause, ns in self.idle_ns.items() if cause is not Cause.NO_WORK}


@dataclass(slots=True)
class HostTimes:
    """Host time of all steps by phase, ns: plan, prepare (pack), launch, wait, post (commit and retire), capture."""

    plan: int = 0
    prepare: int = 0
    launch: int = 0
    wait: int = 0
    post: int = 0
    copy: int = 0
    """Time from a step's end on the device until the host had its tokens; 0 where the device writes there itself"""
    capture: int = 0


@dataclass(slots=True)
class StepSizes:
    """Steps by kind and by number of tokens."""

    decode: int = 0
    prefill: int = 0
    mixed: int = 0
    tokens: int = 0
    by_tokens: tuple[int, ...] = ()
    """Entry b counts steps of more than 2**(b - 1) and at most 2**b tokens."""


class Timeline:
    """Totals since `start`, in ns of the device's clock: `busy` and the idle times add up to `covered - start`."""

    def __init__(self) -> None:
        self.start = 0
        self.covered = 0
        """Every moment before this one is accounted for."""
        self.busy = 0
        self._idle = np.zeros(len(CAUSES), np.int64)
        self.host = HostTimes()
        self._sizes = StepSizes()
        self._by_tokens = np.zeros(TOKEN_BUCKETS, np.int64)

    @property
    def idle(self) -> dict[Cause, int]:
        return dict(zip(CAUSES, self._idle.tolist(), strict=True))

    @property
    def sizes(self) -> StepSizes:
        return replace(self._sizes, by_tokens=tuple(self._by_tokens.tolist()))

    @property
    def device(self) -> DeviceTimes:
        return DeviceTimes(self.covered - self.start, self.busy, self.idle)

    def begin(self, now: int) -> None:
        """Start counting time, if not yet started."""
        if not self.start:
            self.start = self.covered = now

    def add(self, rows: StepRows) -> None:
        """Account for observed steps, in their order."""
        if not len(rows):
            return
        # All columns at once, from `start` on: sums of plain moments might overflow.
        sums = (rows.view(np.int64).reshape(len(rows), -1) - self.start).sum(axis=0)
        total = dict(zip(COLUMNS, sums.tolist(), strict=True))
        host = self.host
        host.plan += total["planned_at"] - total["planning_at"]
        host.prepare += total["packed_at"] - total["planned_at"]
        host.launch += total["launched_at"] - total["packed_at"]
        host.wait += total["observed_at"] - total["observing_at"]
        host.post += total["committed_at"] - total["observed_at"]
        host.copy += total["home_at"] - total["device_end"]
        self._add_device(rows)
        self._count(rows["decode_rows"], rows["chunk_tokens"])

    def _add_device(self, rows: StepRows) -> None:
        start, end = rows["device_start"], rows["device_end"]
        # Two clocks may disagree a little: no moment counts twice.
        reached = np.maximum.accumulate(np.maximum(start, end))
        np.maximum(reached, self.covered, out=reached)
        idle_from = np.concatenate(((self.covered,), reached[:-1]))
        edges, late = idle_parts(rows, idle_from)
        no_work, copied, captured, launched, begun = (edges[1:] - edges[:-1]).sum(axis=1).tolist()
        self._idle[[_NO_WORK, _COPY_WAIT, _CAPTURE, _LAUNCH]] += (no_work, copied, captured, begun)
        if launched:
            np.add.at(self._idle, late, edges[4] - edges[3])
        self.covered = int(reached[-1])
        vain = rows["in_vain"] != 0
        in_vain, ran = int((end - start)[vain].sum()), reached - edges[5]
        awaited = int(np.minimum(rows["ranks_ns"], ran)[~vain].sum())
        self._idle[[_GRAMMAR, _RANKS]] += (in_vain, awaited)
        self.busy += int(ran.sum()) - in_vain - awaited

    def _count(self, decode: Int64s, chunk: Int64s) -> None:
        prefill = int(np.count_nonzero(chunk))
        mixed = int(np.count_nonzero(decode.astype(bool) & chunk.astype(bool))) if prefill else 0
        tokens, sizes = decode + chunk, self._sizes
        sizes.decode += len(chunk) - prefill
        sizes.mixed += mixed
        sizes.prefill += prefill - mixed
        sizes.tokens += int(tokens.sum())
        # The exponent of a float is the length of an integer in bits.
        self._by_tokens += np.bincount(np.frexp(tokens - 1)[1], minlength=TOKEN_BUCKETS)

    def rest(self, now: int) -> None:
        """Count all time until `now` as idle without work."""
        self.begin(now)
        if now > self.covered:
            self._idle[_NO_WORK] += now - self.covered
            self.covered = now
