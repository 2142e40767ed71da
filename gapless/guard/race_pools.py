"""Follows the caching allocator, as far as it decides which stream may be given memory again."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .clocks import Agent
from .race_buffers import Buffer
from .race_checker import RaceChecker

BLOCK_BYTES = 512
SMALL_BLOCK_BYTES = 1 << 20
"""Blocks are multiples of `BLOCK_BYTES`; those of up to `SMALL_BLOCK_BYTES` are kept apart from larger ones."""
FREED_BLOCKS_KEPT = 256
"""The freed blocks of a stream that are remembered. A forgotten one is a missed race."""


@dataclass(slots=True)
class _Block:
    """Device memory that was allocated while `pool` was current, where it returns when its tensors are gone."""

    buffer: Buffer
    pool: Agent
    nbytes: int
    users: set[int] = field(default_factory=set)
    """Streams that were recorded: the allocator waits for what they were given."""
    storage: Any = None
    """A weak reference to the storage."""


class Pools:
    """Freed memory goes to the next tensor that is made on the stream on which it was allocated.

    So what other streams did with it must be ordered before that. Which block serves a request depends on the
    allocator's state; here any freed one that is large enough may.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._live: dict[int, _Block] = {}
        """Blocks in use, by the id of their buffer, which the block keeps alive."""
        self._gone: deque[int] = deque()
        """The keys of storages that have died, which may happen at any moment and on any thread."""
        self._free: dict[int, list[_Block]] = {}
        """Freed blocks that another stream may still use, by the number of the stream that allocated them."""

    def took(self, tensor: Tensor, buffer: Buffer, stream: Agent, site: int) -> None:
        """Note that the stream's pool gives out memory for `tensor`; the caller holds the checker's lock."""
        storage, key, gone = tensor.untyped_storage(), id(buffer), self._gone
        nbytes = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        while gone:
            self._put_back(self._live.pop(gone.popleft()))
        block = self._live[key] = _Block(buffer, stream, nbytes)
        block.storage = weakref.ref(storage, lambda _: gone.append(key))
        waiting = self._free.get(stream.index)
        if waiting:
            self._free[stream.index] = [
                b for b in waiting[-FREED_BLOCKS_KEPT:] if not self._reuse(b, stream, nbytes, site)
            ]

    def _put_back(self, block: _Block) -> None:
        if not self._checker.reused(block.buffer, block.pool, block.users, -1):
            self._free.setdefault(block.pool.index, []).append(block)

    def _reuse(self, block: _Block, stream: Agent, nbytes: int, site: int) -> bool:
        """Return whether the block needs no further look."""
        fits = nbytes <= block.nbytes and (nbytes <= SMALL_BLOCK_BYTES) == (block.nbytes <= SMALL_BLOCK_BYTES)
        return self._checker.reused(block.buffer, stream, block.users, site if fits else -1) or fits

    def keep_for(self, tensor: Tensor, stream: Agent) -> None:
        """Note `record_stream`: the memory is not given out again before this stream is done with it."""
        place = self._checker.buffers.place(tensor, self._checker.sites.here())
        block = None if place is None else self._live.get(id(place[0]))
        if block is not None:
            block.users.add(stream.index)
