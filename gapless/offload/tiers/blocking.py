"""The base of tiers whose calls move the pages themselves: a job has ended when `store` or `load` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gapless.offload.tiers.seam import JobEnd, TierPage


class BlockingTier:
    """Keeps the ends of jobs until they are polled. No job is under way between two calls."""

    def __init__(self) -> None:
        self._ended: list[JobEnd] = []

    def poll(self) -> list[JobEnd]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job: int) -> None:
        """Do nothing: every job has ended."""

    def _end(self, job: int, pages: Sequence[TierPage], done: Sequence[int], nbytes: int | None = None) -> None:
        """End a job over `pages`; `done` are the checksums of the moved ones, the first. `nbytes` None: all their
        bytes were moved."""
        if nbytes is None:
            nbytes = sum(len(page.slot) for page in pages[: len(done)])
        self._ended.append(JobEnd(job, tuple(done), len(done) < len(pages), nbytes))

    def _in_parts(
        self, job: int, pages: Sequence[TierPage], most: int, move: Callable[[Sequence[TierPage]], list[int]]
    ) -> None:
        """Move pages, `most` at a time, up to the first that cannot be moved, and end the job."""
        done: list[int] = []
        for first in range(0, len(pages), most):
            done += move(pages[first : first + most])
            if len(done) < min(first + most, len(pages)):
                break
        self._end(job, pages, done)


def leading(moved: Iterable[int | None]) -> Iterator[int]:
    """Yield the checksums of pages in front of the first None, which stands for one that could not be moved."""
    for checksum in moved:
        if checksum is None:
            return
        yield checksum
