"""The choice of one of several engines for a request: the one that has most of its prompt, unless it is busier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gapless.base.records import PageChange, PageEvent
from gapless.memory.prefix import PrefixHasher

LOAD_WEIGHT = 1.0
"""[share of a prompt] Worth of as many requests above the mean as the mean: with 1, an engine that has all of a prompt
gets it until it has more requests than another one by the mean."""


class Candidate(NamedTuple):
    """An engine that could take a request."""

    number: int
    open: int
    """Number of its requests in flight"""
    matched: float = 0.0
    """Share of the prompt that it has, 0 to 1"""


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """Return the number of the engine with the best score; of equal ones that with the fewest requests, of these the
    next one from number `turn` on."""
    mean = sum(one.open for one in candidates) / len(candidates)
    last = max(one.number for one in candidates) + 1

    def rank(one: Candidate) -> tuple[float, int, int]:
        score = one.matched - LOAD_WEIGHT * (one.open - mean) / max(1.0, mean)
        return round(score, 9), -one.open, -((one.number - turn) % last)

    return max(candidates, key=rank).number


class PageBook:
    """The beginnings of prompts that an engine has, by events of its prefix index, or will have, by its open requests.

    Pages have names of our own: an engine's digests depend on its weights and the contents of its adapters.
    """

    def __init__(self, hasher: PrefixHasher) -> None:
        self._hasher = hasher
        self._names: dict[bytes, bytes] = {}
        """Our name of each page in the engine's index, by the engine's digest"""
        self._kept: Counter[bytes] = Counter()
        self._coming: Counter[bytes] = Counter()

    def take(self, events: Sequence[PageEvent]) -> None:
        """Note changes of the engine's index."""
        for event in events:
            if event.change is PageChange.CLEARED:
                self._names.clear()
                self._kept.clear()
            elif event.group:
                continue  # an engine without the page in its first group cannot use it
            elif event.change is PageChange.REMOVED:
                self._drop(event.digests)
            else:
                root = None if event.parent else self._hasher.root(event.salt, event.adapter)
                parent = self._names.get(event.parent) if event.parent else root
                if parent is not None:
                    self._drop(event.digests)
                    names = self._hasher.after(parent, event.tokens)
                    self._names.update(zip(event.digests, names, strict=True))
                    self._kept.update(names)

    def _drop(self, digests: Sequence[bytes]) -> None:
        for name in [self._names.pop(digest) for digest in digests if digest in self._names]:
            _less(self._kept, name)

    def expect(self, names: Sequence[bytes]) -> None:
        """Note the pages of a request that the engine gets."""
        self._coming.update(names)

    def ended(self, names: Sequence[bytes]) -> None:
        """Note the end of such a request: events name the pages that the engine keeps."""
        for name in names:
            _less(self._coming, name)

    def begins(self, names: Sequence[bytes]) -> int:
        """Return how many of a prompt's first pages the engine has or will have."""
        for number, name in enumerate(names):
            if name not in self._kept and name not in self._coming:
                return number
        return len(names)


def _less(counts: Counter[bytes], name: bytes) -> None:
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
