"""Pages that peers may take, and the requests that they belong to.

They are in slots of the host tier, each of which is the shelf's until it is released: when it makes room, or no peer
has asked for it for a while. A page that is lent keeps its slot until it is given back, so that no reader sees one
change. The loop's tier puts pages here, threads of connections read them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gapless.base.shared import SharedMemory
from gapless.offload.tiers.seam import Found, group_in

UNASKED_SECONDS = 60.0
"""How long a page is kept that no peer asks for"""
NAME_SECONDS = 60.0
"""How long a request is remembered after its end"""
UNKNOWN_SECONDS = 1.0
"""How long a peer that names a request has to wait for it to come"""
MAX_NAMES = 65_536


@dataclass(slots=True, eq=False)
class ShelfPage:
    """A page in its slot of the host tier, which is kept until `release` is called."""

    key: bytes
    data: memoryview
    checksum: int
    release: Callable[[], None]
    until: float = 0.0
    """When it is given up, if no peer asks for it"""
    readers: int = 0


class NamedRequest(NamedTuple):
    """A request that a peer may name."""

    pending: bool
    """Whether more of its pages may come"""
    until: float
    """When that is no longer so; from then on it counts as ended, and is forgotten NAME_SECONDS later."""


class Shelf:
    """Holds at most `nbytes` of pages; the pages unasked for the longest make room. For any thread.

    Each page group has a share of its own, as it has slots of its own: kept pages must leave it some.
    """

    def __init__(
        self, nbytes: int, slot_bytes: Sequence[int], memory: SharedMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`slot_bytes` are the bytes of a page, by page group. `memory` has all pages, if peers may map it."""
        self.nbytes, self.memory = nbytes, memory
        self._most = nbytes // sum(slot_bytes)
        """Pages of each group, at most"""
        self._count: Counter[int] = Counter()
        """Pages that are not released, by group"""
        self._clock = clock
        self._lock = threading.Lock()
        self.pages: OrderedDict[bytes, ShelfPage] = OrderedDict()
        """The oldest first, in the order of `until`"""
        self._left: set[ShelfPage] = set()
        """Removed pages that are still lent"""
        self._names: OrderedDict[str, NamedRequest] = OrderedDict()
        self.used = 0
        """Bytes of pages that are not released"""

    # For the tier.

    def put(self, pages: Sequence[ShelfPage]) -> list[bool]:
        """Keep these pages, which peers find at once; false for each that is released, since all room is lent."""
        with self._lock:
            return [*map(self._put, pages)]

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
                    self._lay(page)
            return [Found.HIT if key in self.pages else lacks for key in keys]

    def lend(self, key: bytes) -> ShelfPage | None:
        """Return a page, whose bytes stay as they are until `give_back`."""
        with self._lock:
            if (page := self.pages.get(key)) is not None:
                page.readers += 1
            return page

    def give_back(self, pages: Sequence[ShelfPage]) -> None:
        """The reader of these pages that were lent is done."""
        with self._lock:
            for page in pages:
                page.readers -= 1
                if page in self._left and not page.readers:
                    self._left.remove(page)
                    self._release(page)

    def expire(self) -> None:
        """Give up what no peer has asked for."""
        with self._lock:
            self._expire()

    @property
    def lent(self) -> int:
        """How many pages readers have (tests)"""
        with self._lock:
            return sum([page.readers > 0 for page in (*self.pages.values(), *self._left)])

    def check(self) -> None:
        """Assert the accounting of pages (tests, debugging)."""
        with self._lock:
            assert all([page.readers for page in self._left]), "a page waits for a reader that is gone"
            here = [*self.pages.values(), *self._left]
            assert self.used == sum(len(page.data) for page in here)
            assert +self._count == Counter([group_in(page.key) for page in here])

    # With the lock held.

    def _put(self, page: ShelfPage) -> bool:
        # A page that is here is the same page: its bytes follow from its key.
        if (known := self.pages.pop(page.key, None)) is not None:
            self._lay(known)
            page.release()
            return True
        group = group_in(page.key)
        while self._count[group] >= self._most and (oldest := self._oldest(group)) is not None:
            self._remove(oldest)
        if self._count[group] >= self._most:
            page.release()
            return False
        self._count[group] += 1
        self.used += len(page.data)
        self._lay(page)
        return True

    def _oldest(self, group: int) -> bytes | None:
        """Return the page that makes room in this group: that no reader has."""
        return next((key for key, page in self.pages.items() if not page.readers and group_in(key) == group), None)

    def _remove(self, key: bytes) -> None:
        if (page := self.pages.pop(key, None)) is not None:
            if page.readers:
                self._left.add(page)
            else:
                self._release(page)

    def _release(self, page: ShelfPage) -> None:
        self._count[group_in(page.key)] -= 1
        self.used -= len(page.data)
        page.release()

    def _lay(self, page: ShelfPage) -> None:
        page.until = self._clock() + UNASKED_SECONDS
        self.pages[page.key] = page

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
