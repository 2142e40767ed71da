"""Follows the work of torch.distributed: a collective that is not waited for at once runs on its group's own stream.

It comes after what the current stream has by then. Reads and writes of its tensors must come after `work.wait()`,
and the current stream waits there, as does the host if the tensors are on the host. A synchronous collective is
the current stream's. Memory stays with the work until it is done, however early its tensors go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import marks
from .emulated_groups import BETWEEN, IN_PLACE
from .patches import Patches
from .race_agents import OF_GROUP, Agent, GroupProgram, VectorClock
from .race_checker import RaceChecker
from .race_ops import OperatorPlan
from .race_report import READ, WRITE
from .race_streams import StreamWatch
from .sync_ops import RunOp
from .watch import ON_WAIT

_Touched = list[tuple[Tensor, int]]

_READ_AT: dict[str, Callable[[bool], bool]] = {
    "send": lambda is_root: True, "broadcast": lambda is_root: is_root, "reduce": lambda is_root: not is_root,
}  # fmt: skip
"""Methods that leave the memory of their first argument as it is, on the ranks that this chooses."""

_FUNCTIONAL = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_",
    "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced", "all_to_all_single", "isend", "irecv",
)  # fmt: skip
_COPIED = ("all_reduce", "all_reduce_coalesced", "broadcast")
"""Operators of `_c10d_functional`, and the ones that work on a copy which the current stream makes."""

_PLAN = OperatorPlan(None, "", (), False, False, 0, False, None, "")


@dataclass(slots=True, eq=False)
class _Point:
    """The end of a work: its waiters learn `clock`, the host among them if the memory is its own."""

    clock: VectorClock
    on_host: bool
    group: Agent


class GroupWatch:
    """Wraps process groups, their works and futures while the checker is active."""

    def __init__(self, checker: RaceChecker, device: StreamWatch) -> None:
        self._checker = checker
        self._agents = checker.agents
        self._device = device
        self._points: weakref.WeakKeyDictionary[Any, _Point] = weakref.WeakKeyDictionary()
        """The ends of works, and of the futures that stand for them."""
        self._mark = f"_gapless_work_{id(self)}"
        """The attribute of a storage that holds the point of its last work."""

    def install(self, patches: Patches) -> None:
        if not torch.distributed.is_available():
            return
        core: Any = torch._C._distributed_c10d
        group, work, future = core.ProcessGroup, core.Work, torch._C.Future
        for name in (*IN_PLACE, *BETWEEN, "_end_coalescing"):
            if hasattr(group, name):
                patches.wrap(group, name, partial(self._begun, name))
        patches.wrap(group, "barrier", self._met)
        patches.wrap(group, "_wait_for_pending_works", self._all_waited)
        for owner, name in ((work, "wait"), (work, "synchronize"), (work, "block_current_stream"), (future, "wait")):
            if hasattr(owner, name):
                patches.wrap(owner, name, self._waited)
        patches.wrap(work, "is_completed", self._asked)
        patches.wrap(work, "get_future", self._future)
        patches.wrap(future, "then", self._then)
        for name, many in (("wait_all", True), ("collect_all", False)):
            patches.wrap(torch.futures, name, partial(self._collected, many))
        patches.wrap(torch.distributed, "_register_comm_hook", self._hooked)
        for name in _FUNCTIONAL:
            self._plan(name, partial(self._ran_functional, name))
        self._plan("wait_tensor", self._tensor_waited)

    def _plan(self, name: str, around: Callable[..., Any]) -> None:
        op = getattr(getattr(torch.ops._c10d_functional, name, None), "default", None)
        if op is not None:
            self._checker.plans[id(op)] = _PLAN._replace(op=op, is_idle=True, around=around)

    def _is_off(self) -> bool:
        return not self._checker.active or self._device.captures() or not self._agents.known_thread()

    # Beginnings.

    def _begun(self, name: str, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace a method of a group: note its accesses, as the group's stream or, if it waits, the current one."""
        if self._is_off():
            return original(group, *args, **kwargs)
        given = (*args, *kwargs.values())
        uses = _uses(name, group, given)
        if not all(getattr(options, "asyncOp", True) for options in given):
            self._touch(uses)
            return original(group, *args, **kwargs)
        work, point = self._run(name, group.group_name, uses, partial(original, group, *args, **kwargs))
        if work is not None:
            self._points[work] = point
        return work

    def _run(self, name: str, group: str, uses: _Touched, run: Callable[[], Any]) -> tuple[Any, _Point]:
        """Run a collective on its group's stream; returns its result and its end."""
        on_host = bool(uses) and not any([self._device.is_device(tensor) for tensor, _ in uses])
        stream = self._agents.stream(("group", group), OF_GROUP + group, None)
        site = self._checker.sites.here(2)
        if on_host:
            self._agents.enqueue(stream)
        else:
            self._agents.wait(stream, self._agents.record(self._device.agent_of(None), site))
        with self._agents.acting_as(GroupProgram(stream, name.strip("_"), site)):
            self._touch(uses)
            result = run()
            made = [tensor for tensor in _tensors(result) if all(tensor is not used for used, _ in uses)]
            self._touch([(tensor, WRITE) for tensor in made])
        point = _Point(self._agents.record(stream, site), on_host, stream)
        for tensor in (*made, *(tensor for tensor, _ in uses)):
            self._keep(tensor, point)
        return result, point

    def _touch(self, uses: _Touched) -> None:
        with marks.FunctionsOff():
            self._checker.saw(_PLAN, (), {}, 2, uses)

    def _keep(self, tensor: Tensor, point: _Point) -> None:
        """The work holds this memory until it is done."""
        with marks.FunctionsOff():
            if tensor.layout is torch.strided:
                setattr(tensor.untyped_storage(), self._mark, point)
                self._device.pools.keep_for(tensor, point.group)

    # Ends.

    def _learn(self, point: _Point | None) -> None:
        if point is None or self._is_off():
            return
        if point.on_host:
            self._device.host_knows(point.clock)
        else:
            self._agents.wait(self._device.agent_of(None), point.clock)
        self._checker.raise_pending()

    def _waited(self, original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `wait` of works and of futures."""
        result = original(work, *args, **kwargs)
        self._learn(self._points.get(work))
        return result

    def _asked(self, original: Any, work: Any) -> Any:
        """Replace `is_completed`: the host sees that it is done, or learns nothing."""
        done, point = original(work), self._points.get(work)
        if done and point is not None and not self._is_off():
            self._device.host_knows(point.clock)
        return done

    def _met(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `barrier`: unless it is asynchronous, the host waits for the current stream."""
        work = original(group, *args, **kwargs)
        is_async = all(getattr(options, "asyncOp", True) for options in (*args, *kwargs.values()))
        if not (is_async or self._is_off()):
            for follow in ON_WAIT:
                follow()
        return work

    def _all_waited(self, original: Any, group: Any) -> None:
        original(group)
        if not self._is_off():
            for point in list(self._points.values()):
                self._device.host_knows(point.clock)

    # Futures.

    def _future(self, original: Any, work: Any) -> Any:
        future, point = original(work), self._points.get(work)
        if point is not None:
            self._points[future] = point
        return future

    def _then(self, original: Any, future: Any, callback: Callable[[Any], Any]) -> Any:
        """Replace `then`, whose callback runs on a stream that waits for the work; so does what waits for its end."""
        point = self._points.get(future)
        if point is None:
            return original(future, callback)
        after = _Point(point.clock.copy(), point.on_host, point.group)
        child = original(future, partial(self._called_back, after, callback))
        self._points[child] = after
        return child

    def _called_back(self, after: _Point, callback: Callable[[Any], Any], future: Any) -> Any:
        self._points[future] = after
        if self._is_off():
            return callback(future)
        self._agents.wait(after.group, after.clock)
        site = self._checker.sites.here()
        with self._agents.acting_as(GroupProgram(after.group, getattr(callback, "__qualname__", ""), site)):
            result = callback(future)
        after.clock.join(self._agents.record(after.group, site))
        return result

    def _collected(self, waits: bool, original: Any, futures: Sequence[Any]) -> Any:
        """Replace `wait_all`, and `collect_all`, whose future ends when all have."""
        result, found = original(futures), [self._points.get(future) for future in futures]
        points = [point for point in found if point is not None]
        for point in points if waits else ():
            self._learn(point)
        if points and not waits:
            clock = VectorClock()
            for point in points:
                clock.join(point.clock)
            self._points[result] = _Point(clock, points[0].on_host, points[0].group)
        return result

    def _hooked(self, original: Any, reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
        """Replace how a hook of DistributedDataParallel is registered: its reducer waits for the future, unseen."""

        def watched(*args: Any) -> Any:
            future = hook(*args)
            self._learn(self._points.get(future))
            return future

        return original(reducer, state, watched)

    # Functional collectives.

    def _ran_functional(self, name: str, run: RunOp, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if self._is_off():
            return run(func, args, kwargs)
        out = kwargs.get("out")
        kind = WRITE if name.endswith("_") or name == "irecv" else READ
        uses = [(tensor, kind) for tensor in _tensors(args[0])] + [(tensor, WRITE) for tensor in _tensors(out)]
        if name in _COPIED:
            self._touch(uses)
            uses = []
        group = args[-1]
        group = group if isinstance(group, str) else getattr(group, "group_name", "0")
        return self._run(name, group, uses, partial(run, func, args, kwargs))[0]

    def _tensor_waited(self, run: RunOp, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        result = run(func, args, kwargs)
        with marks.FunctionsOff():
            tensor = args[0]
            point = getattr(tensor.untyped_storage(), self._mark, None) if tensor.layout is torch.strided else None
        self._learn(point)
        return result


def _uses(name: str, group: Any, given: Sequence[Any]) -> _Touched:
    """Return the tensors that a method of a group touches, and how."""
    if not given:
        return []
    if name in BETWEEN:
        reads = [(tensor, READ) for tensor in _tensors(given[1])] if len(given) > 1 else []
        return [(tensor, WRITE) for tensor in _tensors(given[0])] + reads
    reads_at = _READ_AT.get(name)
    root = next((options.rootRank for options in given if hasattr(options, "rootRank")), -1)
    kind = READ if reads_at is not None and reads_at(root == group.rank()) else WRITE
    return [(tensor, kind) for tensor in _tensors(given[0])]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
