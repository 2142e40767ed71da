"""The adversary of SimDevice decides which stream moves now, by a seed, a mood and a bound on unfairness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from gapless.device.seam import STREAMS

MOODS = ("lazy", "eager", "random", "starve", "bursts", "single")
MOST_PASSES = 64
"""Host touches that can pass over a ready stream; then it moves. So polling a fence always ends."""

_ALL = 1 << 30


class Movable(Protocol):
    """A stream that the adversary may move."""

    passed_over: int
    """Host touches that passed it over while it was ready"""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Movable)


class Adversary:
    """Changes its mood every few touches, unless one is given. "manual" never moves on its own and has no patience.

    lazy: nothing moves until forced. eager: all moves at once. random: a few operations of any stream.
    starve: as random, but one stream stands still. bursts: nothing, then everything. single: one stream runs far ahead.
    """

    def __init__(self, rng: random.Random, mood: str | None = None) -> None:
        assert mood is None or mood == "manual" or mood in MOODS, f"no mood is called {mood}"
        self._random = rng
        self._fixed = mood
        self._mood = mood or "lazy"
        self._left = 0
        self._favourite = ""

    def moves(self, ready: Callable[[], list[M]]) -> Iterator[M]:
        """Yield the streams to move at this touch, one operation each; `ready` is asked again after every one."""
        if self._mood == "manual":
            return
        self._change_mood()
        budget = self._budget()
        while budget > 0 and (streams := self._liked(ready())):
            yield self._random.choice(streams)
            budget -= 1
        for stream in ready():
            stream.passed_over += 1
            if stream.passed_over > MOST_PASSES:
                yield stream

    def forced(self, ready: list[M], needed: M) -> M:
        """Return one stream to move while the host waits; `needed` is the one that it cannot do without."""
        liked = self._liked(ready)
        if self._mood == "lazy" or not liked:
            return needed
        return self._random.choice(liked)

    def _change_mood(self) -> None:
        self._left -= 1
        if self._left >= 0:
            return
        self._left = self._random.randrange(4, 48)
        self._favourite = self._random.choice(STREAMS)
        self._mood = self._fixed or self._random.choice(MOODS)

    def _budget(self) -> int:
        if self._mood in ("random", "starve"):
            return self._random.choice((0, 0, 1, 1, 2, 5))
        if self._mood == "bursts":
            return _ALL if self._random.random() < 0.1 else 0
        return 0 if self._mood == "lazy" else _ALL

    def _liked(self, ready: list[M]) -> list[M]:
        if self._mood == "starve":
            return [stream for stream in ready if stream.name != self._favourite]
        if self._mood == "single":
            return [stream for stream in ready if stream.name == self._favourite]
        return ready
