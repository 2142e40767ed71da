"""The happens-before checker: what streams and threads touch, and which of it nothing orders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from . import marks, race_index, race_ops
from .race_agents import Actor, Agent
from .race_buffers import Buffer, Checksum, region_of, region_of_array
from .race_index import IndexUnknown, choose, named_rows, rows_of
from .race_report import FREE, READ, WRITE
from .race_shadow import PARTS_KEPT, Extent, Rows
from .race_state import RaceState
from .race_streams import StreamWatch

Uses = list[tuple[Tensor, int]]
Touched = Sequence[tuple[Tensor, list[Tensor]]]
"""Tensors, each with an index for its first dimensions"""
ACCESSES = {"read": READ, "write": WRITE, "free": FREE}


class RaceChecker(RaceState):
    """The checker that `with no_race()` returns. Register the buffers to watch; `races` collects the findings."""

    def __init__(self, raises: bool, everything: bool, one_thread: bool, floor: Any) -> None:
        super().__init__(raises, one_thread, floor)
        self.active = False
        self.everything = everything
        self.unknown_index = 0
        """The number of accesses by row that were not followed: their index is on a GPU or in a graph, or nothing
        says what the operator touches."""
        self.follows_results = everything
        """Whether `ran` is to be called after each operator."""
        self.device: StreamWatch | None = None

    # Calls of users.

    def register(
        self, name: str, what: Any, granularity: Literal["bytes", "rows"] | int = "bytes", host: bool = False
    ) -> None:
        """Watch `what`: a tensor, a numpy array, a named tuple of tensors, a ring of host buffers or one slot of it.

        With "bytes" an access is the exact range of a view, and an index counts as the whole view. With "rows" (of the
        first dimension), or a number of bytes per row, an index is followed to the rows that it names. `host` memory
        is checksummed as well; arrays and ring slots always count as host memory.

        Raises:
            ValueError: a name taken twice, memory that overlaps another buffer's, or a tensor with gaps.
        """
        for full, part in _parts(name, what):
            region = _region(part)
            if region is None or region[2] is not None:
                raise ValueError(f"{full!r} is empty or has gaps: register the contiguous tensor that it is a view of")
            stride = (region[1] - region[0]) // part.shape[0] if granularity == "rows" else granularity
            host = host or not isinstance(what, (Tensor, tuple))
            with self.lock:
                self.buffers.add(full, name, region, stride if isinstance(stride, int) else 0, part, host)

    def access(self, what: Any, kind: Literal["read", "write", "free"], rows: Any = None) -> None:
        """State an access of the calling thread, or of the program that runs: by numpy, or in a compiled kernel.

        `what` is a registered name, a tensor or an array; `rows` narrows a buffer that is watched by rows.
        """
        if self.active:
            what = self.buffers.by_name[what].keep if isinstance(what, str) else what
            self.reach(what, ACCESSES[kind], None if rows is None else np.unique(np.asarray(rows, np.int64)))

    def freed(self, what: Any, rows: Any = None) -> None:
        """State that the caller gives memory back: a write that may still follow is a race, a read in flight is not."""
        self.access(what, "free", rows)

    def happens_before(self, key: object) -> None:
        """Order what the caller did so far before everything that follows a later `happens_after(key)`.

        Use it for an order that the checker cannot see. `key` is any object that allows weak references.
        """
        self.agents.release(key)

    def happens_after(self, key: object) -> None:
        """See `happens_before`."""
        self.agents.acquire(key)

    def begin_again(self) -> None:
        """Forget all accesses and orders, for a test that is no part of the one before; the races so far stay."""
        with self.lock:
            if self.device is not None:
                self.device.begin_again()
            self.agents.begin_again()
            self.buffers.begin_again()
            self._pairs.clear()

    # Calls of the mode and the watchers.

    def plan(self, op: Any) -> race_ops.OperatorPlan:
        """Make the plan of an operator that was not seen before."""
        made = self.plans[id(op)] = race_ops.plan(op)
        return made

    def saw(
        self, plan: race_ops.OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any], depth: int = 2,
        together: Uses | None = None,
    ) -> tuple[int, Actor | None]:  # fmt: skip
        """The calling thread is about to run this operator.

        Its stack begins `depth` frames up, since those before are not the user's. `together` holds its tensors and what
        it does to each, where the caller has them. Returns the number of its stack, -1 if it took none, and the stream
        that it is given to.
        """
        if together is None:
            together = race_ops.tensors(plan, args, kwargs)
        uses = together
        if not self.everything:
            starts, ends = self.buffers.edges
            uses = [use for use in together if _may_reach(use[0], starts, ends)]
        if not uses or (self.device is not None and self.device.captures()):
            return -1, None
        # One function for all of it: this is what an operator costs.
        actor = host = self.agents.here()
        site = self.sites.here(depth, host.label)
        buffers, named, device, fresh = self.buffers, self.buffers.named, self.device, False
        stream: Actor | None = None
        stated = self._stated_by(plan.custom, args) if plan.custom and named else ()
        with self.lock:
            for tensor, kind in uses:
                if named and (region := region_of(tensor)) is not None:
                    found = buffers.find(region[0], region[1])
                    if found and device is not None:
                        actor = (
                            device.stream_for(tensor, together, kwargs.get("device") if plan.copies else None) or host
                        )
                        actor.news += 1
                    for buffer in found:
                        fresh |= self._use_named(actor, buffer, tensor, kind, region, site, plan, args, stated)
                    if found:
                        continue
                if not self.everything or (place := buffers.place(tensor, site)) is None:
                    continue
                buffer, region = place
                if device is not None:
                    if buffer.on_device or device.is_device(tensor):
                        buffer.on_device = True
                        # All tensors of an operator are on one device, those of a copy apart.
                        if stream is None or plan.copies:
                            stream = device.now(host, tensor)
                        actor = stream
                    else:
                        actor = (
                            device.stream_for(tensor, together, kwargs.get("device") if plan.copies else None) or host
                        )
                        actor.news += 1
                if plan.way and tensor is args[0]:
                    try:
                        region = region[0], region[1], region[2], choose(plan.way, args, region[0])
                    except IndexUnknown:
                        self.unknown_index += 1
                        continue
                if plan.copies and kind == READ and race_ops.non_blocking(plan, args, kwargs):
                    self._hold(actor, buffer, region, tensor, site)
                shadow = buffer.shadow
                if shadow.owner == actor.index and len(shadow.log) < PARTS_KEPT:
                    # A short form of `_put` for most accesses: memory that no other agent has touched.
                    if region[3] is None:
                        shadow.log[kind, region] = actor.time, site
                    else:
                        shadow.pick(kind, region, actor.time, site)
                    if kind != READ:
                        buffer.writes += 1
                else:
                    fresh |= self._put(actor, buffer, kind, region, site, tensor)
        if fresh:
            self.raise_pending()
        return site, stream

    def _hold(self, actor: Actor, buffer: Buffer, region: Extent, tensor: Tensor, site: int) -> None:
        """A stream may read this memory later: if it is the host's, unseen writes must wait for it."""
        device = self.device
        if device is None or not (isinstance(actor, Agent) and actor.is_stream):
            return
        # With gaps it is packed first, by the host.
        if region[2] is None and not device.is_device(tensor):
            device.hold(actor, Checksum(buffer, region), tensor, site)

    def _stated_by(self, name: str, args: Sequence[Any]) -> Touched | None:
        """Return what an operator that is not torch's own touches, as stated; None where that cannot be known."""
        try:
            return race_index.stated(name, args)
        except IndexUnknown:
            self.unknown_index += 1
        except IndexError:
            pass  # what is out of range is the operator's own error to raise
        return None

    def _use_named(
        self, actor: Actor, buffer: Buffer, tensor: Tensor, kind: int, region: Extent, site: int,
        plan: race_ops.OperatorPlan, args: Sequence[Any], stated: Touched | None,
    ) -> bool:  # fmt: skip
        """An operator is about to use this tensor, which shares memory with a registered buffer."""
        if buffer.host and kind == READ:
            self._hold(actor, buffer, region, tensor, site)
        if stated is None:
            return False
        try:
            if plan.custom:
                region = _stated(buffer, tensor, stated, region)
            elif plan.way and tensor is args[0]:
                region = _chosen(buffer, plan.way, args, region)
            return self._put(actor, buffer, kind, _clipped(region, buffer), site, tensor)
        except IndexUnknown:
            self.unknown_index += 1
        except IndexError:
            pass  # what is out of range is the operator's own error to raise
        return False

    def ran(
        self, plan: race_ops.OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, site: int,
        stream: Actor | None, on_device: bool = False,
    ) -> None:  # fmt: skip
        """The operator ran: its results are written; after a blocking copy the host is ordered after the stream.

        `site` and `stream` are the results of `saw`. `on_device`: the results are known to be on a device.
        """
        device = self.device
        if site < 0 and device is not None and device.captures():
            return
        if plan.makes and self.everything:
            actor = host = self.agents.here()
            if site < 0:
                site = self.sites.here(2, host.label)
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                place = self.buffers.place(tensor, site) if type(tensor) is Tensor or _has_memory(tensor) else None
                if place is None or place[0].shadow.owner:
                    continue  # a tensor that existed before has been touched
                buffer, region = place
                if device is not None:
                    if on_device or device.is_device(tensor):
                        buffer.on_device = True
                        actor = device.now(host, tensor) if stream is None or plan.copies else stream
                        if not device.made(plan, buffer, actor, site):
                            continue
                    else:
                        actor = device.stream_for(tensor, race_ops.tensors(plan, args, kwargs)) or host
                        actor.news += 1
                # No other thread has it yet, so this needs no lock and meets no race.
                buffer.writes = 1
                buffer.shadow.owner = actor.index
                buffer.shadow.log[WRITE, region] = actor.time, site
        if device is not None and plan.waits is not None:
            device.ran(plan, args, kwargs)

    def reach(self, what: Any, kind: int, rows: Any = None) -> None:
        """Note an access to a tensor or array outside of any operator."""
        region = _region(what)
        if region is not None:
            self._reach(what, (*region[:3], rows), kind)

    def reach_part(self, tensor: Tensor, region: Extent, kind: int) -> None:
        """Note an access of the calling thread to a part of a tensor's memory, by numpy."""
        if self.active:
            self._reach(tensor, region, kind, clips=False)

    def _reach(self, what: Any, region: Extent, kind: int, clips: bool = True) -> None:
        """Note an access to the buffers that hold the region; `clips`: to those that hold a part of it too."""
        actor = self.agents.here()
        site = self.sites.here(3, actor.label)
        actor.news += 1
        fresh = False
        with self.lock:
            for buffer in self._buffers_of(what, region, site):
                part = _clipped(region, buffer)
                if clips or part is region:
                    fresh |= self._put(actor, buffer, kind, part, site, what)
        if fresh:
            self.raise_pending()

    def declared(self, uses: Iterable[tuple[Tensor, int]]) -> None:
        """The caller is a graph that touches all of these tensors; which rows of those watched by rows is not known."""
        for tensor, kind in uses:
            region = _region(tensor)
            if region is None:
                continue
            site = self.sites.here(2, self.agents.here().label)
            with self.lock:
                for buffer in self._buffers_of(tensor, region, site):
                    if isinstance(buffer.shadow, Rows):
                        self.unknown_index += 1
                    else:
                        self._put(self.agents.here(), buffer, kind, _clipped(region, buffer), site, tensor)

    def checksums(self, what: Any) -> list[Checksum]:
        """Take checksums of the watched host memory of a ring slot, an array or a tensor."""
        tensor = getattr(what, "tensor", what)
        region = _region(tensor) if isinstance(tensor, (Tensor, np.ndarray)) else None
        if region is None:
            return []
        # Of memory without a name, only a slot is surely the host's.
        is_slot = tensor is not what
        with self.lock:
            found = self._buffers_of(tensor, region, self.sites.here())
        return [Checksum(buffer, region) for buffer in found if buffer.host or (is_slot and buffer.site >= 0)]

    # Private steps.

    def _buffers_of(self, what: Any, region: Extent, site: int) -> list[Buffer]:
        found = self.buffers.find(region[0], region[1])
        if not found and self.everything and isinstance(what, Tensor):
            place = self.buffers.place(what, site)
            return [] if place is None else [place[0]]
        return found

    def _put(self, actor: Actor, buffer: Buffer, kind: int, region: Extent, site: int, what: Any) -> bool:
        """Note one access to one buffer, under the lock; returns whether it is a race that was not seen before."""
        if buffer.pool is not None and buffer.pool.index != actor.index and self.device is not None:
            self.device.pools.lent(buffer, buffer.pool, what)
        if kind != READ:
            buffer.writes += 1
        conflicts = buffer.shadow.touch(actor, kind, region, site)
        return bool(conflicts) and any([self.note_race(actor, buffer, kind, site, one) for one in conflicts])


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not marks.is_fake_type(type(value))


def _region(what: Any) -> Extent | None:
    return region_of(what) if isinstance(what, Tensor) else region_of_array(what)


def _chosen(buffer: Buffer, way: int, args: Sequence[Any], region: Extent) -> Extent:
    """Return what an operator chooses of args[0], which is in `region`. Raises IndexUnknown."""
    low, high, layout, _ = region
    shadow = buffer.shadow
    if not isinstance(shadow, Rows):
        return low, high, layout, choose(way, args, low)
    inside = low >= buffer.start and high <= buffer.end
    rows = named_rows(way, args, shadow.rows(region), shadow.stride) if inside else None
    if rows is None:
        rows = rows_of(choose(way, args, low), shadow.start, shadow.stride)
    return low, high, layout, rows if inside else shadow.inside(rows)


def _stated(buffer: Buffer, tensor: Tensor, stated: Touched, region: Extent) -> Extent:
    """Return what an operator that is not torch's own touches of `tensor`. Raises IndexUnknown."""
    indexes = next((indexes for other, indexes in stated if other is tensor), None)
    if indexes is not None:
        way = race_index.FIRST_ARGUMENT if len(indexes) == 1 else race_index.LIST
        return _chosen(buffer, way, (tensor, indexes[0] if len(indexes) == 1 else indexes), region)
    if isinstance(buffer.shadow, Rows):
        raise IndexUnknown
    return region


def _clipped(region: Extent, buffer: Buffer) -> Extent:
    low, high, _, chosen = region
    if low < buffer.start or high > buffer.end:
        return max(low, buffer.start), min(high, buffer.end), None, chosen
    return region


def _may_reach(tensor: Tensor, starts: list[int], ends: list[int]) -> bool:
    """Return whether a tensor can share a byte with a buffer of these edges. Cheap: most operators touch none."""
    try:
        low = tensor.data_ptr()
    except RuntimeError:
        return False
    index = bisect_right(ends, low)
    if index == len(ends):
        return False
    gap = starts[index] - low
    return gap < 0 or gap < (tensor.nbytes if tensor.is_contiguous() else tensor.untyped_storage().nbytes())


def _parts(name: str, what: Any) -> list[tuple[str, Any]]:
    """Names and memory of what a user registers."""
    if hasattr(what, "slots"):
        return [(f"{name}[{slot.index}]", slot.tensor) for slot in what.slots]
    if isinstance(what, tuple) and hasattr(what, "_fields"):
        return [(f"{name}.{field}", part) for field, part in zip(what._fields, what, strict=True)]
    return [(name, getattr(what, "tensor", what))]
