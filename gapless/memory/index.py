"""The prefix index: the pages that a new request may share, over all page groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s
from gapless.memory.events import PageEvents
from gapless.memory.groups import live
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.prefix import PrefixChain, PrefixHasher

RECENT = 8
"""Prompts kept, so that equal ones share their digests."""

Gaps = dict[PagePool, list[bytes]]
"""Digests of the pages missing in a match, by pool."""


class Match(NamedTuple):
    """The leading pages that a request may skip."""

    pages: int
    """Full pages that every group has"""
    gaps: Gaps
    """Pages missing at their end: while the pools lack all of them, no longer match exists."""


NO_MATCH = Match(0, {})

Also = Callable[[PagePool, bytes], bool]
"""Tells whether a page missing in the pool is available elsewhere."""

PageLists = Sequence[list[int]]
"""Pages of a sequence, a list a group, by entry; the null page for a missing one."""


class PrefixIndex:
    """Full pages by their digests. A digest's page may be in the pools of some groups only."""

    def __init__(self, hasher: PrefixHasher, pools: Sequence[PagePool]) -> None:
        self.hasher = hasher
        self.events: PageEvents | None = None
        """Events for other programs, if any want them."""
        self._pools = pools
        self._full = [pool for pool in pools if not pool.rule.window]
        self._windows = [pool for pool in pools if pool.rule.window]
        self._recent: deque[tuple[Int32s, PrefixChain]] = deque(maxlen=RECENT)

    @property
    def version(self) -> int:
        """Changes with the contents of the index."""
        return sum([pool.version for pool in self._pools])

    def chain(self, tokens: Int32s, salt: str, adapter: str = "") -> PrefixChain:
        """Return the chain of a prompt: shared by equal prompts, with a common beginning for similar ones. Computes no
        digest."""
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
        """Empty the index and rename the model: no page of the old name is found, on any tier.

        No sequence may hold a chain.
        """
        self.hasher = PrefixHasher(model, self.hasher.page_size)
        self._recent.clear()
        self.forget()

    def forget(self) -> None:
        """Empty the index on the device and in the host tier: no page published before is found. Tiers below and peers
        keep theirs."""
        for pool in self._pools:
            pool.forget()

    def match(self, chain: PrefixChain, tokens: Int32s, most: int, also: Also | None = None) -> Match:
        """Return up to `most` pages that a request may skip in every group.

        Digests are computed as far as needed. Pages available by `also` count as found.
        """
        count, gaps = most, Gaps()
        for pool in self._full:
            count = self._up_to_gap(pool, chain, tokens, count, gaps, also)
        before = -1
        while count != before:
            before = count
            for pool in self._windows:
                count = self._up_to_gap(pool, chain, tokens, count, gaps, also)
        return Match(count, gaps)

    def _up_to_gap(
        self, pool: PagePool, chain: PrefixChain, tokens: Int32s, count: int, gaps: Gaps, also: Also | None
    ) -> int:
        """Return the pages before the first one missing in the pool, among the pages that a token after `count` pages
        reads.

        A token after fewer pages reads that one too: pages only pass.
        """
        for number in live(pool.rule, count, pool.page_size):
            if number >= len(chain.digests):
                chain.reach(number + 1, tokens)
            digest = chain.digests[number]
            if pool.find(digest) is None and not (also is not None and also(pool, digest)):
                gaps.setdefault(pool, []).append(digest)
                return number
        return count

    def missing(self, chain: PrefixChain, count: int) -> list[tuple[PagePool, bytes]]:
        """Return the pages missing for a match of `count` pages, in order."""
        return [
            (pool, digest)
            for pool in self._pools
            for number in live(pool.rule, count, pool.page_size)
            if pool.find(digest := chain.digests[number]) is None
        ]

    def shared(self, chain: PrefixChain, count: int) -> list[list[int]]:
        """Return the pages of a match, a list a group; nothing is claimed yet."""
        found = []
        for pool in self._pools:
            passed = pool.rule.passed(count * pool.page_size, pool.page_size)
            found.append([
                NULL_PAGE if number in passed else pool.find(digest) or NULL_PAGE
                for number, digest in enumerate(chain.digests[:count])
            ])  # fmt: skip
        return found

    def publish(self, chain: PrefixChain, tokens: Int32s, held: PageLists, first: int, end: int, step: int) -> None:
        """Publish pages first..end of a sequence with these tokens, full once `step` has run."""
        digests = chain.reach(end, tokens)
        for pool, pages in zip(self._pools, held, strict=True):
            for number in range(first, end):
                if pages[number] != NULL_PAGE:
                    pool.publish(pages[number], digests[number], step)
        self.describe(chain, tokens, first, end)

    def describe(self, chain: PrefixChain, tokens: Int32s, first: int, end: int) -> None:
        """Describe pages first..end of a sequence for events, of any origin."""
        if self.events is not None:
            for group in self.events.groups:
                group.describe(chain, tokens, first, end)


def common_tokens(one: Int32s, other: Int32s) -> int:
    """Return the number of equal leading tokens."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
