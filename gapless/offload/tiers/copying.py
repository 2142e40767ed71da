"""Copies of many pages at once, by threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from gapless.base.host import usable_cores

T = TypeVar("T")
MOST_COPIES = 8
"""Threads of a tier that copy, at most, and half of the processors"""


class CopyThreads:
    """Threads that copy pages, several at once: one reaches a fraction of what the memory allows."""

    def __init__(self) -> None:
        self._count = max(2, min(MOST_COPIES, usable_cores() // 2))
        self._threads = ThreadPoolExecutor(self._count, "gapless-copy")

    def each(self, copy: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Return what `copy` does with each, when all have ended; raises what the first that failed raises."""
        pages = [*zip(*arguments, strict=True)]
        share = -(-len(pages) // self._count) or 1
        shares = [pages[first : first + share] for first in range(0, len(pages), share)]
        begun = [self._threads.submit(lambda some: [copy(*one) for one in some], some) for some in shares]
        wait(begun)
        return [result for one in begun for result in one.result()]

    def close(self) -> None:
        self._threads.shutdown()
