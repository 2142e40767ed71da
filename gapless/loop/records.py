"""Step records: the contents and times of each step, as columns of one integer array."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from gapless.base.records import Int64s, StepPlan

KEPT_STEPS = 4096
"""Steps kept in a ring."""
NO_COPIES = (0, 0, 0, 0)
"""The columns from `loads_from` to `stores_until` if no pages moved"""
NO_CAPTURE = (0, 0)
"""The columns `capture_from` and `capture_until` if nothing was captured"""
StepRows = npt.NDArray[np.void]
"""[n] of STEP."""


@dataclass(slots=True)
class StepCounts:
    """Counts of the loop since its start; engine/series.py describes each."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    admitted_tokens: int = 0
    admitted_cached: int = 0
    admitted_loaded: int = 0
    """Prompt tokens among the found ones loaded from a tier: host memory, one below it, or a peer"""
    prefix_queries: int = 0
    prefix_hits: int = 0
    declined_depth: int = 0
    declined_ring: int = 0
    declined_capture: int = 0
    declined_queue: int = 0
    """Launches declined because eager steps filled the driver's launch queue"""
    declined_ranks: int = 0
    """Launches declined because some rank is too far behind to take another order"""
    captures_refused: int = 0
    graph_steps: int = 0
    graph_misses: int = 0
    chained_steps: int = 0
    dropped_identity: int = 0
    held_rows: int = 0
    over_itl_rows: int = 0
    """Steps with decoding rows that took longer than max_itl: by these rows alone here, by the least chunk or by chunks
    with too low a forecast in the next two"""
    over_itl_chunk: int = 0
    over_itl_late: int = 0

    def decline(self, cause: str) -> None:
        """Count a launch that was put off."""
        name = f"declined_{cause}"
        setattr(self, name, getattr(self, name) + 1)

    @property
    def eager_steps(self) -> int:
        return self.steps - self.graph_steps - self.graph_misses

    @property
    def admitted_computed(self) -> int:
        return self.admitted_tokens - self.admitted_cached

    @property
    def admitted_here(self) -> int:
        return self.admitted_cached - self.admitted_loaded


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Numbers of each rank of an engine, the leader first; empty for one rank."""

    lag: tuple[int, ...] = ()
    """Steps sent to a rank that it has not taken up."""
    waited_ns: tuple[int, ...] = ()
    """Time that its steps waited for other ranks."""


@dataclass(slots=True)
class MaskCounts:
    """Masks written for rows with matchers."""

    written: int = 0
    ns: int = 0


class ChunkRecord(NamedTuple):
    """Known tokens that ran in a step: `size` from position `start`."""

    key: int
    start: int
    size: int


def chunk_records(plan: StepPlan, keys: Int64s) -> tuple[ChunkRecord, ...]:
    """Return the known tokens that run in a planned step; `keys` are the requests of all rows."""
    return tuple([ChunkRecord(int(keys[chunk.row]), chunk.start, chunk.size) for chunk in plan.chunks])


class StepRecord(NamedTuple):
    """One step. Times are ns of the device's clock, on which host and device agree.

    The first step of a chain has the visit's times of planning and packing. The others are planned and packed at the
    moment when the one before was enqueued, so that host times add up. A wait for the end of a chain is the first
    step's; the others were observed without one.
    """

    step: int
    decode_rows: int
    chunk_tokens: int
    in_flight: int
    """Steps in flight at its launch, itself included."""
    work_at: int
    """When the idle loop got work again, after the launch before this one; otherwise 0."""
    held_by: int
    """The step that the depth limit made this one wait for; 0 if it did not wait."""
    held_until: int
    """When the tokens of that step reached the host, or 0."""
    planning_at: int
    """Start of planning."""
    planned_at: int
    packed_at: int
    """The packet was complete in pinned memory."""
    launched_at: int
    """All of it was enqueued."""
    loads_from: int
    """Start of the latest stretch of host tier loads that ended since the launch before; 0 without one."""
    loads_until: int
    stores_from: int
    """Start of the latest stretch of stores to the host tier, by the same rule."""
    stores_until: int
    capture_from: int
    """Start of the first capture since the launch before; 0 without one."""
    capture_until: int
    """End of the last of them."""
    missed: bool
    """Whether it ran eagerly because no graph was captured for it."""
    chained: bool
    """Whether the visit that enqueued it also enqueued the step before it."""
    device_start: int
    device_end: int
    home_at: int
    """Arrival of the tokens in host memory; `device_end` if the device writes there itself."""
    observing_at: int
    """The host turned to it, and may have waited from here."""
    observed_at: int
    committed_at: int
    waited: bool
    """Whether the host waited for this step, in observe."""
    in_vain: bool
    """Whether it computed no prompt, and gave no row a token since the masks of all were late"""
    ranks_ns: int
    """The part of its time on the device that it waited for other ranks."""
    decode: Int64s
    """Requests that decoded one token each; steps with the same ones share the array."""
    chunks: tuple[ChunkRecord, ...]
    """Known tokens that ran, of a prompt or of a preempted request."""
    waits: tuple[int, ...] = ()
    """`ranks_ns` of each further rank, in order."""

    @property
    def host_ns(self) -> int:
        """Host time spent on the step, waiting excluded."""
        return self.launched_at - self.planning_at + self.committed_at - self.observed_at

    @property
    def device_ns(self) -> int:
        return self.device_end - self.device_start


COLUMNS = StepRecord._fields[: StepRecord._fields.index("decode")]
"""Integer columns of a step, those of a launch first."""
STEP = np.dtype([(name, np.int64) for name in COLUMNS])
_LAUNCH_COLUMNS = COLUMNS.index("device_start")
# Much faster than to assign to the array, column by column.
_LAUNCH = struct.Struct(f"{_LAUNCH_COLUMNS}q")
_END = struct.Struct(f"{len(COLUMNS) - _LAUNCH_COLUMNS}q")
_STEP_BYTES = STEP.itemsize


class StepTable(Sequence[StepRecord]):
    """Steps in order: `rows` [n] are their integer columns, `decode` and `chunks` their requests, and `waits` the
    waits of further ranks.

    An index gives a StepRecord.
    """

    __slots__ = ("chunks", "decode", "rows", "waits")

    def __init__(
        self, rows: StepRows, decode: list[Int64s], chunks: list[tuple[ChunkRecord, ...]], waits: list[tuple[int, ...]]
    ) -> None:
        assert len(rows) == len(decode) == len(chunks) == len(waits), "a step has one entry of each"
        self.rows = rows
        self.decode = decode
        self.chunks = chunks
        self.waits = waits

    @classmethod
    def of(cls, records: Iterable[StepRecord] = ()) -> StepTable:
        """Return the table of these steps."""
        records = list(records)
        rows = np.array([record[: len(COLUMNS)] for record in records], STEP)
        return cls(rows, *([getattr(record, name) for record in records] for name in ("decode", "chunks", "waits")))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...
    @overload
    def __getitem__(self, place: slice) -> StepTable: ...
    def __getitem__(self, place: int | slice) -> StepRecord | StepTable:
        if isinstance(place, slice):
            return StepTable(self.rows[place], self.decode[place], self.chunks[place], self.waits[place])
        return _record(self.rows[place].item(), self.decode[place], self.chunks[place], self.waits[place])

    def __iter__(self) -> Iterator[StepRecord]:
        return map(_record, self.rows.tolist(), self.decode, self.chunks, self.waits)

    def __add__(self, other: StepTable) -> StepTable:
        rows = np.concatenate([self.rows, other.rows])
        return StepTable(rows, self.decode + other.decode, self.chunks + other.chunks, self.waits + other.waits)


def _record(
    numbers: Sequence[Any], decode: Int64s, chunks: tuple[ChunkRecord, ...], waits: tuple[int, ...]
) -> StepRecord:
    columns: dict[str, Any] = dict(zip(COLUMNS, numbers, strict=True))
    flags = {name: bool(columns[name]) for name in ("missed", "chained", "waited", "in_vain")}
    return StepRecord(**(columns | flags), decode=decode, chunks=chunks, waits=waits)


class StepRing:
    """The latest KEPT_STEPS ended steps, oldest first, in one array. Steps in flight are not counted."""

    def __init__(self, size: int = KEPT_STEPS) -> None:
        self._bytes = bytearray(size * _STEP_BYTES)
        self._rows = np.frombuffer(self._bytes, STEP)
        self._decode: list[Int64s] = [np.zeros(0, np.int64)] * size
        self._chunks: list[tuple[ChunkRecord, ...]] = [()] * size
        self._waits: list[tuple[int, ...]] = [()] * size
        self._size = size
        self._first = 0
        self.begun = self.ended = self.accounted = 0
        """Steps launched, ended, and taken into the timeline since the ring was made."""

    def __len__(self) -> int:
        return self.ended - self.oldest

    @property
    def oldest(self) -> int:
        """Number of the oldest kept step, as counted by `ended`."""
        return max(self._first, self.begun - self._size)

    def begin(self, decode: Int64s, chunks: tuple[ChunkRecord, ...], *launch: int) -> None:
        """Add a launched step: the columns from `step` to `chained`, in order."""
        place = self.begun % self._size
        self._decode[place], self._chunks[place] = decode, chunks
        _LAUNCH.pack_into(self._bytes, place * _STEP_BYTES, *launch)
        self.begun += 1

    def end(self, waits: tuple[int, ...], *end: int) -> None:
        """End the oldest step in flight: further ranks' waits, and the columns from `device_start` on, in order."""
        place = self.ended % self._size
        self._waits[place] = waits
        _END.pack_into(self._bytes, place * _STEP_BYTES + _LAUNCH.size, *end)
        self.ended += 1

    def flying(self, place: int, column: str) -> int:
        """Return a column of the step at `place` among the steps in flight."""
        return int(self._rows[column][(self.ended + place) % self._size])

    def extend(self, steps: StepTable) -> None:
        """Take over ended steps; the ring has none in flight."""
        assert self.begun == self.ended, "steps of this ring's own have not ended"
        self.begun = self.ended = self.ended + len(steps)
        steps = steps[-self._size :]
        places = [place % self._size for place in range(self.ended - len(steps), self.ended)]
        self._rows[places] = steps.rows
        for place, decode, chunks, waits in zip(places, steps.decode, steps.chunks, steps.waits, strict=True):
            self._decode[place], self._chunks[place], self._waits[place] = decode, chunks, waits

    def rows(self, first: int) -> StepRows:
        """Return the columns of steps from number `first` on, as counted by `ended`; a view if contiguous."""
        begin, end = first % self._size, self.ended % self._size
        if first == self.ended or begin < end:
            return self._rows[begin:end]
        return np.concatenate([self._rows[begin:], self._rows[:end]])

    def table(self, first: int) -> StepTable:
        """Return a copy of the kept steps from number `first` on, as counted by `ended`."""
        first = min(max(first, self.oldest), self.ended)
        places = [place % self._size for place in range(first, self.ended)]
        decode, chunks = [self._decode[place] for place in places], [self._chunks[place] for place in places]
        return StepTable(self.rows(first).copy(), decode, chunks, [self._waits[place] for place in places])

    def after(self, step: int, since: int = 0) -> StepTable:
        """Return the steps later than `step`, committed at or after `since`; steps are numbered without gaps."""
        newest = int(self._rows["step"][(self.ended - 1) % self._size]) if len(self) else step
        found = self.table(self.ended - max(0, newest - step))
        return found[int(np.searchsorted(found.rows["committed_at"], since)) :] if since else found

    def clear(self) -> None:
        self._first = self.ended

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.table(self.oldest))
