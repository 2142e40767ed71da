"""What is remembered of a buffer: who touched which part of it last, and when by its own clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gapless.guard.clocks import Clock
from gapless.guard.race_index import Window
from gapless.guard.race_report import CONFLICTS

Ints = npt.NDArray[Any]

LIMIT = 256
"""Distinct parts remembered of a buffer, for one agent and kind. Beyond it the oldest is forgotten: a miss."""
TIDY = 16
EXACT_ELEMENTS = 1 << 20
KINDS = len(CONFLICTS)
HALF = 32
"""Bits of a note. There is one for each distinct stack."""


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


Region = tuple[int, int, Layout | None, Any]
"""A part of a buffer: bytes `low` to `high`; with gaps when there is a layout; of them only what was chosen.

That is `Chosen` bytes, or for a buffer that is watched by rows a `Window` or row numbers. A plain tuple: it is made at
every access.
"""


class Conflict(NamedTuple):
    """An earlier access that is not known to have happened before the present one."""

    agent: int
    time: int
    kind: int
    note: int
    part: str


class Shadow:
    """One buffer's memory of accesses, by agent and kind."""

    __slots__ = ("_alone",)

    def __init__(self) -> None:
        self._alone = 0
        """The only agent that was ever here: nothing of its own is in its way. 0 before the first, -1 for several."""

    def touch(self, actor: Actor, kind: int, region: Region, note: int) -> Sequence[Conflict]:
        """Note an access; returns the earlier ones that it races with. Raises IndexError for rows out of range."""
        me = actor.index
        found: Sequence[Conflict] = ()
        if me != self._alone:
            if self._alone:
                found = self.conflicts(actor, kind, region)
            self._alone = -1 if self._alone else me
        self._put(me * KINDS + kind, actor.time, region, note)
        return found

    def conflicts(self, actor: Actor, kind: int, region: Region) -> list[Conflict]:
        """The earlier accesses that this one would race with."""
        clock, me, against = actor.clock, actor.index, CONFLICTS[kind]
        found: list[Conflict] = []
        for key, latest in self._latest():
            agent, other = divmod(key, KINDS)
            if agent != me and other in against and latest > clock.get(agent, 0):
                found += self._unordered(key, clock.get(agent, 0), region)
        return found

    def _latest(self) -> Iterable[tuple[int, int]]:
        """By agent times KINDS, plus kind: the time of the last access."""
        raise NotImplementedError

    def _unordered(self, key: int, known: int, region: Region) -> Iterator[Conflict]:
        """What the agent did later than is known, to a part of this region."""
        raise NotImplementedError

    def _put(self, key: int, time: int, region: Region, note: int) -> None:
        raise NotImplementedError


class _Parts(dict[Region, tuple[int, int]]):
    """Time and note of the last access to each part, the oldest first."""

    __slots__ = ("latest", "narrow")
    latest: int
    narrow: int
    """No part is narrower, in bytes."""


class Ranges(Shadow):
    """By byte range, exactly. Costs the same for any size of buffer."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._alone = 0
        self._seen: dict[int, _Parts] = {}

    def _latest(self) -> Iterable[tuple[int, int]]:
        return ((key, parts.latest) for key, parts in self._seen.items())

    def _unordered(self, key: int, known: int, region: Region) -> Iterator[Conflict]:
        agent, kind = divmod(key, KINDS)
        low, high = region[:2]
        for other, (time, note) in self._seen[key].items():
            if time > known and other[0] < high and low < other[1] and _meet(other, region):
                yield Conflict(agent, time, kind, note, f"bytes {max(other[0], low)}..{min(other[1], high)}")

    def _put(self, key: int, time: int, region: Region, note: int) -> None:
        width = region[1] - region[0]
        parts = self._seen.get(key)
        if parts is None:
            parts = self._seen[key] = _Parts()
            parts.narrow = width
        else:
            # A later access of the same agent stands for the earlier one: who knows of it knows of both.
            parts.pop(region, None)
            if len(parts) >= TIDY:
                if width > parts.narrow and region[2] is None and region[3] is None:
                    _drop_covered(parts, region)
                if len(parts) >= LIMIT:
                    del parts[next(iter(parts))]
            if width < parts.narrow:
                parts.narrow = width
        parts[region] = time, note
        parts.latest = time


def _drop_covered(parts: _Parts, by: Region) -> None:
    low, high = by[:2]
    for region in [r for r in parts if low <= r[0] and r[1] <= high]:
        del parts[region]
    parts.narrow = min((r[1] - r[0] for r in parts), default=high - low)


def _meet(one: Region, other: Region) -> bool:
    """Whether two parts whose hulls overlap share a byte. Only views with gaps and indexes need a closer look."""
    if one[2:] == other[2:] == (None, None):
        return True
    low, high = min(one[0], other[0]), max(one[1], other[1])
    if high - low > EXACT_ELEMENTS:
        return True
    return bool((_marked(high - low, one, low) & _marked(high - low, other, low)).any())


def _marked(size: int, region: Region, base: int) -> Ints:
    """Of `size` bytes from `base`, those that belong to the region."""
    low, high, layout, chosen = region
    marks, start = np.zeros(size, np.bool_), low - base
    if chosen is not None:
        starts, span = chosen.parts()
        at = (starts - base)[:, None] + np.arange(span)
        marks[at[(at >= 0) & (at < size)]] = True
    elif layout is not None:
        sizes, strides, itemsize = layout
        np.ndarray((*sizes, itemsize), np.bool_, marks.data, start, (*strides, 1))[...] = True
    else:
        marks[start : start + high - low] = True
    return marks


class Rows(Shadow):
    """By row of `stride` bytes. An access to a part of a row is one to all of it."""

    __slots__ = ("_cells", "_times", "count", "stride")

    def __init__(self, nbytes: int, stride: int) -> None:
        assert stride >= 1
        super().__init__()
        self.stride = stride
        self.count = -(-nbytes // stride)
        self._cells: dict[int, Ints] = {}
        """What one agent did to each row, for one kind of access: its time in the upper half, its note in the lower."""
        self._times: dict[int, int] = {}

    def _latest(self) -> Iterable[tuple[int, int]]:
        return self._times.items()

    def _unordered(self, key: int, known: int, region: Region) -> Iterator[Conflict]:
        cells = self._cells[key]
        rows = self._rows(region)
        late = np.unique(rows[cells[rows] >= (known + 1) << HALF])
        if len(late):
            agent, kind = divmod(key, KINDS)
            time, note = divmod(int(cells[late[0]]), 1 << HALF)
            yield Conflict(agent, time, kind, note, f"rows {spans(late)}")

    def _put(self, key: int, time: int, region: Region, note: int) -> None:
        cells = self._cells.get(key)
        if cells is None:
            cells = self._cells[key] = np.zeros(self.count, np.int64)
        chosen = region[3]
        if type(chosen) is Window:
            cells[chosen.first : chosen.stop][chosen.numbers] = time << HALF | note
        else:
            cells[self._place(region)] = time << HALF | note
        self._times[key] = time

    def _place(self, region: Region) -> Ints | slice:
        low, high, layout, chosen = region
        if chosen is not None:
            rows: Ints = chosen
            return rows
        if layout is not None and max(layout.strides) > self.stride:
            return self._rows_of_gaps(low, layout)
        return slice(low // self.stride, -(-high // self.stride))

    def _rows_of_gaps(self, low: int, layout: Layout) -> Ints | slice:
        """The rows of a view that may leave some out."""
        at = np.full((1,) * len(layout.sizes), low, np.int64)
        for axis, (size, stride) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
            shape = [1] * len(layout.sizes)
            shape[axis] = size
            at = at + (np.arange(size) * stride).reshape(shape)
        return np.unique(at // self.stride)

    def _rows(self, region: Region) -> Ints:
        chosen = region[3]
        if type(chosen) is Window:
            return np.arange(chosen.first, chosen.stop)[chosen.numbers].ravel()
        place = self._place(region)
        return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def spans(rows: Ints, most: int = 8) -> str:
    """`3, 7..9`, for sorted distinct rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    parts = [f"{part[0]}..{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(rows, breaks)]
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")
