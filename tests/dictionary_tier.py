"""A tier in a dictionary, as a plug-in would write one; the late one ends jobs, answers and fails as a seed says."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gapless.offload.tiers.seam import Found, JobEnd, TierPage, TierSetup


class DictionaryTier:
    """Keeps pages in memory."""

    def __init__(self, setup: TierSetup) -> None:
        self.kept: dict[bytes, tuple[bytes, int]] = {}
        self.ended: list[JobEnd] = []
        self.closed = False

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        return [Found.HIT if key in self.kept else Found.MISS for key in keys]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        for page in pages:
            self.kept.setdefault(page.key, (bytes(page.slot), page.checksum))
        self.ended.append(JobEnd(job, tuple(page.checksum for page in pages)))

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        done: list[int] = []
        for page in pages:
            if page.key not in self.kept:
                break
            page.slot[:], checksum = self.kept[page.key]
            done.append(checksum)
        self.ended.append(JobEnd(job, tuple(done), len(done) < len(pages)))

    def poll(self) -> list[JobEnd]:
        ended, self.ended = self.ended, []
        return ended

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def cancel(self, job: int) -> None: ...

    def close(self) -> None:
        self.closed = True


class LateTier(DictionaryTier):
    """The same, some calls later; now and then a job stops early, and a key is pending."""

    def __init__(self, setup: TierSetup, seed: int = 0) -> None:
        super().__init__(setup)
        self._rng = random.Random(seed)
        self._later: list[tuple[int, bool, Sequence[TierPage]]] = []

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        return [Found.PENDING if self._rng.random() < 0.3 else found for found in super().lookup(keys)]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        self._later.append((job, False, pages))

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        self._later.append((job, True, pages))

    def cancel(self, job: int) -> None:
        self._later = [(one, loads, pages if one != job else ()) for one, loads, pages in self._later]

    def poll(self) -> list[JobEnd]:
        for one in [*self._later]:
            if self._rng.random() < 0.5:
                self._later.remove(one)
                self._end(*one)
        return super().poll()

    def close(self) -> None:
        self.ended += [JobEnd(job, (), failed=True) for job, _, _ in self._later]
        self._later = []
        super().close()

    def _end(self, job: int, loads: bool, pages: Sequence[TierPage]) -> None:
        fails = self._rng.random() < 0.2
        some = pages[: self._rng.randrange(len(pages) + 1)] if fails else pages
        (super().load if loads else super().store)(job, some)
        if len(some) < len(pages):
            self.ended[-1] = self.ended[-1]._replace(failed=True)
