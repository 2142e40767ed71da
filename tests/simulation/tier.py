"""A second tier of KV memory, as a test double.

Pages are copied out and back on the bulk streams, and come late. The double does by hand what an offload would do:
store what has passed the transfer door under a store pin, load what is gone from the index under a load pin, and
advance the ledger's clocks when a transfer is acknowledged.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import torch
from page_contents import Contents
from torch import Tensor

from gapless.device import Fence
from gapless.loop.loop import Loop
from gapless.memory.ledger import Clock
from gapless.memory.pages import Pin
from gapless.testing.sim import SimDevice

MOST_LOADS = 20
"""Of one engine: nobody asked for them, and the pages that they take are missed by rows that grow."""


class Transfer(NamedTuple):
    """A page on its way; `copy` is the host's side."""

    number: int
    digest: bytes
    copy: Tensor
    fence: Fence


class Tier:
    """`kept` outlives engines: what it holds is named by digests."""

    def __init__(self, device: SimDevice, loop: Loop, kept: dict[bytes, Tensor], contents: Contents) -> None:
        self.kept = kept
        self.stored = self.loaded = 0
        self._device = device
        self._pool, self._ledger = loop.pools[0], loop.planner.ledger
        self._memory = loop.launcher.executor.program.cache.data
        self._contents = contents
        self._rng = random.Random(len(kept))
        self._out: deque[Transfer] = deque()
        self._in: deque[Transfer] = deque()
        self._numbers = dict.fromkeys((Clock.BULK_OUT, Clock.BULK_IN), 0)

    def turn(self) -> None:
        """Take in acknowledgements, not always at once, and begin a transfer now and then."""
        if self._rng.random() < 0.6:
            self._acknowledge()
        if self._rng.random() < 0.5:
            self._store()
        # A burst may take all pages: then a request that waits has nothing but the acknowledgements to wait for.
        for _ in range(self._rng.choice((0, 0, 1, 1, 1, 8))):
            self._load()

    def drain(self) -> None:
        """Every transfer is acknowledged."""
        for transfer in (*self._out, *self._in):
            transfer.fence.wait()
        self._acknowledge()

    def _acknowledge(self) -> None:
        while self._out and self._out[0].fence.done():
            transfer = self._out.popleft()
            assert self._contents.knows(transfer.digest), "a page of no request is stored"
            self._contents.check(transfer.digest, transfer.copy, "a stored page")
            self.kept[transfer.digest] = transfer.copy
            self._ledger.advance(Clock.BULK_OUT, transfer.number)
            self.stored += 1
        while self._in and self._in[0].fence.done():
            self._ledger.advance(Clock.BULK_IN, self._in.popleft().number)
            self.loaded += 1

    def _store(self) -> None:
        """One settled page, neither kept nor on its way. The newest: it is the likeliest to be torn."""
        known = {*self.kept, *(transfer.digest for transfer in self._out)}
        pages = [
            (page, digest) for page, digest in self._pool.digest_of.items()
            if digest not in known and self._pool.settled(page)
        ]  # fmt: skip
        if not pages:
            return
        page, digest = pages[-1]
        self._pool.pin(page, Pin.STORE)
        transfer = self._begin(Clock.BULK_OUT, digest, torch.empty_like(self._memory[page]), page)
        self._out.append(transfer)
        self._pool.unpin((page,), (Clock.BULK_OUT, transfer.number), Pin.STORE)

    def _load(self) -> None:
        """One page that was evicted, where there is room for it."""
        coming = {transfer.digest for transfer in self._in}
        gone = [digest for digest in self.kept if digest not in coming and self._pool.find(digest) is None]
        begun = self._numbers[Clock.BULK_IN]
        if not gone or begun == MOST_LOADS or not self._pool.available():
            return
        digest = self._rng.choice(gone)
        page = self._pool.take(Pin.LOAD)
        transfer = self._begin(Clock.BULK_IN, digest, self.kept[digest], page)
        self._in.append(transfer)
        self._pool.fill({page: digest}, transfer.number)

    def _begin(self, clock: Clock, digest: bytes, copy: Tensor, page: int) -> Transfer:
        self._numbers[clock] += 1
        out = clock is Clock.BULK_OUT
        stream = self._device.bulk_out if out else self._device.bulk_in
        ends = (copy, self._memory[page]) if out else (self._memory[page], copy)
        stream.launch(_copy, *ends, reads=ends[1:], writes=ends[:1])
        fence = stream.record(timed=True)
        stream.launch(self._device.bell.ring)  # the loop may have nothing else to wait for
        return Transfer(self._numbers[clock], digest, copy, fence)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
