"""Follows streams and events of any program on an accelerator: an operator acts as the stream that is current."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import marks, race_ops
from .backends import DeviceKind
from .patches import Patches
from .present import classes_of, definer, module_of
from .race_agents import Actor, Agent, GroupProgram, VectorClock
from .race_buffers import Buffer, Checksum
from .race_pools import Pools
from .race_shadow import Ranges
from .race_state import RaceState
from .sync_rules import WAITING
from .watch import ON_WAIT, ThreadState, current

_MARKS_BEFORE_SWEEP = 1024
"""Dead events' clocks are dropped at this number."""

_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class _Held:
    """Host memory that a stream uses, enqueued at its time `time`."""

    stream: Agent
    time: int
    checksum: Checksum
    site: int
    alive: Callable[[], object]
    """Returns None when the memory is gone: a write is no fault then."""


class _Once:
    """Wraps methods where they are defined, each once: a class that inherits one shares the wrapper."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._done: set[tuple[int, str]] = set()

    def wrap(
        self, owner: Any, name: str, around: Callable[..., Any], only: Callable[[Any], bool] = lambda found: True
    ) -> None:
        """Wrap `owner.name` if it exists, is not wrapped yet, and `only` is true of it."""
        owner = definer(owner, name)
        if owner is not None and (id(owner), name) not in self._done and only(getattr(owner, name)):
            self._done.add((id(owner), name))
            self._patches.wrap(owner, name, around)


def _in_c(function: Any) -> bool:
    return not hasattr(function, "__code__")


def _stream_of(given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return given[0] if given else named.get("stream")


def _capturing(module: Any) -> Callable[[], bool]:
    """Return the function that answers whether the calling thread captures a graph."""
    own: Callable[[], bool] | None = getattr(module, "is_current_stream_capturing", None)
    if own is not None:
        return own
    try:
        torch.accelerator.current_stream().is_capturing()
    except (AttributeError, RuntimeError, NotImplementedError):
        return lambda: False
    return lambda: bool(torch.accelerator.current_stream().is_capturing())


class StreamWatch:
    """Wraps the methods of streams and events of one kind of accelerator while the checker is active."""

    def __init__(self, checker: RaceState, row: DeviceKind) -> None:
        self._checker = checker
        self._row = row
        self._module = module_of(row)
        self._capturing = _capturing(self._module)
        self._mark = f"_gapless_clock_{id(self)}"
        self._marks: dict[int, tuple[weakref.ref[Any], VectorClock]] = {}
        """The clocks of events that take no attributes, by id; without callbacks, which may end in a crash when an
        event and its reference are garbage at once."""
        self._known_agents: dict[tuple[int, int], Agent] = {}
        self._held: dict[Any, _Held] = {}
        """What is held, one for each stream and part of a buffer: the last use of it."""
        self._most_marks = _MARKS_BEFORE_SWEEP
        self.pools = Pools(checker)
        self._graph_pools: dict[Any, Buffer] = {}
        """Buffers that stand for the memory of graphs, by pool."""
        self._judge = ThreadState()
        """Decides which operators wait, on threads without a region of syncs."""

    # Streams as agents.

    def agent(self, device: int, handle: int, name: str = "") -> Agent:
        auto = f"{self._row.type}:{device} {handle:#x}" if handle else f"{self._row.type}:{device} default"
        agent = self._checker.agents.stream((self._row.type, device, handle), name or auto, None)
        if name and agent.name == auto:
            agent.name = name  # it was seen before it was given a name
        self._known_agents[device, handle] = agent
        return agent

    def agent_of(self, stream: Any, name: str = "") -> Agent:
        """The agent of a torch stream, or of the current one for None. The first name that it is given stays."""
        stream = self.current_stream() if stream is None else stream
        return self.agent(stream.device.index or 0, self.handle(stream), name)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream()

    def handle(self, stream: Any) -> int:
        """Return the number that a stream has on its device."""
        return int(stream.stream_id)

    def current(self, device: int) -> Agent:
        handle = torch.accelerator.current_stream(device).stream_id
        return self._known_agents.get((device, handle)) or self.agent(device, handle)

    def now(self, host: Actor, on: Tensor | torch.device) -> Actor:
        """The stream as which an operator touches this device tensor, or tensors of this device; it comes after what
        `host`, the caller, did."""
        if isinstance(host, GroupProgram):
            return host
        stream = self.current((on.device if isinstance(on, Tensor) else on).index or 0)
        self._checker.agents.enqueue_again(stream, host)
        return stream

    def stream_for(
        self, tensor: Tensor, together: Iterable[tuple[Tensor, int]], to: torch.device | None = None
    ) -> Actor | None:  # fmt: skip
        """The stream as which `tensor` is touched by an operator on these tensors, or by a copy to the device `to`;
        None when the host does it."""
        on_gpu = tensor if self.is_device(tensor) else next((o for o, _ in together if self.is_device(o)), None)
        on = on_gpu if on_gpu is not None else to if marks.names_device(to) else None
        # The driver reads pageable host memory at once, or makes the host wait: either way it happens in host order.
        if on is None or not (on_gpu is tensor or self.is_pinned(tensor)):
            return None
        return self.now(self._checker.agents.here(), on)

    def captures(self) -> bool:
        """Return whether the calling thread captures a graph: then operators are recorded and do not run."""
        return bool(self._capturing())

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._row.type

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether copies from and to this host tensor can run beside the host; keep whose memory it is, for what
        reaches that by its address."""
        if self._row.pageable == "shared":
            return True
        pinned: bool = tensor.is_pinned()
        if pinned and tensor.untyped_storage().resizable():
            marks.PINNED.add(tensor)
        return pinned

    def ran(self, plan: race_ops.OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator that may wait ran: if the host had to wait for it, it has learnt what the stream knows."""
        used = race_ops.tensors(plan, args, kwargs)
        on_gpu = next((tensor for tensor, _ in used if self.is_device(tensor)), None)
        to = kwargs.get("device") if plan.copies else None
        place = on_gpu.device if on_gpu is not None else to if marks.names_device(to) else None
        if plan.waits is None or place is None:
            return
        if plan.waits(current() or self._judge, args, dict(kwargs)) in WAITING:
            self._host_learns(self.current(place.index or 0))

    def made(self, plan: race_ops.OperatorPlan, buffer: Buffer, actor: Actor, site: int) -> bool:
        """`actor` made this device memory; returns whether it wrote it: an allocation alone writes nothing."""
        if isinstance(actor, Agent):
            self.pools.took(buffer, actor, site)
        return plan.name not in _EMPTY

    def reading(self, tensor: Tensor) -> AbstractContextManager[None]:
        """Act inside as what reads this CPU tensor for `tolist` or `numpy`."""
        return nullcontext()

    def hold(self, stream: Agent, checksum: Checksum, tensor: Tensor, site: int) -> None:
        """The stream uses host memory: look at it again when the host learns that the stream is done with it."""
        buffer, storage = checksum.buffer, tensor.untyped_storage()
        is_held = buffer.site < 0  # memory that is registered
        alive = (lambda: buffer) if is_held else weakref.ref(marks.PINNED.covering(storage) or storage)
        key = (id(buffer), checksum.part, stream.index)
        if key in self._held:
            self._verify([self._held[key]])
        self._held[key] = _Held(stream, stream.time, checksum, site, alive)

    def _learn(self, known: VectorClock) -> None:
        """Order the calling thread after a point of a stream; memory used until there must be unchanged."""
        self._checker.agents.learn(known)
        with self._checker.lock:
            done = [key for key, held in self._held.items() if known.get(held.stream.index, 0) >= held.time]
            self._verify([self._held.pop(key) for key in done])

    def _verify(self, uses: Iterable[_Held]) -> None:
        for held in uses:
            if held.alive() is not None and held.checksum.changed():
                self._checker.overwritten(held.checksum, held.stream, "", held.site, -1)

    def _finish(self) -> None:
        """Look at what the host never learnt of: nothing has ordered the writes there."""
        self._verify(self._held.values())
        self._held.clear()

    def host_knows(self, known: VectorClock) -> None:
        """The calling thread has seen that the work which ends with this clock is done."""
        self._learn(known)

    def host_waits(self) -> None:
        """The calling thread has waited for the current stream."""
        self._host_learns(self.agent_of(None))

    def begin_again(self) -> None:
        """Look at the held memory, and forget all that happened."""
        self._finish()
        self._known_agents.clear()
        self.pools = Pools(self._checker)

    def _host_learns(self, stream: Agent) -> None:
        self._learn(self._checker.agents.record(stream, self._checker.sites.here()))

    # Methods that are wrapped.

    def install(self, patches: Patches) -> None:
        patches.callback(self._finish)
        ON_WAIT.append(self.host_waits)
        patches.callback(ON_WAIT.remove, self.host_waits)
        row, wrap = self._row, _Once(patches).wrap
        for event in (*classes_of(row, row.events), torch.Event):
            wrap(event, "record", self._record)
            wrap(event, "wait", self._wait)
            wrap(event, "synchronize", self._event_seen)
            wrap(event, "query", self._event_seen)
        for stream in (*classes_of(row, row.streams), torch.Stream):
            wrap(stream, "synchronize", self._stream_seen)
            wrap(stream, "query", self._stream_seen)
        # Methods of Python call the event's.
        wrap(torch.Stream, "record_event", self._stream_records, _in_c)
        wrap(torch.Stream, "wait_event", self._stream_waits, _in_c)
        wrap(torch.Stream, "wait_stream", self._stream_follows, _in_c)
        wrap(self._module, "synchronize", self._device_synchronize)
        wrap(torch.accelerator, "synchronize", self._device_synchronize)
        patches.stand_in(Tensor, "record_stream", self._record_stream)
        patches.wrap(torch.UntypedStorage, "resize_", self._resize)
        plans = self._checker.plans
        for op in (torch.ops.aten.resize_.default, torch.ops.inductor.resize_storage_bytes_.default):
            plans[id(op)] = race_ops.plan(op)._replace(args=(), is_idle=True, around=self._resize_by_operator)
        for graph in (*classes_of(row, row.graphs), getattr(torch.accelerator, "Graph", None)):
            wrap(graph, "replay", self._replay)

    # An event without a stream takes the current one; on MPS events take none at all.

    def _record(self, original: Any, event: Any, *given: Any, **named: Any) -> None:
        original(event, *given, **named)
        self._recorded(event, _stream_of(given, named))

    def _recorded(self, event: Any, stream: Any) -> None:
        # A second record replaces the first: later waits are for this one.
        self._keep(event, self._checker.agents.record(self.agent_of(stream), self._checker.sites.here()))

    def _keep(self, event: Any, clock: VectorClock) -> None:
        """Keep a clock, on the event itself if that takes attributes."""
        if hasattr(event, "__dict__"):
            setattr(event, self._mark, clock)
            return
        self._marks[id(event)] = weakref.ref(event), clock
        if len(self._marks) > self._most_marks:
            for dead in [key for key, (ref, _) in list(self._marks.items()) if ref() is None]:
                self._marks.pop(dead, None)
            self._most_marks = max(_MARKS_BEFORE_SWEEP, 2 * len(self._marks))

    def _known(self, event: Any) -> VectorClock:
        """The clock of the event's last record; an empty one if that was not observed."""
        if hasattr(event, "__dict__"):
            return getattr(event, self._mark, None) or VectorClock()
        ref, clock = self._marks.get(id(event), (None, None))
        return clock if ref is not None and clock is not None and ref() is event else VectorClock()

    def _wait(self, original: Any, event: Any, *given: Any, **named: Any) -> None:
        original(event, *given, **named)
        self._checker.agents.wait(self.agent_of(_stream_of(given, named)), self._known(event))

    def _stream_records(self, original: Any, stream: Any, *given: Any, **named: Any) -> Any:
        event = original(stream, *given, **named)
        self._recorded(event, stream)
        return event

    def _stream_waits(self, original: Any, stream: Any, event: Any) -> None:
        original(stream, event)
        self._checker.agents.wait(self.agent_of(stream), self._known(event))

    def _stream_follows(self, original: Any, stream: Any, other: Any) -> None:
        original(stream, other)
        agents = self._checker.agents
        agents.wait(self.agent_of(stream), agents.record(self.agent_of(other), self._checker.sites.here()))

    def _event_seen(self, original: Any, event: Any) -> Any:
        """Replace `synchronize`, which waits and returns None, and `query`, which may return False."""
        done = original(event)
        if done is not False:
            self._learn(self._known(event))
            self._checker.raise_pending()
        return done

    def _stream_seen(self, original: Any, stream: Any) -> Any:
        done = original(stream)
        if done is not False:
            self._host_learns(self.agent_of(stream))
            self._checker.raise_pending()
        return done

    def _device_synchronize(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        for stream in self._checker.agents.streams():
            self._host_learns(stream)
        self._checker.raise_pending()

    def _record_stream(self, original: Any, tensor: Tensor, stream: Any) -> None:
        original(tensor, stream)
        with marks.FunctionsOff():
            self.pools.keep_for(tensor, self.agent_of(stream))

    def _resize(self, original: Any, storage: Any, nbytes: int) -> Any:
        """Replace `resize_` of a storage: its memory is freed, and the new one is of the current stream's pool."""
        before, checker = storage.nbytes(), self._checker
        if nbytes == before or not checker.everything or not self.is_device(marks.whole(storage)) or self.captures():
            return original(storage, nbytes)
        site = checker.sites.here(2)
        if before and (place := checker.buffers.place(marks.whole(storage), site)) is not None:
            self.pools.gave_back(place[0])
        result = original(storage, nbytes)
        checker.buffers.resized(storage)
        whole = marks.whole(storage)
        if nbytes and (place := checker.buffers.place(whole, site)) is not None:
            stream = self.now(checker.agents.here(), whole)
            place[0].on_device = True
            if isinstance(stream, Agent):
                self.pools.took(place[0], stream, site)
        return result

    def _resize_by_operator(self, run: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that resizes the storage of a tensor; the one that resizes the tensor only lets it grow."""
        tensor, size = args[0], args[1]
        if tensor.layout is not torch.strided:
            return run(op, args, kwargs)
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if not isinstance(size, int):
                size = max((tensor.storage_offset() + math.prod(size)) * tensor.itemsize, storage.nbytes())
            return self._resize(lambda storage, nbytes: run(op, args, kwargs), storage, size)

    def _replay(self, original: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        """Replace a graph's `replay`, which comes after its last one; graphs of one pool have to be ordered so. Some
        classes, such as HPUGraph, have none."""
        checker, stream = self._checker, self.agent_of(None)
        site = checker.sites.here(2)
        checker.agents.wait(stream, self._known(graph))
        if checker.everything and hasattr(graph, "pool"):
            pool = tuple(graph.pool())
            memory = self._graph_pools.get(pool)
            if memory is None:
                name = f"the memory of graph pool {pool[-1]}"
                memory = self._graph_pools[pool] = Buffer(0, 1, Ranges(0), name, name, None, False)
            checker.touched(stream, memory, site)
        original(graph, *args, **kwargs)
        self._keep(graph, checker.agents.record(stream, site))
