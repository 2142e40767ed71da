"""The page pool: every page is free, cached, owned or fenced, and the four add up at all times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gapless.memory.ledger import Ledger

NULL_PAGE = 0
"""Inert rows write here. It belongs to nobody and is never handed out."""


class PageCounts(NamedTuple):
    """Pages by state; the null page is not counted."""

    free: int
    cached: int
    """Hold a prefix that a new request may share; owned by nobody."""
    owned: int
    fenced: int
    """Given up by every owner, still reachable by a step in flight."""


class PagePool:
    """Pages of KV memory, with an index of the full, settled ones by digest of their prefix.

    A page may be owned by several requests that share a prefix. An owner gives its pages up with `retire`;
    they come back when the owner's last step has completed.
    """

    def __init__(self, pages: int, page_size: int, ledger: Ledger) -> None:
        assert pages >= 2, "a pool needs the null page and one more"
        self.page_size = page_size
        self.size = pages - 1
        self._ledger = ledger
        self._free = list(range(pages - 1, 0, -1))
        self._cached: dict[int, None] = {}  # least recently used first
        self._owners = [0] * pages
        self._leaving = [0] * pages  # of the owners, how many have retired and wait for their fence
        self._fenced = 0
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def fenced(self) -> int:
        return self._fenced

    def counts(self) -> PageCounts:
        free, cached = len(self._free), len(self._cached)
        return PageCounts(free, cached, self.size - free - cached - self._fenced, self._fenced)

    def take(self) -> int:
        """A page for one new owner; evicts the least recently used cached prefix when none is free."""
        assert self.available(), "no page is free or cached"
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            del self._page_of[self._digest_of.pop(page)]
        self._owners[page] = 1
        return page

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest indexed prefix, in order. Nothing is claimed yet: `share` does that."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def resting(self, pages: Sequence[int]) -> int:
        """How many of these pages are cached and unowned, so that sharing them shrinks `available`."""
        return sum(page in self._cached for page in pages)

    def share(self, page: int) -> None:
        """One more owner for an indexed page."""
        if self._owners[page] == 0:
            del self._cached[page]
        elif self._leaving[page] == self._owners[page]:
            self._fenced -= 1
        self._owners[page] += 1

    def publish(self, page: int, digest: bytes) -> None:
        """Index an owned page that is full and settled. The first page of a digest stays; later ones are private."""
        assert self._owners[page] > 0, f"page {page} published without an owner"
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def hide(self, pages: Sequence[int]) -> None:
        """Take owned pages out of the index: what they hold is in doubt."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} hidden without an owner"
            digest = self._digest_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]

    def retire(self, pages: Sequence[int], last_step: int) -> None:
        """An owner gives up its pages; `last_step` is the last step that can touch them."""
        for page in reversed(pages):  # the tail first, so that the head of a prefix is evicted last
            self._leaving[page] += 1
            self._fenced += self._leaving[page] == self._owners[page]
            self._ledger.retire(last_step, self._drop, page)

    def _drop(self, page: int) -> None:
        assert self._leaving[page] > 0, f"page {page} dropped twice"
        self._fenced -= self._leaving[page] == self._owners[page]
        self._owners[page] -= 1
        self._leaving[page] -= 1
        if self._owners[page] == 0:
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._free.append(page)
        elif self._leaving[page] == self._owners[page]:
            self._fenced += 1

    def page_map(self) -> bytes:
        """The state of every page but the null page, in order: f(ree), c(ached), o(wned) or x for fenced."""
        letters = bytearray(
            102 if not owners else 120 if owners == leaving else 111
            for owners, leaving in zip(self._owners, self._leaving, strict=True)
        )
        for page in self._cached:
            letters[page] = 99
        return bytes(letters[1:])

    def forget(self) -> None:
        """Empty the prefix index. Pages in use stay with their owners, who may still publish later ones."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._digest_of.clear()

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert the accounting against the page lists of all requests that hold pages (tests, debugging)."""
        expected = [0] * len(self._owners)
        for pages in holders:
            for page in pages:
                expected[page] += 1
        fenced = sum(0 < leaving == owners for leaving, owners in zip(self._leaving, self._owners, strict=True))
        assert fenced == self._fenced, f"{self._fenced} pages counted as fenced, {fenced} are"
        for page in range(1, len(self._owners)):
            held = self._owners[page] - self._leaving[page]
            assert held == expected[page], f"page {page}: {held} owners counted, {expected[page]} hold it"
            resting = (page in self._cached) + (page in self._free)
            assert resting == (self._owners[page] == 0), (
                f"page {page} is in {resting} lists, owners {self._owners[page]}"
            )
