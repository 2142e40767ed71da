"""Pages that peers may take: copies in memory of their own, and what is known of the requests that they belong to.

What is kept here is a copy, so that a reader on its way over a network holds nothing of the engine. A page that is lent
keeps its place until it is given back, so that no reader sees one change. The loop's tier puts pages here, threads of
connections read them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gapless.tiers.seam import Found
from gapless.tiers.shared import PageMemory

PAGE_SECONDS = 60.0
"""How long a page is kept that no peer asks for"""
NAME_SECONDS = 60.0
"""How long a request is remembered after its end"""
UNKNOWN_SECONDS = 1.0
"""How long a peer that names a request has to wait for it to come"""
MAX_NAMES = 65_536


class ShelfPage(NamedTuple):
    key: bytes
    place: int
    data: memoryview
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

    def __init__(self, nbytes: int, place_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`place_bytes` are those of the largest page."""
        self.memory = PageMemory(max(1, nbytes // place_bytes), place_bytes)
        self._free = list(range(max(1, nbytes // place_bytes)))
        self._lent: Counter[int] = Counter()
        """Readers of places"""
        self._left: set[int] = set()
        """Places of pages that are gone, and still lent"""
        self._clock = clock
        self._lock = threading.Lock()
        self.pages: OrderedDict[bytes, ShelfPage] = OrderedDict()
        """The oldest first, in the order of `until`"""
        self._names: OrderedDict[str, NamedRequest] = OrderedDict()
        self.used = 0
        """Bytes"""

    # For the tier.

    def put(self, key: bytes, data: memoryview, checksum: int) -> bool:
        """Keep a copy of this page; false if it is too large, or all room is lent."""
        if len(data) > self.memory.place_bytes:
            return False
        with self._lock:
            # A page that is here is the same page: its bytes follow from its key.
            if (known := self.pages.pop(key, None)) is not None:
                self._lay(key, known)
                return True
            if not self._free and (oldest := self._oldest()) is not None:
                self._remove(oldest)
            if not self._free:
                return False
            place = self._free.pop()
        self.memory.write(place, data)
        with self._lock:
            if key in self.pages:  # another thread had the same page
                self._free.append(place)
                return True
            self._lay(key, ShelfPage(key, place, self.memory.read(place, len(data)), checksum, 0.0))
            self.used += len(data)
        return True

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

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
                if (page := self.pages.pop(key, None)) is not None:
                    self._lay(key, page)
            return [Found.HIT if key in self.pages else lacks for key in keys]

    def lend(self, key: bytes) -> ShelfPage | None:
        """Return a page, whose bytes stay as they are until `give_back`."""
        with self._lock:
            if (page := self.pages.get(key)) is not None:
                self._lent[page.place] += 1
            return page

    def give_back(self, pages: Sequence[ShelfPage]) -> None:
        """The reader of these pages that were lent is done."""
        with self._lock:
            for page in pages:
                self._lent[page.place] -= 1
                if not self._lent[page.place]:
                    del self._lent[page.place]
                    if page.place in self._left:
                        self._left.remove(page.place)
                        self._free.append(page.place)

    def expire(self) -> None:
        """Give up what no peer has asked for."""
        with self._lock:
            self._expire()

    @property
    def lent(self) -> int:
        return len(self._lent)

    def check(self) -> None:
        """Assert the accounting of places (tests, debugging)."""
        with self._lock:
            held = [*self._free, *self._left, *[page.place for page in self.pages.values()]]
            assert sorted(held) == list(range(self.memory.places)), "a place is lost, or serves twice"
            assert self._left <= self._lent.keys(), "a place waits for a reader that is gone"
            assert self.used == sum(len(page.data) for page in self.pages.values())

    # With the lock held.

    def _oldest(self) -> bytes | None:
        """Return the page that makes room: that no reader has."""
        return next((key for key, page in self.pages.items() if page.place not in self._lent), None)

    def _remove(self, key: bytes) -> None:
        if (page := self.pages.pop(key, None)) is not None:
            self.used -= len(page.data)
            if page.place in self._lent:
                self._left.add(page.place)
            else:
                self._free.append(page.place)

    def _lay(self, key: bytes, page: ShelfPage) -> None:
        self.pages[key] = page._replace(until=self._clock() + PAGE_SECONDS)

    def _expire(self) -> None:
        now = self._clock()
        while self.pages and next(iter(self.pages.values())).until <= now:
            self._remove(next(iter(self.pages)))
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
