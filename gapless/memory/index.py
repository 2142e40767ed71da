"""The prefix index: which pages a new request may share, over all page groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gapless.base.records import Int32s
from gapless.memory.events import PageEvents
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.prefix import PrefixChain, PrefixHasher

RECENT = 8
"""Prompts that are remembered, so that equal ones share their digests."""

Gaps = dict[PagePool, list[bytes]]
"""Digests of pages that a match lacks, by pool."""

Also = Callable[[PagePool, bytes], bool]
"""Says whether a page that the pool lacks is to be had all the same."""

Tables = Sequence[list[int]]
"""The pages that a sequence holds, a list a group, by entry; the null page where there is none."""


class PrefixIndex:
    """Finds and publishes full pages by their digests. A digest's page may be in the pools of some groups only."""

    def __init__(self, hasher: PrefixHasher, pools: Sequence[PagePool]) -> None:
        self.hasher = hasher
        self.events: PageEvents | None = None
        """Collects what other programs may know, where some want to."""
        self._pools = pools
        self._full = [pool for pool in pools if not pool.group.window]
        self._windows = [pool for pool in pools if pool.group.window]
        self._recent: deque[tuple[Int32s, PrefixChain]] = deque(maxlen=RECENT)

    @property
    def version(self) -> int:
        """Changes with what may be found."""
        return sum([pool.version for pool in self._pools])

    def chain(self, tokens: Int32s, salt: str, adapter: str = "") -> PrefixChain:
        """The chain of a prompt: one for equal prompts, with a common beginning for like ones. Computes no digest."""
        size, best, common = self.hasher.page_size, None, 0
        for known, chain in self._recent:
            if (chain.salt, chain.adapter) == (salt, adapter) and np.array_equal(known[:size], tokens[:size]):
                same = common_tokens(known, tokens)
                if same == len(known) == len(tokens):
                    return chain
                if same // size > common:
                    best, common = chain, same // size
        chain = PrefixChain(self.hasher, salt, len(tokens) // size, adapter)
        if best:
            chain.begins_like(best, common)
        self._recent.append((tokens, chain))
        return chain

    def rename(self, model: str) -> None:
        """Begin again, empty, with another name of the model: no page of the old one is found, wherever a copy is.

        No sequence may hold a chain.
        """
        self.hasher = PrefixHasher(model, self.hasher.page_size)
        self._recent.clear()
        self.forget()

    def forget(self) -> None:
        """Begin again, empty, on the device and in the host tier: no page is found that was published before. Tiers
        below and peers keep theirs."""
        for pool in self._pools:
            pool.forget()

    def match(self, chain: PrefixChain, tokens: Int32s, most: int, also: Also | None = None) -> tuple[int, Gaps]:
        """Full pages, `most` at most, from which on a request may go on in every group, and the gaps that end them.

        While the pools lack all of the gaps, no longer match exists. Digests are computed as far as needed. Pages that
        are to be had by `also` count as found.
        """
        count, gaps = most, Gaps()
        for pool in self._full:
            count = self._up_to_gap(pool, chain, tokens, count, gaps, also)
        before = -1
        while count != before:
            before = count
            for pool in self._windows:
                count = self._up_to_gap(pool, chain, tokens, count, gaps, also)
        return count, gaps

    def _up_to_gap(
        self, pool: PagePool, chain: PrefixChain, tokens: Int32s, count: int, gaps: Gaps, also: Also | None
    ) -> int:
        """Pages in front of the first that the pool lacks, of those that a token after `count` pages reads.

        A token after fewer pages reads that one too, unless it is before it: windows only move forward.
        """
        for number in range(first_entry(pool, count * pool.page_size), count):
            if number >= len(chain.digests):
                chain.reach(number + 1, tokens)
            digest = chain.digests[number]
            if pool.find(digest) is None and not (also is not None and also(pool, digest)):
                gaps.setdefault(pool, []).append(digest)
                return number
        return count

    def missing(self, chain: PrefixChain, count: int) -> list[tuple[PagePool, bytes]]:
        """The pages that the pools lack of a match of `count` pages, those in front first."""
        return [
            (pool, digest)
            for pool in self._pools
            for digest in chain.digests[first_entry(pool, count * pool.page_size) : count]
            if pool.find(digest) is None
        ]

    def shared(self, chain: PrefixChain, count: int) -> list[list[int]]:
        """The pages of a match, a list a group; nothing is claimed yet."""
        found = []
        for pool in self._pools:
            first = first_entry(pool, count * pool.page_size)
            pages = [pool.find(digest) for digest in chain.digests[first:count]]
            found.append([NULL_PAGE] * first + [page for page in pages if page is not None])
        return found

    def publish(self, chain: PrefixChain, tokens: Int32s, held: Tables, first: int, end: int, step: int) -> None:
        """Pages first..end of a sequence with these tokens are full once `step` has run."""
        digests = chain.reach(end, tokens)
        for pool, pages in zip(self._pools, held, strict=True):
            for number in range(first, end):
                if pages[number] != NULL_PAGE:
                    pool.publish(pages[number], digests[number], step)
        self.describe(chain, tokens, first, end)

    def describe(self, chain: PrefixChain, tokens: Int32s, first: int, end: int) -> None:
        """A sequence with these tokens holds its pages first..end, wherever they came from."""
        if self.events is not None:
            for group in self.events.groups:
                group.describe(chain, tokens, first, end)


def first_entry(pool: PagePool, position: int) -> int:
    """The first page that a token at `position`, or after it, may read."""
    window = pool.group.window
    return max(0, position - window) // pool.page_size if window else 0


def common_tokens(one: Int32s, other: Int32s) -> int:
    """Leading tokens that are the same."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
