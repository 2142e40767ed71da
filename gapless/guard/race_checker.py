"""The happens-before checker: what streams and threads touch, and which of it nothing orders."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gapless.guard import race_ops
from gapless.guard.clocks import Agent
from gapless.guard.race_agents import Agents, Launched
from gapless.guard.race_buffers import Buffer, Buffers, Checksum, Extent, extent_of, memory_extent
from gapless.guard.race_cuda import CudaWatch
from gapless.guard.race_explain import Deed, explain
from gapless.guard.race_report import FREE, READ, REUSE, VERBS, WRITE, Race, RaceError, Side
from gapless.guard.race_shadow import Actor, Chosen, Conflict, Region, Rows
from gapless.guard.race_sites import Sites
from gapless.guard.sites import UNKNOWN

KINDS = {"read": READ, "write": WRITE, "free": FREE}


class RaceChecker:
    """What `no_race()` hands out. Register the buffers to watch; `races` collects what is found."""

    def __init__(self, raises: bool, everything: bool, one_thread: bool, floor: Any) -> None:
        self.active = False
        self.everything = everything
        """Whether every tensor is watched, registered or not."""
        self.races: list[Race] = []
        self.unknown_index = 0
        """Accesses by row that were not followed, since their index lies on a GPU."""
        self.follows_results = everything
        """Whether `ran` is to be called after each operator."""
        self.cuda: CudaWatch | None = None
        self.lock = threading.RLock()
        self.agents = Agents(one_thread, self.lock)
        self.sites = Sites(floor)
        self.buffers = Buffers()
        self._raises = raises
        self._raised = 0
        self._plans: dict[Any, race_ops.Plan] = {}
        self._notes: list[tuple[int, str, int]] = []
        self._note_of: dict[tuple[int, str, int], int] = {}
        self._pairs: set[Any] = set()

    # What a user calls.

    def register(
        self, name: str, what: Any, granularity: Literal["bytes", "rows"] | int = "bytes", host: bool = False
    ) -> None:
        """Watch `what`: a tensor, a numpy array, a named tuple of tensors, a ring of host buffers or one slot of it.

        By "bytes" an access is the exact range of a view, and an index counts as the whole view. By "rows" (of the
        first dimension), or by rows of so many bytes, an index is followed to the rows that it names. Of `host`
        memory checksums are taken as well; arrays and ring slots are host memory without being told.

        Raises:
            ValueError: a name taken twice, memory that overlaps another buffer's, or a tensor with gaps.
        """
        for full, part in _parts(name, what):
            self._register(full, name, part, granularity, host or not isinstance(what, (Tensor, tuple)))

    def access(self, what: Any, kind: Literal["read", "write", "free"], rows: Any = None) -> None:
        """State an access of the calling thread, or of the program that runs: by numpy, or in a compiled kernel.

        `what` is a registered name, a tensor or an array; `rows` narrows a buffer that is watched by rows.
        """
        if self.active:
            what = self.buffers.by_name[what].keep if isinstance(what, str) else what
            self.reach(what, KINDS[kind], None if rows is None else np.unique(np.asarray(rows, np.int64)))

    def freed(self, what: Any, rows: Any = None) -> None:
        """The caller gives this memory back: whoever may still write it races. A read in flight is let be."""
        self.access(what, "free", rows)

    def happens_before(self, key: object) -> None:
        """Orders what the caller did so far before everything behind a later `happens_after(key)`.

        For orders that come about by means that are not seen. `key` is any object that allows weak references.
        """
        self.agents.release(key)

    def happens_after(self, key: object) -> None:
        """See `happens_before`."""
        self.agents.acquire(key)

    def check(self) -> None:
        """Raise RaceError with all findings so far, if there are any."""
        if self.races:
            self._raised = len(self.races)
            raise RaceError(self.races)

    # What the mode and the watchers call.

    def saw(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The calling thread is about to run this operator."""
        plan = self._plans.get(op)
        if plan is None:
            plan = self._plans[op] = race_ops.plan(op)
        if plan.args:
            starts, ends = self.buffers.edges
            for tensor, kind in race_ops.tensors(plan, args, kwargs):
                if self.everything or _may_reach(tensor, starts, ends):
                    self._use(tensor, kind, plan, args, kwargs)

    def _use(self, tensor: Tensor, kind: int, plan: race_ops.Plan, args: Sequence[Any], kwargs: Any) -> None:
        extent = extent_of(tensor)
        if extent is None:
            return
        found = self._buffers_of(tensor, extent)
        if not found:
            return
        actor = self._actor(tensor, plan, args, kwargs)
        for buffer in found:
            if plan.chooses and tensor is args[0]:
                self._put_chosen(actor, buffer, kind, extent, plan.name, args)
            else:
                self._put(actor, buffer, kind, extent, None)
            if kind == READ and buffer.host and self.cuda is not None and isinstance(actor, Agent) and actor.is_stream:
                self.cuda.hold(actor, Checksum(buffer, extent), tensor)

    def ran(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """It ran: what it made is written, and a copy that blocked has ordered the host behind the stream."""
        plan = self._plans[op]
        if self.everything and plan.makes:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and (extent := extent_of(tensor)) and self._is_new(tensor):
                    actor, buffer = self._actor(tensor, plan, args, kwargs), self._automatic(tensor)
                    if self.cuda is None or self.cuda.made(plan, buffer, tensor, actor):
                        self._put(actor, buffer, WRITE, extent, None)
        if self.cuda is not None:
            self.cuda.ran(plan, args, kwargs)

    def reach(self, what: Any, kind: int, rows: Any = None) -> None:
        """An access to a tensor or array that is no operator's."""
        extent = _extent(what)
        if extent is not None:
            for buffer in self._buffers_of(what, extent):
                self._put(self.agents.here(), buffer, kind, extent, rows)

    def reused(self, buffer: Buffer, stream: Agent, but: set[int], report: bool) -> bool:
        """The stream may be given the memory of this buffer, which is gone: whoever used it must be known to be done.

        The agents `but` are let be. True when it was so, or else was told because of `report`.
        """
        whole = Region(0, buffer.end - buffer.start)
        conflicts = [found for found in buffer.shadow.conflicts(stream, WRITE, whole) if found.agent not in but]
        if conflicts and report:
            note = self._note(stream)
            for conflict in conflicts:
                self._found(stream, buffer, REUSE, note, conflict)
        return report or not conflicts

    def checksums(self, what: Any) -> list[Checksum]:
        """Of the watched host memory that a ring slot, an array or a tensor is, as it is now."""
        tensor = getattr(what, "tensor", what)
        extent = _extent(tensor) if isinstance(tensor, (Tensor, np.ndarray)) else None
        if extent is None:
            return []
        # Of memory without a name, only a slot is surely the host's.
        is_slot = tensor is not what
        found = self._buffers_of(tensor, extent)
        return [Checksum(buffer, extent) for buffer in found if buffer.host or (is_slot and buffer.site is not None)]

    def overwritten(self, checksum: Checksum, stream: Agent, program: str, stack: int, launched: int) -> None:
        """What a stream uses was written, unseen, after that was enqueued and before it was known to be done."""
        title, use = stream.title(), f"program {program}" if program else "the copy"
        missing = (
            f"its bytes changed after {use} was launched on {title} and before it had run: somebody wrote it, "
            f"unseen by torch, without waiting for a fence of {title} behind it"
        )
        mend = f"wait for the fence that {stream.name} records behind {use}, or write another slot"
        stacks = [self.sites.frames(number) if number >= 0 else () for number in (stack, launched)]
        sides = Side(title, program, "uses", *stacks), Side("a host thread", "", "writes (unseen)", ())
        race = Race(self.name(checksum.buffer), checksum.part, missing, mend, *sides, "overwritten")
        with self.lock:
            self._keep(checksum.buffer.group, race)

    def raise_pending(self) -> None:
        """On a host thread: raise what programs were found to do since the last call."""
        if self._raises and len(self.races) > self._raised and not isinstance(self.agents.here(), Launched):
            new = self.races[self._raised :]
            self._raised = len(self.races)
            raise RaceError(new)

    # Inside.

    def _register(self, name: str, group: str, what: Any, granularity: str | int, host: bool) -> None:
        extent = _extent(what)
        if extent is None or extent.layout is not None:
            raise ValueError(f"{name!r} is empty or has gaps: register the contiguous tensor that it is a view of")
        if granularity == "rows":
            granularity = (extent.high - extent.low) // what.shape[0]
        stride = granularity if isinstance(granularity, int) else 0
        with self.lock:
            self.buffers.add(name, group, extent, stride, what, host)

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self.buffers.storages

    def _buffers_of(self, what: Any, extent: Extent) -> list[Buffer]:
        found = [*self.buffers.find(extent.low, extent.high)]
        if not found and self.everything and isinstance(what, Tensor):
            found = [self._automatic(what)]
        return found

    def _automatic(self, tensor: Tensor) -> Buffer:
        with self.lock:
            return self.buffers.automatic(tensor, self.sites.here())

    def _actor(self, tensor: Tensor, plan: race_ops.Plan, args: Any, kwargs: Any) -> Actor:
        stream = self.cuda and self.cuda.stream_for(tensor, race_ops.tensors(plan, args, kwargs))
        return stream or self.agents.here()

    def _put_chosen(self, actor: Actor, buffer: Buffer, kind: int, extent: Extent, name: str, args: Any) -> None:
        """The first argument of an operator whose index chooses what it touches of it."""
        base, itemsize = extent.low - buffer.start, args[0].element_size()
        stride = buffer.shadow.stride if isinstance(buffer.shadow, Rows) else 0
        rows = _rows_by_first(args, base, itemsize, stride) if stride and name in race_ops.BY_LIST else None
        if rows is None:
            chosen = race_ops.elements(name, args)
            if chosen is None:
                self.unknown_index += 1
                return
            rows = _rows(chosen, base, itemsize, stride) if stride else Chosen.of(chosen, base, itemsize)
        try:
            self._put(actor, buffer, kind, extent, rows)
        except IndexError:
            return  # what is out of range is the operator's own error to raise

    def _put(self, actor: Actor, buffer: Buffer, kind: int, extent: Extent, chosen: Any) -> None:
        low, high, layout = extent
        base, end = buffer.start, buffer.end
        if low < base or high > end:
            low, high, layout = max(low, base), min(high, end), None
        region = Region(low - base, high - base, layout, chosen)
        with self.lock:
            conflicts = buffer.shadow.conflicts(actor, kind, region)
            note = self._note(actor)
            buffer.shadow.put(actor, kind, region, note)
            buffer.writes += kind != READ
            fresh = [self._found(actor, buffer, kind, note, conflict) for conflict in conflicts]
        if any(fresh):
            self.raise_pending()

    def _note(self, actor: Actor) -> int:
        """The number of what a report needs of an access: its stack, its program, where that was launched."""
        # From the caller of `_put` on: the frames between are never a user's.
        stack = self.sites.here(3)
        key = (stack, actor.name, actor.site) if isinstance(actor, Launched) else (stack, "", -1)
        number = self._note_of.get(key)
        if number is None:
            number = self._note_of[key] = len(self._notes)
            self._notes.append(key)
        return number

    def _found(self, actor: Actor, buffer: Buffer, kind: int, note: int, other: Conflict) -> bool:
        """Two unordered accesses: a race, unless the same two raced before."""
        pair = buffer.group, frozenset(((other.note, other.kind), (note, kind)))
        if pair in self._pairs:
            return False
        self._pairs.add(pair)
        first = Deed(other.agent, other.time, VERBS[other.kind], self._notes[other.note][1])
        second = Deed(actor.index, actor.time, VERBS[kind], self._notes[note][1])
        name = self.name(buffer)
        missing, mend = explain(self.agents, self.sites, name, first, second)
        sides = self._side(first, other.note), self._side(second, note)
        return self._keep(buffer.group, Race(name, other.part, missing, mend, *sides))

    def _keep(self, group: str, race: Race) -> bool:
        """One report for two lines and a buffer, in whichever order they came."""
        sides = sorted((side.site, side.verb) for side in (race.first, race.second))
        key = (race.rule, group, *sides)
        if key in self._pairs:
            return False
        self._pairs.add(key)
        self.races.append(race)
        return True

    def name(self, buffer: Buffer) -> str:
        if buffer.site is None:
            return buffer.name
        return f"tensor first seen at {next(iter(self.sites.frames(buffer.site)), UNKNOWN).where}"

    def _side(self, deed: Deed, note: int) -> Side:
        site, program, launched = self._notes[note]
        frames = self.sites.frames(launched) if launched >= 0 else ()
        return Side(self.agents[deed.agent].title(), program, deed.verb, self.sites.frames(site), frames)


def _extent(what: Any) -> Extent | None:
    return extent_of(what) if isinstance(what, Tensor) else memory_extent(what)


def _may_reach(tensor: Tensor, starts: list[int], ends: list[int]) -> bool:
    """Whether a tensor can share a byte with a buffer of these edges. Costs little: most operators touch none."""
    try:
        low = tensor.data_ptr()
    except RuntimeError:
        return False
    index = bisect_right(ends, low)
    if index == len(ends):
        return False
    gap = starts[index] - low
    return gap < 0 or gap < (tensor.nbytes if tensor.is_contiguous() else tensor.untyped_storage().nbytes())


def _rows_by_first(args: Any, base: int, itemsize: int, stride: int) -> Any:
    """The short way for x[i, j] where the buffer's rows are those of x: row numbers as they stand in i."""
    source = args[0]
    if source.stride(0) * itemsize != stride or base % stride:
        return None
    chosen = race_ops.first_rows(source, args[1])
    if chosen is None or (chosen.reach + 1) * itemsize > stride:
        return None
    return chosen.offsets + base // stride if base else chosen.offsets


def _rows(chosen: race_ops.Elements, base: int, itemsize: int, stride: int) -> Any:
    """Rows of `stride` bytes that hold these elements of a tensor that begins at byte `base`."""
    offsets, step, behind = chosen.offsets, chosen.step * itemsize, (chosen.reach + 1) * itemsize - 1
    if step == stride and base % stride + behind < stride:
        return offsets + base // stride if base >= stride else offsets
    start = offsets * step + base
    low = start // stride
    # One element lies in one row; only what reaches further may leave it.
    if chosen.reach and ((high := (start + behind) // stride) > low).any():
        low = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(low, high, strict=True)]))
    return low


def _parts(name: str, what: Any) -> list[tuple[str, Any]]:
    """Names and memory of what a user registers."""
    if hasattr(what, "slots"):
        return [(f"{name}[{slot.index}]", slot.tensor) for slot in what.slots]
    if isinstance(what, tuple) and hasattr(what, "_fields"):
        return [(f"{name}.{field}", part) for field, part in zip(what._fields, what, strict=True)]
    return [(name, getattr(what, "tensor", what))]
