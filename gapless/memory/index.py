"""The prefix index: which pages a new request may share, over all page groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gapless.base.records import Int32s
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.prefix import PrefixChain, PrefixHasher

RECENT = 8
"""Prompts that are remembered, so that equal ones share their digests."""

Tables = Sequence[list[int]]
"""The pages that a sequence holds, a list a group, by entry; the null page where there is none."""


class PrefixIndex:
    """Finds and publishes full pages by their digests. A digest's page may be in the pools of some groups only."""

    def __init__(self, hasher: PrefixHasher, pools: Sequence[PagePool]) -> None:
        self.hasher = hasher
        self._pools = pools
        self._full = [pool for pool in pools if not pool.group.window]
        self._windows = [pool for pool in pools if pool.group.window]
        self._recent: deque[tuple[Int32s, PrefixChain]] = deque(maxlen=RECENT)

    @property
    def version(self) -> int:
        """Changes with what may be found."""
        return sum([pool.version for pool in self._pools])

    def chain(self, tokens: Int32s, salt: str) -> PrefixChain:
        """The chain of a prompt: one for equal prompts, with a common beginning for like ones. Computes no digest."""
        size, best, common = self.hasher.page_size, None, 0
        for known, chain in self._recent:
            if chain.salt == salt and np.array_equal(known[:size], tokens[:size]):
                same = common_tokens(known, tokens)
                if same == len(known) == len(tokens):
                    return chain
                if same // size > common:
                    best, common = chain, same // size
        chain = PrefixChain(self.hasher, salt, len(tokens) // size)
        if best:
            chain.begins_like(best, common)
        self._recent.append((tokens, chain))
        return chain

    def next_is_missing(self, chain: PrefixChain, count: int) -> bool:
        """Whether a match of `count` pages, with one more digest known, is the longest still."""
        return not self._windows and any(pool.find(chain.digests[count]) is None for pool in self._full)

    def match(self, chain: PrefixChain, tokens: Int32s, most: int) -> int:
        """Full pages, `most` at most, from which on a request may go on in every group. Digests as few as needed."""
        count = most
        for pool in self._full:
            count = self._run(pool, chain, tokens, count)
        before = -1
        while count != before:
            before = count
            for pool in self._windows:
                count = self._covered(pool, chain, tokens, count)
        return count

    def _run(self, pool: PagePool, chain: PrefixChain, tokens: Int32s, most: int) -> int:
        """Pages in front that the pool has, without a gap."""
        for number in range(most):
            if number == len(chain.digests):
                chain.reach(number + 1, tokens)
            if pool.find(chain.digests[number]) is None:
                return number
        return most

    def _covered(self, pool: PagePool, chain: PrefixChain, tokens: Int32s, most: int) -> int:
        """The most pages of which the pool has all that the next token reads."""
        chain.reach(most, tokens)
        found, best = 0, 0
        for number in range(most):
            found = found + 1 if pool.find(chain.digests[number]) is not None else 0
            if found >= number + 1 - first_entry(pool, (number + 1) * pool.page_size):
                best = number + 1
        return best

    def shared(self, chain: PrefixChain, count: int) -> list[list[int]]:
        """The pages of a match, a list a group; nothing is claimed yet."""
        found = []
        for pool in self._pools:
            first = first_entry(pool, count * pool.page_size)
            pages = [pool.find(digest) for digest in chain.digests[first:count]]
            found.append([NULL_PAGE] * first + [page for page in pages if page is not None])
        return found

    def publish(self, digests: list[bytes], held: Tables, first: int, end: int, step: int) -> None:
        """Pages first..end of a sequence are full once `step` has run; `digests` are those of all its pages."""
        for pool, pages in zip(self._pools, held, strict=True):
            for number in range(first, end):
                if pages[number] != NULL_PAGE:
                    pool.publish(pages[number], digests[number], step)


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
