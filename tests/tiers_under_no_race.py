"""Tells no_race what threads of tiers touch, from the begin of a job to its end, and the order that their deques bring:
they copy by numpy and in C, which is not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from gapless.base.shared import PeerMemory
from gapless.guard.race_checker import RaceChecker
from gapless.offload.tiers.link import PeerLink
from gapless.offload.tiers.seam import TierPage
from gapless.offload.tiers.shelf import Shelf, ShelfPage
from gapless.offload.tiers.worker import TierWorker
from gapless.offload.transfers import Transfers


class FreeList(list[int]):
    """A free list that says what comes back to it."""

    def __init__(self, items: list[int], freed: Callable[[int], None]) -> None:
        super().__init__(items)
        self._freed = freed

    def append(self, item: int) -> None:
        self._freed(item)
        super().append(item)


def watch_transfers(checker: RaceChecker, transfers: Transfers, prefix: str = "") -> None:
    """Register the host tier's slots, by slot, and the rings of both directions. A slot that comes back counts as
    written."""

    def freed(memory: str, slot: int) -> None:
        checker.freed(memory, [slot])

    for group, memory in zip(transfers.host.groups, transfers.memory, strict=True):
        name = f"{prefix}host{group.number or ''}"
        checker.register(name, np.frombuffer(memory, np.uint8).reshape(group.size, -1), "rows")
        group.free = FreeList(group.free, partial(freed, name))
    for name, way in (("bulk out", transfers.bulk_out), ("bulk in", transfers.bulk_in)):
        checker.register(f"{prefix}{name} sums", way.sums)
        for slot in way.places:
            checker.register(f"{prefix}{name} places[{slot.index}]", slot)
        for slot in way.arrived:
            checker.register(f"{prefix}{name} arrived[{slot.index}]", slot)


@contextmanager
def tiers_stated(checker: RaceChecker) -> Iterator[None]:
    """What threads of tiers touch, and when they hand over."""
    stated = StatedTiers(checker)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, function in (
            (TierWorker, "_send", stated.sends), (TierWorker, "_do", stated.does), (TierWorker, "_tell", stated.sends),
            (TierWorker, "take", stated.takes), (TierWorker, "load", stated.ordered("write")),
            (TierWorker, "store", stated.ordered("read")), (TierWorker, "_begin", stated.begins),
            (TierWorker, "_end", stated.ends), (PeerLink, "_order", stated.sends), (PeerLink, "_do", stated.does),
            (Shelf, "lend", stated.lends), (Shelf, "give_back", stated.gives_back),
            (PeerMemory, "__init__", stated.maps), (PeerMemory, "close", stated.unmaps),
        ):  # fmt: skip
            patch.setattr(owner, name, _around(getattr(owner, name), function))
        yield


class StatedTiers:
    """Around methods of tiers: each gets the method and its object first."""

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._jobs: dict[tuple[int, int], tuple[str, Sequence[TierPage]]] = {}
        """What jobs do to their slots, by worker and number"""
        self._mapped: list[PeerMemory] = []

    def sends(self, plain: Callable[..., Any], owner: Any, *args: Any) -> Any:
        self._checker.happens_before(owner)
        return plain(owner, *args)

    def does(self, plain: Callable[..., Any], owner: Any, *args: Any) -> Any:
        self._checker.happens_after(owner)
        return plain(owner, *args)

    def takes(self, plain: Callable[..., Any], owner: Any, *args: Any) -> Any:
        taken = plain(owner, *args)
        self._checker.happens_after(owner)
        return taken

    def ordered(self, kind: str) -> Callable[..., Any]:
        def order(plain: Callable[..., Any], worker: TierWorker, job: int, pages: Any, *args: Any) -> Any:
            self._jobs[id(worker), job] = kind, pages
            return plain(worker, job, pages, *args)

        return order

    def begins(self, plain: Callable[..., Any], worker: TierWorker, job: Any) -> Any:
        self._touch(worker, job.number)
        return plain(worker, job)

    def ends(self, plain: Callable[..., Any], worker: TierWorker, end: Any) -> Any:
        self._touch(worker, end.job)
        self._jobs.pop((id(worker), end.job), None)
        return plain(worker, end)

    def _touch(self, worker: TierWorker, job: int) -> None:
        kind, pages = self._jobs.get((id(worker), job), ("read", ()))
        for page in pages:
            self._checker.access(np.frombuffer(page.slot, np.uint8), kind)  # type: ignore[arg-type]

    def lends(self, plain: Callable[..., Any], shelf: Shelf, key: bytes) -> ShelfPage | None:
        page: ShelfPage | None = plain(shelf, key)
        if page is not None:
            self._checker.access(np.frombuffer(page.data, np.uint8), "read")
        return page

    def gives_back(self, plain: Callable[..., Any], shelf: Shelf, pages: Sequence[ShelfPage]) -> None:
        for page in pages:
            self._checker.access(np.frombuffer(page.data, np.uint8), "read")
        plain(shelf, pages)

    def maps(self, plain: Callable[..., Any], memory: PeerMemory, data: Any, *args: Any) -> None:
        plain(memory, data, *args)
        start = data.ctypes.data
        if not self._checker.buffers.find(start, start + data.nbytes):  # a giver in this process may have it
            self._mapped.append(memory)
            self._checker.register(f"peer memory {len(self._mapped)}", data)

    def unmaps(self, plain: Callable[..., Any], memory: PeerMemory) -> None:
        if memory in self._mapped:
            self._checker.access(memory.data, "write")
        plain(memory)


def _around(plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(plain, *args, **kwargs)
