"""Follows streams of CUDA, which has fast ways to ask for the current one, and of an emulated CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import emulated_graphs, emulated_streams, marks, race_ops
from .backends import backend
from .race_agents import Actor, Agent, Launched
from .race_buffers import Buffer
from .race_state import RaceState
from .race_streams import StreamWatch


class CudaWatch(StreamWatch):
    """Follows CUDA's streams by the driver's handles."""

    def __init__(self, checker: RaceState, raw_stream: Callable[[int], int] | None = None) -> None:
        super().__init__(checker, backend("cuda"))
        self._raw_stream: Any = raw_stream or getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def handle(self, stream: Any) -> int:
        if not hasattr(stream, "cuda_stream"):  # torch.Stream
            whole: Any = torch.cuda.Stream
            index, kind = stream.device_index, stream.device_type
            stream = whole(stream_id=stream.stream_id, device_index=index, device_type=kind)
        return int(stream.cuda_stream)

    def current(self, device: int) -> Agent:
        handle = self._raw_stream(device)
        return self._known_agents.get((device, handle)) or self.agent(device, handle)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda


class EmulatedWatch(CudaWatch):
    """Follows emulated streams by the rules of real ones. Device tensors are the marked ones."""

    def __init__(self, checker: RaceState) -> None:
        super().__init__(checker, lambda device: emulated_streams.current_stream().cuda_stream)

    def agent(self, device: int, handle: int, name: str = "") -> Agent:
        return super().agent(0, handle, name)  # there is one device, whatever its number

    def captures(self) -> bool:
        # Not asked of torch.cuda: a thread that outlives the run would find the real one of a machine without CUDA.
        return emulated_streams.is_capturing()

    def is_device(self, tensor: Tensor) -> bool:
        return tensor in marks.DEVICE_TENSORS

    def is_pinned(self, tensor: Tensor) -> bool:
        return marks.is_pinned(tensor)

    def now(self, host: Actor, on: Tensor | torch.device) -> Actor:
        # A program on a stream of a connected device acts as that one.
        if isinstance(host, Launched):
            return host
        stream = self.current(0)  # there is one device: asking the tensor for its own would cost 2 us an operator
        self._checker.agents.enqueue_again(stream, host)
        return stream

    def made(self, plan: race_ops.OperatorPlan, buffer: Buffer, actor: Actor, site: int) -> bool:
        return True if emulated_graphs.is_replaying() else super().made(plan, buffer, actor, site)

    def _replay(self, original: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        checker = self._checker
        for tensor in graph.lost() if checker.everything else ():
            site = checker.sites.here(2)
            if (place := checker.buffers.place(tensor, site)) is not None:
                checker.freed_for_graph(place[0], self.agent_of(None), site)
        super()._replay(original, graph, *args, **kwargs)

    @contextmanager
    def reading(self, tensor: Tensor) -> Iterator[None]:
        # On a GPU the current stream copies a device tensor, and the host waits.
        stream = self.stream_for(tensor, ()) if self.is_device(tensor) else None
        if not isinstance(stream, Agent):
            yield
            return
        with self._checker.agents.acting_as(stream):
            yield
        self._host_learns(stream)
