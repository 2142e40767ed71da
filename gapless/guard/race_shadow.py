"""Remembers of a buffer which agent touched which part of it last, and when by the agent's own clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .race_agents import Actor
from .race_index import Ints, parts_of
from .race_report import CONFLICTS

PARTS_KEPT = 256
"""The distinct parts of a buffer that are remembered for one agent and kind. A forgotten one is a missed race."""
PARTS_FORGOTTEN_AT_ONCE = 64
"""When there are this many more, as many of the oldest are forgotten."""
PARTS_UNTIDIED = 16
"""Below this number, parts that lie within a new one are not looked for."""
EXACT_ELEMENTS = 1 << 20
KIND_BITS = 3
KIND_MASK = (1 << KIND_BITS) - 1
NOTE_BITS = 32
"""The bits of a note, which is the number of a stack."""


class Layout(NamedTuple):
    """A view with gaps: sizes, strides in bytes, bytes an element."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


Extent = tuple[int, int, Layout | None, Any]
"""The reach of an access: addresses `low` to `high`; with gaps when there is a layout; of them only the chosen ones.

That is `Chosen` bytes, or row numbers for a buffer that is watched by rows. A plain tuple: it is made at every access.
"""


class MemoryAccess(NamedTuple):
    """An agent's access to a part of a buffer, with its time by the agent's clock."""

    agent: int
    time: int
    kind: int
    note: int
    part: str


class Shadow:
    """One buffer's memory of accesses, by agent and kind."""

    __slots__ = ("_times", "log", "owner", "start")
    start: int
    """First address of the buffer."""
    owner: int
    """The only agent that was ever here: nothing of its own is in its way. 0 before the first, -1 for several."""
    log: dict[tuple[int, Extent], tuple[int, int]]
    """The owner's accesses: time and note, by kind and region."""
    _times: dict[int, int]
    """The time of the last access, by agent and kind."""

    def touch(self, actor: Actor, kind: int, region: Extent, note: int) -> Sequence[MemoryAccess]:
        """Note an access; returns the earlier ones that it races with. Raises IndexError for rows out of range."""
        raise NotImplementedError

    def pick(self, kind: int, region: Extent, time: int, note: int) -> None:
        raise NotImplementedError

    def conflicts(self, actor: Actor, kind: int, region: Extent) -> list[MemoryAccess]:
        """The earlier accesses that this one would race with."""
        clock, me, against = actor.clock, actor.index, CONFLICTS[kind]
        found: list[MemoryAccess] = []
        for key, latest in self._times.items():
            agent, other = key >> KIND_BITS, key & KIND_MASK
            if latest > clock.get(agent, 0) and agent != me and other in against:
                found += self._unordered(key, clock.get(agent, 0), region)
        return found

    def _unordered(self, key: int, known: int, region: Extent) -> Iterator[MemoryAccess]:
        """The agent's accesses to a part of this region that are later than the known time."""
        raise NotImplementedError


class _Parts(dict[Extent, tuple[int, int]]):
    """Time and note of one agent's last access to each part, for one kind, the oldest first."""

    __slots__ = ("narrow",)

    def __init__(self) -> None:
        self.narrow = 1 << 63
        """A lower bound of the parts' widths in bytes."""

    def add(self, time: int, region: Extent, note: int) -> None:
        # A later access of the same agent replaces the earlier one: to know of it is to know of both.
        self.pop(region, None)
        width = region[1] - region[0]
        if len(self) >= PARTS_UNTIDIED:
            if width > self.narrow and region[2] is None and region[3] is None:
                self._drop_covered(region)
            if len(self) >= PARTS_KEPT + PARTS_FORGOTTEN_AT_ONCE:
                for oldest in list(self)[:PARTS_FORGOTTEN_AT_ONCE]:
                    del self[oldest]
        if width < self.narrow:
            self.narrow = width
        self[region] = time, note

    def _drop_covered(self, by: Extent) -> None:
        low, high = by[:2]
        for region in [r for r in self if low <= r[0] and r[1] <= high]:
            del self[region]
        self.narrow = min((r[1] - r[0] for r in self), default=high - low)


class Ranges(Shadow):
    """A record of accesses by exact byte ranges. Its cost does not depend on the size of the buffer.

    Most memory is only ever touched by one agent, from few lines: then it is a short list, to which the checker adds
    directly.
    """

    __slots__ = ("_picked", "_seen")

    def __init__(self, start: int) -> None:
        self.start = start
        self.owner = 0
        self.log = {}
        self._picked: defaultdict[int, deque[tuple[Extent, int, int]]] | None = None
        """The owner's accesses by index: time and note, by kind, the oldest first."""
        self._seen: dict[int, _Parts]

    def touch(self, actor: Actor, kind: int, region: Extent, note: int) -> Sequence[MemoryAccess]:
        me = actor.index
        if not self.owner or (me == self.owner and len(self.log) < PARTS_KEPT):
            self.owner = me
            if region[3] is None:
                self.log[kind, region] = actor.time, note
            else:
                self.pick(kind, region, actor.time, note)
            return ()
        if self.owner != -1:
            self._share()
        found = super().conflicts(actor, kind, region)
        self._add(me << KIND_BITS | kind, actor.time, region, note)
        return found

    def pick(self, kind: int, region: Extent, time: int, note: int) -> None:
        """The owner used a part that an index chose. There may be many such parts, hardly two of them equal."""
        if self._picked is None:
            self._picked = defaultdict(partial(deque, maxlen=PARTS_KEPT))
        self._picked[kind].append((region, time, note))

    def conflicts(self, actor: Actor, kind: int, region: Extent) -> list[MemoryAccess]:
        if self.owner in (0, actor.index):
            return []
        if self.owner != -1:
            self._share()
        return super().conflicts(actor, kind, region)

    def _add(self, key: int, time: int, region: Extent, note: int) -> None:
        parts = self._seen.get(key)
        if parts is None:
            parts = self._seen[key] = _Parts()
        parts.add(time, region, note)
        self._times[key] = time

    def _share(self) -> None:
        """Change from one owner to a record by agent and kind."""
        owner, self.owner, self._seen, self._times = self.owner, -1, {}, {}
        done = [(kind, *entry) for kind, picked in (self._picked or {}).items() for entry in picked]
        done += [(kind, region, *when) for (kind, region), when in self.log.items()]
        # In the order of time: a part that was touched again is where it was first.
        for kind, region, time, note in sorted(done, key=lambda entry: entry[2]):
            self._add(owner << KIND_BITS | kind, time, region, note)
        self.log.clear()
        self._picked = None

    def _unordered(self, key: int, known: int, region: Extent) -> Iterator[MemoryAccess]:
        agent, kind = key >> KIND_BITS, key & KIND_MASK
        low, high = region[:2]
        for other, (time, note) in self._seen[key].items():
            if time > known and other[0] < high and low < other[1] and _meet(other, region):
                part = f"bytes {max(other[0], low) - self.start}..{min(other[1], high) - self.start}"
                yield MemoryAccess(agent, time, kind, note, part)


def _meet(one: Extent, other: Extent) -> bool:
    """Return whether two parts whose hulls overlap share a byte. Only views with gaps and indexes need a search."""
    if one[2:] == other[2:] == (None, None):
        return True
    low, high = min(one[0], other[0]), max(one[1], other[1])
    if high - low > EXACT_ELEMENTS:
        return True
    return bool((_marked(high - low, one, low) & _marked(high - low, other, low)).any())


def _marked(size: int, region: Extent, base: int) -> Ints:
    """Return which of the `size` bytes from `base` on belong to the region."""
    low, high, layout, chosen = region
    marks, start = np.zeros(size, np.bool_), low - base
    if chosen is not None:
        starts, span = parts_of(chosen)
        at = (starts - base)[:, None] + np.arange(span)
        marks[at[(at >= 0) & (at < size)]] = True
    elif layout is not None:
        sizes, strides, itemsize = layout
        np.ndarray((*sizes, itemsize), np.bool_, marks.data, start, (*strides, 1))[...] = True
    else:
        marks[start : start + high - low] = True
    return marks


class Rows(Shadow):
    """Remembers accesses by rows of `stride` bytes. An access to a part of a row counts as one to all of it."""

    __slots__ = ("_cells", "_numbers", "count", "stride")

    def __init__(self, start: int, nbytes: int, stride: int) -> None:
        assert stride >= 1
        self.start, self.owner = start, -1  # never as simple as a list
        self.stride = stride
        self.count = -(-nbytes // stride)
        self._numbers = np.arange(self.count)
        self._cells: dict[int, Ints] = {}
        """One agent's last access of one kind to each row: its time in the upper half, its note in the lower."""
        self._times = {}

    def _unordered(self, key: int, known: int, region: Extent) -> Iterator[MemoryAccess]:
        cells = self._cells[key]
        rows = self.rows(region)
        late = np.unique(rows[cells[rows] >= (known + 1) << NOTE_BITS])
        if len(late):
            agent, kind = key >> KIND_BITS, key & KIND_MASK
            time, note = divmod(int(cells[late[0]]), 1 << NOTE_BITS)
            yield MemoryAccess(agent, time, kind, note, f"rows {spans(late)}")

    def touch(self, actor: Actor, kind: int, region: Extent, note: int) -> Sequence[MemoryAccess]:
        key = actor.index << KIND_BITS | kind
        cells = self._cells.get(key)
        if cells is None:
            cells = self._cells[key] = np.zeros(self.count, np.int64)
        found = self.conflicts(actor, kind, region) if len(self._cells) > 1 else ()
        cells[self._place(region)] = actor.time << NOTE_BITS | note
        self._times[key] = actor.time
        return found

    def inside(self, rows: Ints) -> Ints:
        """Return the existing rows among these."""
        return rows[(rows >= 0) & (rows < self.count)]

    def rows(self, region: Extent) -> Ints:
        """Return the numbers of the rows that a region has a part of."""
        return self._numbers[self._place(region)]

    def _place(self, region: Extent) -> Ints | slice:
        low, high, layout, chosen = region
        if chosen is not None:
            rows: Ints = chosen
            return rows
        if layout is not None and max(layout.strides) > self.stride:
            return self._rows_of_gaps(low - self.start, layout)
        return slice((low - self.start) // self.stride, -(-(high - self.start) // self.stride))

    def _rows_of_gaps(self, low: int, layout: Layout) -> Ints:
        """The rows of a view that may leave some out."""
        places = zip(np.indices(layout.sizes, sparse=True), layout.strides, strict=True)
        return np.unique(sum((place * stride for place, stride in places), low) // self.stride)


def spans(rows: Ints, most: int = 8) -> str:
    """Write sorted distinct rows as `3, 7..9`."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    parts = [f"{part[0]}..{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(rows, breaks)]
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")
