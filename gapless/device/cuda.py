"""CudaDevice: CUDA's own streams and events, and the calls that take less time than torch's general ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.errors import ConfigError
from gapless.device import cudart
from gapless.device.accelerator import PRIORITIES, AcceleratorDevice
from gapless.device.accelerator_stream import AcceleratorGraph, AcceleratorStream, Common
from gapless.device.record import Tape
from gapless.device.ring import check_upload, zeros_of_pages
from gapless.device.seam import Caps
from gapless.device.worker import Worker

# torch.cuda is typed only in part, and differently from version to version.
torch_cuda: Any = torch.cuda

_MAPPED, _READ_ONLY = 2, 8
"""cudaHostRegisterMapped: kernels read and write the memory too"""


class CudaStream(AcceleratorStream):
    """A CUDA stream, with uploads and replays by the runtime itself."""

    def __init__(self, name: str, raw: Any, common: Common, ringer: Worker) -> None:
        super().__init__(name, raw, common, ringer)
        self._handle: int = raw.cuda_stream
        self.cudart = cudart.load()
        self._checked: set[tuple[int, int, int]] = set()
        """Uploads, by addresses, that were checked before: a few for each slot of a ring."""

    def upload(self, dst: Tensor, src: Tensor) -> None:
        copy = (dst.data_ptr(), src.data_ptr(), src.nbytes)
        if copy not in self._checked:
            check_upload(dst, src)
            assert src.is_pinned(), "upload from ring memory only"
            self._checked.add(copy)
        if self.cudart is None or observe.watcher is not None:
            super().upload(dst, src)
        else:
            self._direct(self.cudart.upload, *copy)

    def replay(self, graph: AcceleratorGraph) -> None:
        assert isinstance(graph, CudaGraph), "a graph of another kind of device"
        if graph.handle is None or self.cudart is None or observe.watcher is not None:
            super().replay(graph)
        else:
            self._direct(self.cudart.launch, graph.handle)

    def _direct(self, function: Callable[..., None], *args: int) -> None:
        self.fault.check()
        self.call(function, *args, self._handle)


class CudaGraph(AcceleratorGraph):
    def __init__(self, key: Hashable, raw: Any, tape: Tape | None, owners: tuple[Any, ...]) -> None:
        super().__init__(key, raw, tape, owners)
        # Random numbers of torch's would need its own replay; no program of ours draws any.
        self.handle: int | None = raw.raw_cuda_graph_exec() if hasattr(raw, "raw_cuda_graph_exec") else None


class CudaDevice(AcceleratorDevice):
    """The current CUDA device of the calling thread."""

    kind = "cuda"
    torch_type = "cuda"
    caps = Caps(
        "triton", captures=True, maps_host=False, own_memory=True, sums="peers", polled=True, pads=True,
        launch_queue=1024, rows=256, drafted_rows=32, step_tokens=8192,
        operations=1e13,  # a small GPU at a tenth of its peak
    )  # fmt: skip
    has_run = True
    stream_class = CudaStream
    graph_class = CudaGraph

    @classmethod
    def open(cls, threads: int) -> CudaDevice:
        if torch.version.hip:
            raise ConfigError("device is cuda but torch is built for ROCm: use --device rocm")
        if not torch_cuda.is_available():
            raise ConfigError("device is cuda but torch sees no CUDA device: use --device cpu, or a torch for CUDA")
        return cls()

    @classmethod
    def current(cls) -> torch.device:
        return torch.device("cuda", torch_cuda.current_device())

    @staticmethod
    def make_current(device: torch.device) -> None:
        torch_cuda.set_device(device)

    @classmethod
    def new_event(cls, device: torch.device, timed: bool) -> Any:
        return torch_cuda.Event(enable_timing=timed, blocking=True)  # torch.Event spins in every wait

    @staticmethod
    def under(raw: Any) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch_cuda.stream(raw)
        return stream

    @staticmethod
    def unpin(address: int) -> None:
        torch_cuda.check_error(torch_cuda.cudart().cudaHostUnregister(address))

    def new_graph(self) -> tuple[Any, Callable[[], None]]:
        raw = torch_cuda.CUDAGraph()
        self._pool = self._pool or torch_cuda.graph_pool_handle()
        return raw, partial(raw.capture_begin, pool=self._pool, capture_error_mode="thread_local")

    def synchronize(self) -> None:
        torch_cuda.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        free, total = torch_cuda.mem_get_info(self.torch_device)
        return free, total

    def driver_calls(self, *kinds: str) -> int:
        stats = torch_cuda.memory_stats_as_nested_dict(self.torch_device)
        return int(sum(stats.get(kind, 0) for kind in kinds))

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
        with torch_cuda.device(self.torch_device):  # a peer's thread has chosen none, and would open the first
            if runtime.cudaHostRegister(address, memory.nbytes, _MAPPED | _READ_ONLY) != runtime.cudaError.success:
                return None
        self._registered[address] = memory

        def end() -> None:
            if self._registered.pop(address, None) is not None:  # otherwise the device has closed
                with torch_cuda.device(self.torch_device):
                    runtime.cudaHostUnregister(address)  # after an error CUDA does nothing more in this process

        return end

    def _raw_streams(self) -> dict[str, Any]:
        raw = {name: torch_cuda.Stream(self.torch_device, priority) for name, priority in PRIORITIES.items()}
        handles = {stream.cuda_stream for stream in raw.values()} | {0}
        assert len(handles) == len(raw) + 1, "torch handed out the same CUDA stream twice"
        return raw
