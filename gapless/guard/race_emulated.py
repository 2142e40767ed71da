"""Follows emulated CUDA streams, by the rules of real ones."""

from __future__ import annotations

import torch
from torch import Tensor

from . import emulated_graphs, emulated_streams, marks
from .clocks import Agent
from .race_agents import Launched
from .race_checker import RaceChecker
from .race_cuda import CudaWatch
from .race_report import READ


class EmulatedWatch(CudaWatch):
    """Device tensors are the marked ones; an operator acts as the emulated stream that is current on its thread."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__(checker, torch.cuda)

    def current(self, device: int) -> Agent:
        handle = emulated_streams.current_stream().cuda_stream
        return self._known_agents.get((0, handle)) or self.agent(0, handle)

    def captures(self) -> bool:
        return emulated_graphs.is_capturing()

    def is_device(self, tensor: Tensor) -> bool:
        return tensor in marks.DEVICE

    def is_pinned(self, tensor: Tensor) -> bool:
        return marks.is_pinned(tensor)

    def now(self, host: Agent | Launched, tensor: Tensor) -> Agent | Launched:
        # A program on a stream of a connected device acts as that one.
        if isinstance(host, Launched):
            return host
        stream = self.current(0)
        self._checker.agents.enqueue_again(stream, host)
        return stream

    def reads_on_host(self, tensor: Tensor) -> bool:
        """Note `tolist` of a device tensor: on a GPU the current stream copies it, and the host waits."""
        if not self.is_device(tensor):
            return False
        agents, stream = self._checker.agents, self.stream_for(tensor, ())
        if not isinstance(stream, Agent):
            return False
        before = agents.act_as(stream)
        try:
            self._checker.reach(tensor, READ)
        finally:
            agents.act_as(before)
        self._host_learns(stream)
        return True
