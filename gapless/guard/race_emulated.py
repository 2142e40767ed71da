"""CUDA streams under no_race where CUDA is emulated: the same rules, and the caching allocator's pools by stream."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.guard import emulated_streams, marks, race_ops
from gapless.guard.clocks import Agent
from gapless.guard.race_agents import Launched
from gapless.guard.race_buffers import Buffer
from gapless.guard.race_cuda import CudaWatch
from gapless.guard.race_report import READ

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gapless.guard.race_checker import RaceChecker

SMALL = 1 << 20
"""The allocator keeps blocks up to this size apart from larger ones."""


class EmulatedWatch(CudaWatch):
    """Device tensors are the marked ones; an operator acts as the emulated stream that is current on its thread."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__(checker, torch.cuda, lambda device: emulated_streams.current_stream().cuda_stream)
        self._pools = _Pools(checker)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor in marks.DEVICE

    def is_pinned(self, tensor: Tensor) -> bool:
        return marks.is_pinned(tensor)

    def stream_for(self, tensor: Tensor, together: Iterable[tuple[Tensor, int]]) -> Agent | None:
        # A program on a stream of CpuDevice or SimDevice acts as that one.
        if isinstance(self._checker.agents.here(), Launched):
            return None
        return super().stream_for(tensor, together)

    def reads_home(self, tensor: Tensor) -> bool:
        """`tolist` of a device tensor: on a GPU it is copied by the current stream, and the host waits."""
        if not self.is_device(tensor):
            return False
        agents, stream = self._checker.agents, self.stream_for(tensor, ())
        if stream is None:
            return False
        before = agents.act_as(stream)
        try:
            self._checker.reach(tensor, READ)
        finally:
            agents.act_as(before)
        self._host_behind(stream)
        return True

    def made(self, plan: race_ops.Plan, buffer: Buffer, tensor: Tensor, stream: Any) -> bool:
        if self.is_device(tensor) and isinstance(stream, Agent):
            self._pools.took(tensor, buffer, stream)
        return super().made(plan, buffer, tensor, stream)

    def install(self) -> None:
        super().install()
        self._patches.stand_in(Tensor, "record_stream", self._record_stream)

    def _record_stream(self, original: Any, tensor: Tensor, stream: Any) -> None:
        original(tensor, stream)
        self._pools.keep_for(tensor, self.agent_of(stream))


@dataclass
class _Block:
    """Device memory that was allocated while `pool` was current: there it returns when its tensors are gone."""

    buffer: Buffer
    pool: Agent
    nbytes: int
    users: set[int] = field(default_factory=set)
    """Streams that were recorded: the allocator waits for what they were given."""
    storage: Any = None
    """A weak reference."""


class _Pools:
    """The caching allocator, as far as it matters which memory it may give out again, and to which stream.

    Freed memory is given at once to whatever the stream that it belongs to is asked to do next. So what other streams
    did with it must be ordered before that. Which block serves a request depends on the allocator's state; here any
    freed one that is large enough may.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._live: dict[int, _Block] = {}
        self._gone: deque[int] = deque()
        """Filled as storages die, which may be at any moment and on any thread."""
        self._free: list[_Block] = []

    def took(self, tensor: Tensor, buffer: Buffer, stream: Agent) -> None:
        """The stream's pool gives out memory for `tensor`."""
        storage = tensor.untyped_storage()
        number, nbytes, gone = storage._cdata, storage.nbytes(), self._gone
        with self._checker.lock:
            while gone:
                self._free.append(self._live.pop(gone.popleft()))
            self._free = [block for block in self._free if not self._reuse(block, stream, nbytes)]
            # Its buffer holds the number, which is no other storage's until it is popped from here.
            block = self._live[number] = _Block(buffer, stream, nbytes)
            block.storage = weakref.ref(storage, lambda _: gone.append(number))
        self._checker.raise_pending()

    def _reuse(self, block: _Block, stream: Agent, nbytes: int) -> bool:
        """Whether the block needs no further look."""
        if block.pool is not stream:
            return False
        fits = nbytes <= block.nbytes and (nbytes <= SMALL) == (block.nbytes <= SMALL)
        return self._checker.reused(block.buffer, stream, block.users, report=fits)

    def keep_for(self, tensor: Tensor, stream: Agent) -> None:
        block = self._live.get(tensor.untyped_storage()._cdata)
        if block is not None:
            block.users.add(stream.index)
