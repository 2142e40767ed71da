"""AcceleratorDevice: any accelerator of torch's, by torch.Stream, torch.Event, torch.accelerator and its graphs.

A backend is a subclass: a record of its name, its capabilities and its own spellings.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import CaptureError, ConfigError
from gapless.device.accelerator_stream import (
    AcceleratorFence,
    AcceleratorGraph,
    AcceleratorStream,
    AcceleratorWorker,
    Common,
    CurrentStream,
    torch_accelerator,
)
from gapless.device.event_clock import EventClock
from gapless.device.fault import Fault
from gapless.device.probe import admit
from gapless.device.record import Tape, failed, record
from gapless.device.ring import PAGE_BYTES, Fence, Ring, copy
from gapless.device.seam import ATTENDANT, Caps, Device, Program
from gapless.device.worker import Worker, shut, switch_interval

SMALL_BYTES, SMALL_BLOCKS = 1 << 20, 32
"""Blocks up to this size come from memory of their own; a step has fewer at a time."""

PRIORITIES = {"compute": -1, "token_out": -2, "bulk_out": 0, "bulk_in": 0}
"""Lower is more urgent: a token copy overtakes steps, steps overtake bulk copies."""


class AcceleratorDevice(Device):
    """The calling thread's current device of one backend. Its subclasses are records of backends.

    Errors that a kernel leaves behind show at the next fence, as a RuntimeError of the backend's.
    """

    torch_type: ClassVar[str]
    """torch's name of the device type"""
    caps = Caps(maps_host=False, own_memory=True, sums="none", registers=False)
    graph: ClassVar[str] = ""
    """The class of its graphs below torch, if not torch.accelerator.Graph: one like torch.cuda.CUDAGraph"""
    pins: ClassVar[bool] = True
    """True if copies need pinned memory. Otherwise the host's memory is the device's, too."""
    times: ClassVar[bool] = True
    """True if events have times. Otherwise a fence has the host's time of the check that found it passed."""
    one_queue: ClassVar[bool] = False
    """True if the backend has a single queue. All four streams of the device are then this queue."""
    missing: ClassVar[tuple[str, ...]] = ()
    """A sentence for users on each capability that the device lacks."""
    has_run: ClassVar[bool] = False
    """True once the record has run on its hardware."""
    stream_class: ClassVar[type[AcceleratorStream]] = AcceleratorStream
    graph_class: ClassVar[type[AcceleratorGraph]] = AcceleratorGraph
    compute: AcceleratorStream

    def __init__(self) -> None:
        self.torch_device = self.current()
        self.fault = fault = Fault()
        self.bell = Bell(fault.check)
        fault.wakes(self.bell.ring)
        raw = self._raw_streams()
        choose, new_event = partial(self.make_current, self.torch_device), partial(self.new_event, self.torch_device)
        clock = EventClock.start(raw["compute"], partial(new_event, True)) if self.times else None
        names = ("event waiter", ATTENDANT, *raw)
        workers = [AcceleratorWorker(name, choose, fault) for name in names]
        waiter, self._attendant, *ringers = workers
        common = Common(fault, clock, waiter, new_event, self.under)
        self._streams = tuple(
            self.stream_class(name, stream, common, ringer)
            for (name, stream), ringer in zip(raw.items(), ringers, strict=True)
        )
        self.compute, self.token_out, self.bulk_out, self.bulk_in = self._streams
        self._pool: Any = None
        """One pool for all graphs: they run one after another, on one stream."""
        self._programs = 0
        """Bytes reserved for programs outside graphs."""
        self._registered: dict[int, Any] = {}
        """Host memory that this device has pinned, by address. It is unpinned before it is freed, since other memory
        may get the same address."""
        self._recorded: set[Hashable] = set()
        """Kinds of keys with a recorded program. Recording takes two thirds of a capture, so only the first program of
        a kind is recorded; in the others the backend itself refuses waits."""
        self._first: AcceleratorGraph | None = None
        """A graph that keeps the pool and its reserved memory: a pool ends with its last graph."""
        switch_interval.shorten()
        self._shut = weakref.finalize(self, _shut, fault, self._registered, self.unpin, workers)

    @classmethod
    def of(cls, torch_type: str) -> type[AcceleratorDevice]:
        """Return a class for devices of this torch type that uses only the calls that all backends share."""
        graph, triton = _graph_class(torch_type), torch_type == "cuda" and torch.version.hip is None
        captures, kernels = graph is not None, "triton" if triton else "torch"
        caps = cls.caps._replace(kernels=kernels, captures=captures, pads=captures)
        named = {"torch_type": torch_type, "kind": torch_type, "graph": graph or "", "caps": caps}
        return type("AnyAccelerator", (cls,), named)

    @classmethod
    def prepare(cls) -> None:
        """Import the backend if torch has not loaded it. Raises ConfigError if it cannot serve."""

    @classmethod
    def open(cls, threads: int) -> AcceleratorDevice:
        cls.prepare()
        seen = torch_accelerator.current_accelerator(check_available=True)
        if seen is None or seen.type != cls.torch_type:
            here = f"torch sees {seen.type}" if seen else "torch sees none"
            raise ConfigError(
                f"device: there is no accelerator of the type {cls.torch_type} here, {here}: use --device auto"
            )
        admit(cls, cls.current())
        return cls()

    # A backend may spell these otherwise.

    @classmethod
    def current(cls) -> torch.device:
        """Return the calling thread's current device."""
        return torch.device(cls.torch_type, torch_accelerator.current_device_index())

    @staticmethod
    def make_current(device: torch.device) -> None:
        """Make the calling thread launch on this device."""
        torch_accelerator.set_device_index(device)

    @classmethod
    def new_stream(cls, device: torch.device, priority: int) -> Any:
        """Return a stream that no other work uses; `priority` as in PRIORITIES."""
        return torch.Stream(device, priority=priority)

    @classmethod
    def new_event(cls, device: torch.device, timed: bool) -> Any:
        """Return an event; only a timed one has a time."""
        return torch.Event(device, enable_timing=timed and cls.times)

    @staticmethod
    def under(raw: Any) -> AbstractContextManager[Any]:
        """Return a context manager that makes a stream the calling thread's current one."""
        return CurrentStream(raw)

    @staticmethod
    def unpin(address: int) -> None:
        """Unpin memory that a caller has passed to `host_memory`."""
        raise AssertionError("nothing is registered here")

    def new_graph(self) -> tuple[Any, Callable[[], None]]:
        """Return a graph and the function that begins its capture on the current stream. Other threads may use the
        device meanwhile."""
        if not self.graph:
            raw = torch_accelerator.Graph(pool=self._pool, capture_error_mode="thread_local")
            return raw, raw.capture_begin
        module = torch.get_device_module(self.torch_type)
        raw = getattr(module, self.graph)()
        self._pool = self._pool or module.graph_pool_handle()
        return raw, partial(raw.capture_begin, pool=self._pool, capture_error_mode="thread_local")

    def synchronize(self) -> None:
        """Wait for all streams of the device, also for streams of other libraries; for start-up and shutdown."""
        torch_accelerator.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        general = getattr(torch_accelerator, "get_memory_info", None)  # of newer torch
        ask = general or torch.get_device_module(self.torch_type).mem_get_info
        free, total = ask(self.torch_device)
        return free, total

    def driver_calls(self, *kinds: str) -> int:
        """Return how often the allocator has taken memory from the driver (num_device_alloc) or given it back
        (num_device_free) since the process began."""
        stats = torch_accelerator.memory_stats(self.torch_device)
        return int(sum(stats.get(kind, 0) for kind in kinds))

    def peak(self, program: Program, *args: Any) -> int:
        module = torch.get_device_module(self.torch_type)
        counts: Any = module if hasattr(module, "max_memory_allocated") else torch_accelerator
        before = counts.memory_allocated(self.torch_device)
        counts.reset_peak_memory_stats(self.torch_device)
        self.run(program, *args)
        most: int = counts.max_memory_allocated(self.torch_device) - before
        torch_accelerator.empty_cache()
        return most

    # These are the same for all.

    def attend(self, work: Callable[[], None], fence: Fence | None = None) -> None:
        if fence is None:
            self._attendant.put(work, ())
            return
        assert isinstance(fence, AcceleratorFence), "a fence of another kind of device"
        self._attendant.put(fence.attend, (work,))

    def ring(self, slots: int, nbytes: int) -> Ring:
        return Ring(slots, nbytes, pin=self.pins)

    def host_memory(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        if memory is not None and self.pins:
            raise ConfigError(
                f"device: {self.kind} cannot pin memory that processes share (capability registers): use one rank, and "
                "no role"
            )
        if memory is not None:
            return memory
        try:
            raw = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=self.pins)
        except RuntimeError as error:
            raise ConfigError(f"the host has no {nbytes:,} bytes to pin ({error}): ask for less") from error
        start = -raw.data_ptr() % PAGE_BYTES
        return raw[start : start + nbytes]

    def adopt(self, memory: Any) -> Callable[[], None] | None:
        return None

    def upload(self, dst: Tensor, src: Tensor) -> None:
        # Other memory would make the copy wait for the device, or the driver would stage it unseen.
        pinned = src.is_pinned() or not self.pins
        assert pinned and src.is_contiguous() and dst.dtype == src.dtype, "upload from ring memory only"
        copy(dst, src)

    def download(self, dst: Tensor, src: Tensor) -> None:
        pinned = dst.is_pinned() or not self.pins
        assert pinned and dst.is_contiguous() and dst.dtype == src.dtype, "download to ring memory only"
        copy(dst, src)

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> AcceleratorGraph:
        if not self.caps.captures:
            raise CaptureError(f"a device of the kind {self.kind} captures nothing")
        compute, name = self.compute, f"{getattr(program, '__qualname__', type(program).__name__)} {key}"
        compute.fault.check()
        freed, kind = self.driver_calls("num_device_free"), getattr(key, "kind", None)
        watched = observe.watcher is not None or observe.steps is not None
        try:
            with self.under(compute.raw), torch.inference_mode():
                # The program runs twice: the first run of a shape initialises libraries and allocates memory, the
                # second refuses what must not be captured before it runs.
                program(*buffers)
                raw, begin = self.new_graph()
                recorded = watched or kind not in self._recorded
                tape = _record_into(raw, begin, program, buffers, name if recorded else None)
                raw.replay()  # the first replay uploads the graph to the device, which takes long
            graph = self.graph_class(key, raw, tape, (program, buffers))
            self._pool = self._pool or raw.pool()
            self._recorded |= {kind} - {None}
            self._first = self._first or graph
            return graph
        except Exception as error:
            # A failed kernel ends the device, and the fence raises. Any other failure left it whole.
            compute.record().wait()
            reason = CaptureError(str(error)) if isinstance(error, CaptureError) else failed(name, error)
        # If memory was short, the allocator has given all free memory back to the driver. Neither the error nor
        # its frames hold anything now.
        if self._programs and self.driver_calls("num_device_free") > freed:
            self.run(_take_again, self.torch_device, self._programs)
        raise reason

    def reserve(self, programs: int, graphs: int) -> None:
        room = self.memory()[0] // 4  # an engine with little free memory keeps most of it
        self._programs = min(programs, room)
        self.run(take_and_give_back, self.torch_device, self._programs)
        if graphs:
            what = (self.torch_device, min(graphs, room))
            self.capture("reserved memory", take_and_give_back, what)
            # The first capture keeps a piece of it for the state of random numbers.
            self.run(_take_again, self.torch_device, self._programs)

    def allocations(self) -> int:
        return self.driver_calls("num_device_alloc", "num_device_free")

    def drain(self) -> None:
        self.fault.check()
        for fence in [stream.record() for stream in self._streams]:
            fence.wait()
        # Loading at start-up may have used the default stream, which our streams do not wait for.
        self.synchronize()

    def close(self) -> None:
        self._shut()

    def _raw_streams(self) -> dict[str, Any]:
        if self.one_queue:
            return dict.fromkeys(PRIORITIES, torch_accelerator.current_stream(self.torch_device))
        raw = {name: self.new_stream(self.torch_device, priority) for name, priority in PRIORITIES.items()}
        assert len({stream.stream_id for stream in raw.values()} | {0}) == len(raw) + 1, "torch gave one stream twice"
        return raw


def _graph_class(torch_type: str) -> str | None:
    """Return the class of graphs of this type's devices as `AcceleratorDevice.graph` names it; None: there are none."""
    try:
        torch_accelerator.Graph()  # a backend registers its own
        seen = torch_accelerator.current_accelerator()
        if seen is not None and seen.type == torch_type:
            return ""
    except (AttributeError, RuntimeError):
        pass
    module, name = getattr(torch, torch_type, None), f"{torch_type.upper()}Graph"
    return name if hasattr(module, name) and hasattr(module, "graph_pool_handle") else None


def _record_into(
    raw: Any, begin: Callable[[], None], program: Program, buffers: tuple[Any, ...], name: str | None
) -> Tape | None:  # fmt: skip
    """Capture on the current stream; return the tape, None without a name."""
    collecting = gc.isenabled()
    gc.disable()  # freeing might need a call to the backend, which a capture forbids
    try:
        begin()  # san: ok(before serving, or at rest)
        try:
            tape = None
            if name:
                tape = record(name, program, buffers)
            else:
                program(*buffers)
        except BaseException:
            # The stream must leave its capture; an error about its unfinished graph adds nothing to this one.
            with suppress(RuntimeError, UserWarning):
                raw.capture_end()
            raise
        raw.capture_end()
        return tape
    finally:
        if collecting:
            gc.enable()


def take_and_give_back(device: torch.device, nbytes: int) -> None:
    """Have the allocator keep memory: one large block to cut pieces of, and small ones, which have another pool."""
    count = min(SMALL_BLOCKS, nbytes // (2 * SMALL_BYTES))
    small = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device=device) for _ in range(count)]
    large = torch.empty(max(1, nbytes - count * SMALL_BYTES), dtype=torch.uint8, device=device)
    large[:1].zero_()  # a graph has to do something
    del large, small


def _take_again(device: torch.device, nbytes: int) -> None:
    # If others have it by now, a step takes its memory piece by piece.
    with suppress(torch.OutOfMemoryError):
        take_and_give_back(device, nbytes)


def _shut(fault: Fault, registered: dict[int, Any], unpin: Callable[[int], None], workers: Sequence[Worker]) -> None:
    has_failed = fault.error is not None
    shut(fault, workers)
    while registered and not has_failed:  # after an error a backend does nothing more in this process
        address, _ = registered.popitem()  # another thread may remove its own mapping
        unpin(address)
