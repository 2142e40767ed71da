"""Follows the caching allocator, as far as it decides which stream may be given memory again."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .race_agents import Agent
from .race_buffers import Buffer
from .race_state import RaceState

BLOCK_BYTES = 512
SMALL_BLOCK_BYTES = 1 << 20
"""Blocks are multiples of `BLOCK_BYTES`; blocks of up to `SMALL_BLOCK_BYTES` are kept apart from larger ones."""
FREED_BLOCKS_KEPT = 256
"""The freed blocks of a stream that are remembered. A forgotten one is a missed race."""


@dataclass(slots=True)
class _Block:
    """Device memory that returns to `pool` with the end of its tensors."""

    buffer: Buffer
    pool: Agent
    nbytes: int
    users: set[int] = field(default_factory=set)
    """Recorded streams: the allocator waits for their work."""
    storage: Any = None
    """A weak reference to the storage."""


class Pools:
    """Freed memory goes to the next tensor made on the stream of its allocation.

    So what other streams did with it must be ordered before that. Which block serves a request depends on the
    allocator's state; here any freed one that is large enough may.
    """

    def __init__(self, checker: RaceState) -> None:
        self._checker = checker
        self._live: dict[int, _Block] = {}
        """Blocks that others than their pool have used, by the id of their buffer, which the block keeps alive."""
        self._gone: deque[int] = deque()
        """The keys of storages that have died, which may happen at any moment and on any thread."""
        self._free: dict[int, list[_Block]] = {}
        """Freed blocks that another stream may still use, by the number of the stream that allocated them."""

    def took(self, buffer: Buffer, stream: Agent, site: int) -> None:
        """Note that the stream's pool gives out memory, which no other thread has yet."""
        buffer.pool = stream
        if self._gone or self._free:
            with self._checker.lock:
                self._take(buffer, stream, site)

    def _take(self, buffer: Buffer, stream: Agent, site: int) -> None:
        while self._gone:
            self._free_block(self._live.pop(self._gone.popleft()))
        waiting, nbytes = self._free.pop(stream.index, []), _block_bytes(buffer)
        left = [b for b in waiting[-FREED_BLOCKS_KEPT:] if not self._reuse(b, stream, nbytes, site)]
        if left:
            self._free[stream.index] = left

    def gave_back(self, buffer: Buffer) -> None:
        """Note that memory is freed while its storage lives on."""
        with self._checker.lock:
            block = self._live.pop(id(buffer), None)
            if block is not None:
                block.storage = None
                self._free_block(block)

    def _free_block(self, block: _Block) -> None:
        if not self._checker.reused(block.buffer, block.pool, block.users, -1):
            self._free.setdefault(block.pool.index, []).append(block)

    def lent(self, buffer: Buffer, pool: Agent, tensor: Tensor) -> _Block:
        """Follow memory that another than its pool uses, which is rare, until it is freed."""
        key, gone = id(buffer), self._gone
        block = self._live.get(key)
        if block is None:
            block = self._live[key] = _Block(buffer, pool, _block_bytes(buffer))
            block.storage = weakref.ref(tensor.untyped_storage(), lambda _: gone.append(key))
        return block

    def _reuse(self, block: _Block, stream: Agent, nbytes: int, site: int) -> bool:
        """Return whether the block needs no further look."""
        fits = nbytes <= block.nbytes and (nbytes <= SMALL_BLOCK_BYTES) == (block.nbytes <= SMALL_BLOCK_BYTES)
        return self._checker.reused(block.buffer, stream, block.users, site if fits else -1) or fits

    def keep_for(self, tensor: Tensor, stream: Agent) -> None:
        """Note `record_stream`: the memory is not given out again before this stream is done with it."""
        place = self._checker.buffers.place(tensor, self._checker.sites.here())
        if place is not None and (pool := place[0].pool) is not None:
            with self._checker.lock:
                self.lent(place[0], pool, tensor).users.add(stream.index)


def _block_bytes(buffer: Buffer) -> int:
    return -(-(buffer.end - buffer.start) // BLOCK_BYTES) * BLOCK_BYTES
