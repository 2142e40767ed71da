"""What is remembered of a buffer: who touched which part of it last, and when by its own clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gapless.guard.clocks import Clock
from gapless.guard.race_ops import Elements
from gapless.guard.race_report import CONFLICTS

Ints = npt.NDArray[Any]

LIMIT = 256
"""Distinct parts remembered of a buffer, for one agent and kind. Beyond it the oldest is forgotten: a miss."""
TIDY = 16
EXACT_ELEMENTS = 1 << 20


class Actor(Protocol):
    """Who accesses: a thread, or a stream as it stood when it was given the program that runs now."""

    @property
    def index(self) -> int: ...
    @property
    def time(self) -> int: ...
    @property
    def clock(self) -> Clock: ...


class Layout(NamedTuple):
    """A view with gaps: sizes, strides in bytes, bytes an element."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Chosen:
    """Bytes that an index chose: `span` of them from each of `starts`. Equal to itself alone."""

    __slots__ = ("span", "starts")

    def __init__(self, starts: Ints, span: int) -> None:
        self.starts = starts
        self.span = span

    @classmethod
    def of(cls, elements: Elements, base: int, itemsize: int) -> Chosen:
        """Elements of a tensor that begins at byte `base` of the buffer."""
        starts = base + elements.offsets * (elements.step * itemsize)
        return cls(starts, (elements.reach + 1) * itemsize)


class Region(NamedTuple):
    """A part of a buffer. Bytes `low` to `high`; with gaps when `layout` is given; of them only what is `chosen`.

    `chosen` is row numbers for a buffer that is watched by rows, `Chosen` bytes for another.
    """

    low: int
    high: int
    layout: Layout | None = None
    chosen: Any = None


class Conflict(NamedTuple):
    """An earlier access that is not known to have happened before the present one."""

    agent: int
    time: int
    kind: int
    note: int
    part: str


class Shadow(Protocol):
    """One buffer's memory of accesses."""

    def conflicts(self, actor: Actor, kind: int, region: Region) -> list[Conflict]: ...
    def put(self, actor: Actor, kind: int, region: Region, note: int) -> None: ...


class Ranges:
    """By byte range, exactly. Costs the same for any size of buffer."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], dict[Region, tuple[int, int]]] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def conflicts(self, actor: Actor, kind: int, region: Region) -> list[Conflict]:
        clock, me, against = actor.clock, actor.index, CONFLICTS[kind]
        found: list[Conflict] = []
        for (agent, other), latest in self._latest.items():
            if agent != me and other in against and latest > clock.get(agent, 0):
                found += self._unordered(agent, other, clock.get(agent, 0), region)
        return found

    def _unordered(self, agent: int, kind: int, known: int, region: Region) -> Iterator[Conflict]:
        for other, (time, note) in self._seen[agent, kind].items():
            if time > known and other.low < region.high and region.low < other.high and _meet(other, region):
                low, high = max(other.low, region.low), min(other.high, region.high)
                yield Conflict(agent, time, kind, note, f"bytes {low}..{high}")

    def put(self, actor: Actor, kind: int, region: Region, note: int) -> None:
        key = actor.index, kind
        parts = self._seen.setdefault(key, {})
        # A later access of the same agent stands for the earlier one: who knows of it knows of both.
        parts.pop(region, None)
        if len(parts) >= TIDY and region.layout is None and region.chosen is None:
            _drop_covered(parts, region)
        if len(parts) >= LIMIT:
            del parts[next(iter(parts))]
        parts[region] = actor.time, note
        self._latest[key] = actor.time


def _drop_covered(parts: dict[Region, tuple[int, int]], by: Region) -> None:
    for region in [r for r in parts if by.low <= r.low and r.high <= by.high]:
        del parts[region]


def _meet(one: Region, other: Region) -> bool:
    """Whether two parts whose hulls overlap share a byte. Only views with gaps need a closer look."""
    if one[2:] == other[2:] == (None, None):
        return True
    low = min(one.low, other.low)
    if max(one.high, other.high) - low > EXACT_ELEMENTS:
        return True
    size = max(one.high, other.high) - low
    return bool((_marked(size, one, low) & _marked(size, other, low)).any())


def _marked(size: int, region: Region, base: int) -> Ints:
    """Of `size` bytes from `base`, those that belong to the region."""
    marks, start = np.zeros(size, np.bool_), region.low - base
    if region.chosen is not None:
        at = (region.chosen.starts - base)[:, None] + np.arange(region.chosen.span)
        marks[at[(at >= 0) & (at < size)]] = True
    elif region.layout is not None:
        sizes, strides, itemsize = region.layout
        np.ndarray((*sizes, itemsize), np.bool_, marks.data, start, (*strides, 1))[...] = True
    else:
        marks[start : start + region.high - region.low] = True
    return marks


class _Column(NamedTuple):
    """What one agent did to each row, for one kind of access: its time, and the note of the last such access."""

    times: Ints
    notes: Ints


class Rows:
    """By row of `stride` bytes. An access to a part of a row is one to all of it."""

    def __init__(self, nbytes: int, stride: int) -> None:
        assert stride >= 1
        self.stride = stride
        self.count = -(-nbytes // stride)
        self._columns: dict[tuple[int, int], _Column] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def conflicts(self, actor: Actor, kind: int, region: Region) -> list[Conflict]:
        clock, me, against = actor.clock, actor.index, CONFLICTS[kind]
        found: list[Conflict] = []
        for (agent, other), latest in self._latest.items():
            if agent != me and other in against and latest > clock.get(agent, 0):
                found += self._unordered(agent, other, clock.get(agent, 0), region)
        return found

    def _unordered(self, agent: int, kind: int, known: int, region: Region) -> Iterator[Conflict]:
        times, notes = self._columns[agent, kind]
        rows = self._rows(region)
        late = np.unique(rows[times[rows] > known])
        if len(late):
            row = late[0]
            yield Conflict(agent, int(times[row]), kind, int(notes[row]), f"rows {spans(late)}")

    def put(self, actor: Actor, kind: int, region: Region, note: int) -> None:
        key = actor.index, kind
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = _Column(np.zeros(self.count, np.int32), np.zeros(self.count, np.int32))
        place = self._place(region)
        column.times[place] = actor.time
        column.notes[place] = note
        self._latest[key] = actor.time

    def _place(self, region: Region) -> Ints | slice:
        if region.chosen is not None:
            rows: Ints = region.chosen
            return rows
        if region.layout is not None and max(region.layout.strides) > self.stride:
            return self._rows_of_gaps(region.low, region.layout)
        return slice(region.low // self.stride, -(-region.high // self.stride))

    def _rows_of_gaps(self, low: int, layout: Layout) -> Ints | slice:
        """The rows of a view that may leave some out."""
        at = np.full((1,) * len(layout.sizes), low, np.int64)
        for axis, (size, stride) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
            shape = [1] * len(layout.sizes)
            shape[axis] = size
            at = at + (np.arange(size) * stride).reshape(shape)
        return np.unique(at // self.stride)

    def _rows(self, region: Region) -> Ints:
        place = self._place(region)
        return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def spans(rows: Ints, most: int = 8) -> str:
    """`3, 7..9`, for sorted distinct rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    parts = [f"{part[0]}..{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(rows, breaks)]
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")
