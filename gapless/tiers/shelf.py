"""Pages that peers may take: copies in memory of their own, and what is known of the requests that they belong to.

What is kept here is immutable bytes, so that a reader on its way over a network holds nothing of the engine, and never
sees a page change. The loop's tier puts pages here, threads of connections read them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gapless.tiers.seam import Found

PAGE_SECONDS = 60.0
"""How long a page is kept that no peer asks for"""
NAME_SECONDS = 60.0
"""How long a request is remembered after its end"""
UNKNOWN_SECONDS = 1.0
"""How long a peer that names a request has to wait for it to come"""
MAX_NAMES = 65_536


class ShelfPage(NamedTuple):
    """A page on the shelf."""

    data: bytes
    checksum: int
    until: float


class NamedRequest(NamedTuple):
    """What is known of a request that a peer may name."""

    pending: bool
    """Whether more of its pages may come"""
    until: float
    """When that is no longer so; from then on it counts as ended, and is forgotten NAME_SECONDS later."""


class Shelf:
    """Holds at most `nbytes` of pages; those that peers have not asked for the longest make room. For any thread."""

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = nbytes
        self._clock = clock
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, ShelfPage] = OrderedDict()
        """The oldest first, in the order of `until`"""
        self._names: OrderedDict[str, NamedRequest] = OrderedDict()
        self.used = 0
        """Bytes"""

    # For the tier.

    def put(self, key: bytes, data: memoryview, checksum: int) -> bool:
        """Keep a copy of this page; false if it is larger than all there is."""
        if len(data) > self._size:
            return False
        with self._lock:
            known = self._take(key)
            # A page that is here is the same page: its bytes follow from its key.
            kept = known or ShelfPage(bytes(data), checksum, 0.0)
            while self._pages and self.used + len(kept.data) > self._size:
                self._take(next(iter(self._pages)))
            self._lay(key, kept)
        return True

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._take(key)

    def begin(self, name: str) -> None:
        """A request of this name is here: its pages will come."""
        self._name(name, NamedRequest(True, float("inf")))

    def end(self, name: str) -> None:
        """No further page of this request comes."""
        self._name(name, NamedRequest(False, self._clock()))

    # For peers.

    def find(self, name: str, keys: Sequence[bytes]) -> list[Found]:
        """Return which of these pages are here; others are pending while the request of this name makes them."""
        with self._lock:
            self._expire()
            lacks = Found.PENDING if name and self._pending(name) else Found.MISS
            for key in (keys := list(keys)):
                if (page := self._take(key)) is not None:
                    self._lay(key, page)
            return [Found.HIT if key in self._pages else lacks for key in keys]

    def get(self, key: bytes) -> ShelfPage | None:
        with self._lock:
            return self._pages.get(key)

    def expire(self) -> None:
        """Give up what no peer has asked for."""
        with self._lock:
            self._expire()

    # With the lock held.

    def _take(self, key: bytes) -> ShelfPage | None:
        page = self._pages.pop(key, None)
        self.used -= len(page.data) if page is not None else 0
        return page

    def _lay(self, key: bytes, page: ShelfPage) -> None:
        self._pages[key] = page._replace(until=self._clock() + PAGE_SECONDS)
        self.used += len(page.data)

    def _expire(self) -> None:
        now = self._clock()
        while self._pages and next(iter(self._pages.values())).until <= now:
            self._take(next(iter(self._pages)))
        while self._names:
            name, known = next(iter(self._names.items()))
            if len(self._names) <= MAX_NAMES and known.until + NAME_SECONDS > now:
                break
            del self._names[name]

    def _pending(self, name: str) -> bool:
        now = self._clock()
        known = self._names.setdefault(name, NamedRequest(True, now + UNKNOWN_SECONDS))
        return known.pending and now < known.until

    def _name(self, name: str, known: NamedRequest) -> None:
        with self._lock:
            self._names[name] = known
            self._names.move_to_end(name)
            self._expire()
