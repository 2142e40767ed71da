"""The page pool: every page is free, cached, owned or fenced, and the four add up at all times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gapless.memory.groups import FULL, PageRule
from gapless.memory.ledger import At, Clock, Ledger

ALREADY_PASSED: At = (Clock.COMPUTE, 0)
"""A number passed since the start: no step or transfer can touch the page any more."""
NULL_PAGE = 0
"""Target of inert rows. It has no owner and is never handed out."""


class Pin(IntEnum):
    """Reasons to keep a page."""

    REQUEST = 0
    """A request on a row reads or writes it."""
    STORE = 1
    """A transfer from the device will read it."""
    LOAD = 2
    """A transfer to the device will write it."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the null page is not counted."""

    free: int = 0
    cached: int = 0
    """Pages without pins that hold a prefix for new requests to share."""
    owned: int = 0
    fenced: int = 0
    """Released, but still reachable by a step or a transfer in flight."""

    @property
    def total(self) -> int:
        return self.free + self.cached + self.owned + self.fenced

    @property
    def usage(self) -> float:
        """Share of pages in use, from 0 to 1"""
        return (self.owned + self.fenced) / max(1, self.total)


class PageListener:
    """Listener to the changes of a pool's index; this one does nothing."""

    def published(self, page: int, digest: bytes) -> None:
        """The page was indexed; a transfer may read it once `PagePool.settled`."""

    def hidden(self, digest: bytes) -> None:
        """The page of this digest is doubted: no copy of it may be used."""

    def removed(self, digest: bytes) -> None:
        """The page of this digest left the index."""

    def forgotten(self) -> None:
        """The index was emptied: no copy may be used."""


class PagePool:
    """Pages of one group's KV memory, with an index of the full ones by digest of their prefix.

    Pins keep a page; requests with a common prefix share its pages. A released page is reusable after its fences have
    passed too. A prefix has two doors: `find` serves steps, which run in the order of their planning, and `settled`
    serves transfers, which are not ordered behind the step that writes.
    """

    def __init__(self, pages: int, page_size: int, ledger: Ledger, rule: PageRule = FULL) -> None:
        assert pages >= 2, "a pool needs the null page and one more"
        self.rule = rule
        self.page_size = page_size
        self.size = pages - 1
        self.version = 0
        """Changes with the index."""
        self.released = 0
        """Total number of pages that became available."""
        self._ledger = ledger
        self.free = list(range(pages - 1, 0, -1))
        self.cached: dict[int, None] = {}  # least recently used first
        self.pins = [0] * pages  # by page, of all kinds
        self._kinds = [[0] * pages for _ in Pin]
        self.fences = [0] * pages  # given up, and not yet passed
        self._fenced = 0
        self._page_of: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}
        """Indexed pages, each with the digest of the prefix it ends."""
        self._written = [0] * pages  # of an indexed page: the step that fills it
        self._refused: set[int] = set()
        """Pages whose transfer brought wrong contents."""
        self.watcher = self.journal = PageListener()
        """Listener for copies elsewhere, and listener for other programs"""

    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return len(self.free) + len(self.cached)

    @property
    def fenced(self) -> int:
        return self._fenced

    def counts(self) -> PageCounts:
        free, cached = len(self.free), len(self.cached)
        return PageCounts(free, cached, self.size - free - cached - self._fenced, self._fenced)

    # Pins.

    def take(self, kind: Pin = Pin.REQUEST) -> int:
        """Return a page under one new pin; evicts the least recently used cached prefix if none is free."""
        if self.free:
            page = self.free.pop()
        else:
            assert self.cached, "no page is free or cached"
            page = next(iter(self.cached))
            del self.cached[page]
            self._forget(page)
        self.pins[page] = self._kinds[kind][page] = 1
        return page

    def pin(self, page: int, kind: Pin = Pin.REQUEST) -> None:
        """Add a pin to an indexed page."""
        if self.pins[page] == 0:
            if self.fences[page]:
                self._fenced -= 1
            else:
                del self.cached[page]
        self.pins[page] += 1
        self._kinds[kind][page] += 1

    def unpin(self, pages: Sequence[int], at: At = ALREADY_PASSED, kind: Pin = Pin.REQUEST) -> None:
        """Remove a pin of each page; others may use it once `at`, the last access under this pin, has passed."""
        pins, of_kind, fences = self.pins, self._kinds[kind], self.fences
        for page in pages:
            assert of_kind[page] > 0, f"page {page} has no pin {kind.name}"
            pins[page] -= 1
            of_kind[page] -= 1
            fences[page] += 1
            self._fenced += pins[page] == 0
        if pages:
            self._ledger.retire(at, self._passed, pages)

    def retire(self, pages: Sequence[int], last_step: int) -> None:
        """Release a request's pages, last touched by `last_step`: the tail first, since the head serves more."""
        self.unpin([page for page in reversed(pages) if page != NULL_PAGE], (Clock.COMPUTE, last_step))

    def _passed(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.fences[page] > 0, f"page {page} dropped twice"
            self.fences[page] -= 1
            if not (self.pins[page] or self.fences[page]):
                self._fenced -= 1
                self.released += 1
                if page in self.digest_of:
                    self.cached[page] = None
                else:
                    self.free.append(page)

    # The index.

    def find(self, digest: bytes) -> int | None:
        """Return the page of a digest, for a step. Nothing is claimed yet: `pin` does that."""
        return self._page_of.get(digest)

    def lacks(self, digests: Sequence[bytes]) -> bool:
        """Return whether none of these digests has a page."""
        return self._page_of.keys().isdisjoint(digests)

    def resting(self, pages: Sequence[int]) -> int:
        """Return how many of these pages are cached, so that pinning them shrinks `available`."""
        return sum([page in self.cached for page in pages])

    def settled(self, page: int) -> bool:
        """Return whether a transfer may read the page: it is indexed, and the step that filled it was observed."""
        return page in self.digest_of and self._written[page] <= self._ledger.completed

    def publish(self, page: int, digest: bytes, step: int = 0) -> None:
        """Index a pinned page that is full after `step`. The first page of a digest stays; later ones are private."""
        assert self.pins[page] > 0, f"page {page} published without an owner"
        if digest not in self._page_of and page not in self.digest_of:
            self._page_of[digest] = page
            self.digest_of[page] = digest
            self._written[page] = step
            self.version += 1
            self.watcher.published(page, digest)
            self.journal.published(page, digest)

    def fill(self, digests: Mapping[int, bytes], transfer: int) -> None:
        """Note that transfer `transfer` of BULK_IN fills these pages under LOAD pins; they are shared after its end."""
        assert all([self._kinds[Pin.LOAD][page] for page in digests]), "a page is filled without a pin"
        self._ledger.retire((Clock.BULK_IN, transfer), self._filled, digests)

    def refuse(self, page: int) -> None:
        """Mark a page with wrong contents: it is freed without being shared."""
        self._refused.add(page)

    def _filled(self, digests: Mapping[int, bytes]) -> None:
        for page, digest in digests.items():
            if page not in self._refused:
                self.publish(page, digest)
            self._refused.discard(page)
        self.unpin([*digests], kind=Pin.LOAD)

    def hide(self, pages: Sequence[int]) -> None:
        """Take doubted, pinned pages out of the index. The watcher drops copies of them."""
        for page in pages:
            assert page == NULL_PAGE or self.pins[page] > 0, f"page {page} hidden without an owner"
            if page in self.digest_of:
                self.watcher.hidden(self.digest_of[page])
                self.journal.hidden(self.digest_of[page])
                self._forget(page)

    def _forget(self, page: int) -> None:
        digest = self.digest_of.pop(page)
        del self._page_of[digest]
        self.version += 1
        self.watcher.removed(digest)
        self.journal.removed(digest)

    def forget(self) -> None:
        """Empty the prefix index. Pages in use stay with their owners, who may publish later ones."""
        self.free.extend(self.cached)
        self.cached.clear()
        self._page_of.clear()
        self.digest_of.clear()
        self.version += 1
        self.watcher.forgotten()
        self.journal.forgotten()

    # Numbers.

    def page_map(self) -> bytes:
        """Return the state of every page but the null page, in order: f(ree), c(ached), o(wned) or x for fenced."""
        states = zip(self.pins, self.fences, strict=True)
        letters = bytearray(111 if pins else 120 if fences else 102 for pins, fences in states)
        for page in self.cached:
            letters[page] = 99
        return bytes(letters[1:])

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert the accounting against the page lists of all requests that hold pages (tests, debugging)."""
        expected = [0] * len(self.pins)
        for pages in holders:
            for page in pages:
                expected[page] += 1
        free = frozenset(self.free)
        fenced = sum(pins == 0 < fences for pins, fences in zip(self.pins, self.fences, strict=True))
        assert fenced == self._fenced, f"{self._fenced} pages counted as fenced, {fenced} are"
        kinds = [sum(pins) for pins in zip(*self._kinds, strict=True)]
        for page, held in enumerate(self._kinds[Pin.REQUEST][1:], 1):
            assert held == expected[page], f"page {page}: {held} owners counted, {expected[page]} hold it"
            assert self.pins[page] == kinds[page], f"page {page}: a pin without a kind"
            resting = (page in self.cached) + (page in free)
            assert resting == (self.pins[page] + self.fences[page] == 0), (
                f"page {page} is in {resting} lists, with {self.pins[page]} pins and {self.fences[page]} fences"
            )
