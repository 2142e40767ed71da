"""CudaDevice: torch's CUDA streams and events behind the seam."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import CaptureError, ConfigError
from gapless.device import cudart
from gapless.device.fault import Fault
from gapless.device.record import Tape, failed, record
from gapless.device.ring import Fence, Ring, check_upload, zeros_of_pages
from gapless.device.seam import ATTENDANT, Caps, Device, Program, Stream
from gapless.device.worker import PythonQueue, Worker, shut, switch_interval

# torch.cuda is typed only in part, and differently from version to version.
torch_cuda: Any = torch.cuda

SPIN_NS = 50_000
"""A wait polls for this long before it sleeps: a thread's wake-up costs about as much."""

REBASE_MS = 4000.0
"""Event distances are float32 milliseconds: beyond this one, half a microsecond would be lost to rounding."""

_MAPPED, _READ_ONLY = 2, 8
"""cudaHostRegisterMapped: kernels read and write the memory too"""

SMALL_BYTES, SMALL_BLOCKS = 1 << 20, 32
"""Blocks up to this size come from memory of their own; a step has fewer at a time."""

# Lower is more urgent: a token copy overtakes steps, steps overtake bulk copies.
PRIORITIES = {"compute": -1, "token_out": -2, "bulk_out": 0, "bulk_in": 0}


class EventClock:
    """Places timed events on the host's clock, from a `base` event that was passed at host time `base_ns`."""

    def __init__(self, base: Any, base_ns: int) -> None:
        self._base = base
        self._base_ns = base_ns

    @classmethod
    def start(cls, stream: Any) -> EventClock:
        """Return a clock whose base is now, on an idle stream."""
        # Twice: the first event of a stream pays for its set-up, which would show as an offset.
        for _ in range(2):
            base = torch_cuda.Event(enable_timing=True)
            before = time.monotonic_ns()
            base.record(stream)
            base.synchronize()
            middle = (before + time.monotonic_ns()) // 2
        return cls(base, middle)

    def at(self, event: Any, recorded: int, seen: int) -> int:
        """Return the host ns of `event`, recorded at host time `recorded` or later and known as done by `seen`."""
        ms: float = self._base.elapsed_time(event)
        # The two clocks drift apart by some microseconds a second; the host's bounds hold that, base after base.
        ns = min(seen, max(recorded, self._base_ns + round(ms * 1e6)))
        if ms > REBASE_MS:
            self._base, self._base_ns = event, ns
        return ns


class CudaWorker(Worker):
    """A thread for a device's waits. It chooses the device first: otherwise CUDA opens a context on device 0."""

    def __init__(self, name: str, device: torch.device, fault: Fault) -> None:
        super().__init__(name, queue := PythonQueue(name, fault))
        queue.put(torch_cuda.set_device, (device,))


class CudaFence:
    """One event, recorded once."""

    __slots__ = ("_clock", "_event", "_fault", "_lost", "_recorded", "_seen", "_timed", "_waiter")

    def __init__(self, stream: CudaStream, timed: bool) -> None:
        self._fault = stream.fault
        self._lost = stream.fault.error is not None
        """Whether the device had failed before: the work before this fence never ran."""
        self._clock = stream.clock
        self._waiter = stream.waiter
        self._timed = timed
        self._seen = 0
        self._recorded = time.monotonic_ns() if timed else 0
        self._event = torch_cuda.Event(enable_timing=timed, blocking=True)
        stream.call(self._event.record, stream.raw)

    def done(self) -> bool:
        if self._seen:
            return True
        # On a failed device too: work enqueued before the failure may have ended well.
        if not self._lost and self._query():
            return True
        if self._fault.error is not None:
            self._fault.check()
        return False

    def wait(self, bell: Bell | None = None) -> bool:
        end = time.monotonic_ns() + SPIN_NS
        while not self.done():
            if bell is not None and bell.rung:
                return False
            if time.monotonic_ns() > end:
                self.sleep(bell)
        return True

    def time(self) -> int:
        assert self._timed and self._seen, "time() needs record(timed=True) and a fence seen as done"
        return self._clock.at(self._event, self._recorded, self._seen)

    def follow(self, stream: CudaStream) -> None:
        """Make later work of `stream` wait for this point."""
        stream.call(stream.raw.wait_event, self._event)

    def attend(self, work: Callable[[], None]) -> None:
        """Run `work` once this is passed; the calling thread does nothing else, and may hang with the GPU."""
        self._event.synchronize()
        if not self._lost:
            work()

    def _query(self) -> bool:
        try:
            if not self._event.query():
                return False
        except RuntimeError as error:
            # A kernel failed; every later CUDA call of the process would raise the same error.
            self._fault.set(error, "the GPU reported")
            self._fault.check()
        self._fault.ask()
        self._seen = time.monotonic_ns()
        return True

    def sleep(self, bell: Bell | None) -> None:
        # The event is waited for on a helper thread: a hung GPU never returns from it, and fail() must still wake us.
        woken = threading.Event()
        self._waiter.put(self._synchronize, (woken,))
        self._fault.block(woken, bell)

    def _synchronize(self, woken: threading.Event) -> None:
        try:
            self._event.synchronize()
        finally:
            woken.set()


class CudaStream:
    """A torch CUDA stream; programs enqueue their kernels at once, from the calling thread."""

    def __init__(
        self, name: str, raw: Any, fault: Fault, clock: EventClock, waiter: Worker, ringer: Worker
    ) -> None:  # fmt: skip
        self.name = name
        self.raw = raw
        self._handle: int = raw.cuda_stream
        self.fault = fault
        self.clock = clock
        self.waiter, self._ringer = waiter, ringer
        self.cudart = cudart.load()
        self._checked: set[tuple[int, int, int]] = set()
        """Uploads, by addresses, that were checked before: a few for each slot of a ring."""

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        self.fault.check()
        if observe.watcher is not None:
            program = observe.watcher.launched(self, program, args, reads)
        try:
            with torch_cuda.stream(self.raw), torch.inference_mode():
                program(*args)
        except BaseException as error:
            self.fault.set(error, f"a program on stream {self.name!r} raised")
            # An interrupt belongs to the host thread; a program's error shows at the fences, as on any device.
            if not isinstance(error, Exception):
                raise

    def upload(self, dst: Tensor, src: Tensor) -> None:
        copy = (dst.data_ptr(), src.data_ptr(), src.nbytes)
        if copy not in self._checked:
            check_upload(dst, src)
            assert src.is_pinned(), "upload from ring memory only"
            self._checked.add(copy)
        if self.cudart is None or observe.watcher is not None:
            self.launch(_upload, dst, src, reads=(src,), writes=(dst,))
        else:
            self._direct(self.cudart.upload, *copy)

    def replay(self, graph: CudaGraph) -> None:
        if graph.handle is None or self.cudart is None or observe.watcher is not None:
            self.launch(graph.raw.replay, reads=graph.reads, writes=graph.writes)
        else:
            self._direct(self.cudart.launch, graph.handle)

    def record(self, timed: bool = False) -> CudaFence:
        return CudaFence(self, timed)

    def after(self, fence: Fence) -> None:
        assert isinstance(fence, CudaFence), "a fence of another kind of device"
        fence.follow(self)

    def ring(self, bell: Bell) -> None:
        self._ringer.put(self.record().attend, (bell.ring,))

    def _direct(self, function: Callable[..., None], *args: int) -> None:
        self.fault.check()
        self.call(function, *args, self._handle)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call into CUDA; an error that an earlier kernel left behind fails the device and shows at the fences."""
        try:
            function(*args)
        except RuntimeError as error:
            self.fault.set(error, f"the GPU reported, on stream {self.name!r}")


class CudaGraph:
    def __init__(self, key: Hashable, raw: Any, tape: Tape | None, owners: tuple[Any, ...]) -> None:
        """`owners` keep the memory of a program that was not recorded."""
        self.key = key
        self.reads, self.writes = (tape.reads, tape.writes) if tape else ((), ())
        self.owners = owners
        self.raw = raw
        # Random numbers of torch's would need its own replay; no program of ours draws any.
        self.handle: int | None = raw.raw_cuda_graph_exec() if hasattr(raw, "raw_cuda_graph_exec") else None

    def launch(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream), "a stream of another kind of device"
        if observe.watcher is not None:
            observe.watcher.replayed(stream, f"graph {self.key}", self.reads, self.writes)
        stream.replay(self)


def _record_into(
    raw: Any, pool: Any, program: Program, buffers: tuple[Any, ...], name: str | None
) -> Tape | None:  # fmt: skip
    """Capture on the current stream; return the tape, None without a name. Other threads may use CUDA meanwhile."""
    collecting = gc.isenabled()
    gc.disable()  # freeing might need a call to CUDA, which a capture forbids
    try:
        raw.capture_begin(pool=pool, capture_error_mode="thread_local")  # san: ok(before serving, or at rest)
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


class CudaDevice(Device):
    """The current CUDA device of the calling thread."""

    kind = "cuda"
    caps = Caps(
        "triton", captures=True, maps_host=False, own_memory=True, sums="peers", polled=True, pads=True,
        launch_queue=1024, rows=256, drafted_rows=32, step_tokens=8192, operations=1e13,  # a small GPU at a tenth of its peak
    )  # fmt: skip
    compute: CudaStream

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch_cuda.current_device())
        self.fault = fault = Fault()
        self.bell = Bell(fault.check)
        fault.wakes(self.bell.ring)
        raw = {name: torch_cuda.Stream(self.torch_device, priority) for name, priority in PRIORITIES.items()}
        handles = {stream.cuda_stream for stream in raw.values()} | {0}
        assert len(handles) == len(raw) + 1, "torch handed out the same CUDA stream twice"
        clock = EventClock.start(raw["compute"])
        waiter, *ringers = [CudaWorker(name, self.torch_device, fault) for name in ("event waiter", *raw)]
        streams = {
            name: CudaStream(name, stream, fault, clock, waiter, ringer)
            for (name, stream), ringer in zip(raw.items(), ringers, strict=True)
        }
        self._streams = tuple(streams.values())
        self.compute, self.token_out = streams["compute"], streams["token_out"]
        self.bulk_out, self.bulk_in = streams["bulk_out"], streams["bulk_in"]
        self._pool = torch_cuda.graph_pool_handle()
        """One pool for all graphs: they run one after another, on one stream."""
        self._programs = 0
        """Bytes reserved for programs outside graphs."""
        self._registered: dict[int, Tensor | npt.NDArray[np.uint8]] = {}
        """Memory of the host that was pinned here, by address. It is let go before it is freed: other memory comes
        there."""
        self._recorded: set[Hashable] = set()
        """Kinds of keys that a program has been recorded for. Recording takes two thirds of a capture: what would be
        refused shows in the first program of a kind, and CUDA itself refuses to wait in any."""
        self._first: CudaGraph | None = None
        """Keeps the pool and its reserved memory: a pool ends with its last graph."""
        switch_interval.shorten()
        self._attendant = CudaWorker(ATTENDANT, self.torch_device, fault)
        self._shut = weakref.finalize(self, _shut, fault, self._registered, waiter, *ringers, self._attendant)

    @classmethod
    def open(cls, threads: int) -> CudaDevice:
        if not torch_cuda.is_available():
            raise ConfigError("device is cuda but torch sees no CUDA device: use --device cpu, or a torch for CUDA")
        return cls()

    def attend(self, work: Callable[[], None], fence: Fence | None = None) -> None:
        if fence is None:
            self._attendant.put(work, ())
            return
        assert isinstance(fence, CudaFence), "a fence of another kind of device"
        self._attendant.put(fence.attend, (work,))

    def ring(self, slots: int, nbytes: int) -> Ring:
        return Ring(slots, nbytes, pin=True)

    def host_memory(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        # torch's own pinned memory comes in powers of two.
        memory = zeros_of_pages(nbytes) if memory is None else memory
        outcome = torch_cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _MAPPED)
        if outcome != torch_cuda.cudart().cudaError.success:
            raise ConfigError(f"the host has no {nbytes:,} bytes to pin ({outcome}): ask for less")
        self._registered[memory.data_ptr()] = memory
        return memory

    def adopt(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        runtime, address = torch_cuda.cudart(), memory.ctypes.data
        if runtime.cudaHostRegister(address, memory.nbytes, _MAPPED | _READ_ONLY) != runtime.cudaError.success:
            return None
        self._registered[address] = memory

        def end() -> None:
            if self._registered.pop(address, None) is not None:  # otherwise the device has closed
                runtime.cudaHostUnregister(address)  # after an error CUDA does nothing more in this process

        return end

    def upload(self, dst: Tensor, src: Tensor) -> None:
        _upload(dst, src)

    def download(self, dst: Tensor, src: Tensor) -> None:
        assert dst.is_pinned() and dst.is_contiguous() and dst.dtype == src.dtype, "download to ring memory only"
        dst.copy_(src, non_blocking=True)

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> CudaGraph:
        compute, name = self.compute, f"{getattr(program, '__qualname__', type(program).__name__)} {key}"
        compute.fault.check()
        freed, kind = _driver_calls(self.torch_device, "num_device_free"), getattr(key, "kind", None)
        watched = observe.watcher is not None or observe.steps is not None
        try:
            with torch_cuda.stream(compute.raw), torch.inference_mode():
                # Twice: in the first run of a shape libraries set themselves up and memory is fetched; the second
                # refuses what must not be captured before it runs.
                program(*buffers)
                raw = torch_cuda.CUDAGraph()
                recorded = watched or kind not in self._recorded
                tape = _record_into(raw, self._pool, program, buffers, name if recorded else None)
                raw.replay()  # the first one takes the graph to the device, which takes long
            graph = CudaGraph(key, raw, tape, (program, buffers))
            self._recorded |= {kind} - {None}
            self._first = self._first or graph
            return graph
        except Exception as error:
            # A failed kernel ends the device, and the fence raises. Any other failure left it whole.
            compute.record().wait()
            reason = CaptureError(str(error)) if isinstance(error, CaptureError) else failed(name, error)
        # If memory was short, the allocator has given all free memory back to the driver. Neither the error nor
        # its frames hold anything now.
        if self._programs and _driver_calls(self.torch_device, "num_device_free") > freed:
            self.run(_take_again, self.torch_device, self._programs)
        raise reason

    def memory(self) -> tuple[int, int]:
        free, total = torch_cuda.mem_get_info(self.torch_device)
        return free, total

    def reserve(self, programs: int, graphs: int) -> None:
        room = self.memory()[0] // 4  # what a tight engine has is left to it
        self._programs = min(programs, room)
        self.run(take_and_give_back, self.torch_device, self._programs)
        if graphs:
            what = (self.torch_device, min(graphs, room))
            self.capture("reserved memory", take_and_give_back, what)
            # The first capture keeps a piece of it for the state of random numbers.
            self.run(_take_again, self.torch_device, self._programs)

    def allocations(self) -> int:
        return _driver_calls(self.torch_device, "num_device_alloc", "num_device_free")

    def drain(self) -> None:
        self.fault.check()
        for fence in [stream.record() for stream in self._streams]:
            fence.wait()
        # Loading at start-up may have used the default stream, which our streams do not wait for.
        torch_cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self._shut()


def _upload(dst: Tensor, src: Tensor) -> None:
    # Anything else would wait for the device, or be staged by the driver behind our back.
    assert src.is_pinned() and src.is_contiguous() and dst.dtype == src.dtype, "upload from ring memory only"
    dst.copy_(src, non_blocking=True)


def _driver_calls(device: torch.device, *kinds: str) -> int:
    """Return how often the allocator has taken memory from the driver, or given it back, since the process began."""
    stats = torch_cuda.memory_stats_as_nested_dict(device)
    return int(sum(stats.get(kind, 0) for kind in kinds))


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


def _shut(fault: Fault, registered: dict[int, Any], *workers: Worker) -> None:
    failed = fault.error is not None
    shut(fault, workers)
    while registered and not failed:  # after an error CUDA does nothing more in this process
        address, _ = registered.popitem()  # another thread may remove its own mapping
        torch_cuda.check_error(torch_cuda.cudart().cudaHostUnregister(address))
