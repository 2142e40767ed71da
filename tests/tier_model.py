"""Run random overlapping jobs on a tier, and compare it with a model of what it may have, must have, and may write.

`PYTHONPATH=.:tests python -m tier_model --seeds 1000 [KIND ...]` runs more scripts than the tests do.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tier_kinds import KINDS, NUMBERS, OpenTier, TierServers
from tier_rig import SLOTS, checksum, content, has, key, page, slot_of

from gapless.offload.tiers.seam import JobEnd, Namespace

END_SECONDS = 60.0
"""How long the jobs of a sound tier may take to end"""
QUIET_SECONDS = 0.02
"""How long slots are watched after a tier was closed"""
STRANGE_JOB = 10**6
MOST_JOBS = 5


def quiet() -> None:
    """Wait for what a tier may still do after it was closed."""
    time.sleep(QUIET_SECONDS)


@dataclass(eq=False)
class ModelJob:
    """A job that the tier has begun and not ended."""

    loads: bool
    slots: dict[int, int]
    """The slot of each page, in the order of the job"""
    allowed: dict[int, set[int]]
    """The versions that a page may have: the one to store, or those that the tier may have had since the load began"""
    sure: bool
    """Whether a load finds all of its pages, as long as none is dropped"""
    doubted: set[int] = field(default_factory=set)
    """Pages that were dropped since it began"""
    cancelled: bool = False


class TierModel:
    """Has a tier do several jobs at once, and asserts at each step what the interface promises.

    A page's bytes follow from its number and its version; each drop begins another version, so that a tier which gives
    what was dropped is found out. A drop while the page is stored leaves open which came first.
    """

    def __init__(self, opened: OpenTier, seed: int) -> None:
        self.jobs: dict[int, ModelJob] = {}
        self.loaded = self.cancelled = 0
        """Pages, and jobs under way that were cancelled"""
        self.most = 0
        """Jobs that were under way at once"""
        self._opened, self._setup = opened, opened.setup
        self._rng = random.Random(seed)
        self._number = 0
        self._latest = dict.fromkeys(NUMBERS, 0)
        self._may: dict[int, set[int]] = {number: set() for number in NUMBERS}
        self._must: set[int] = set()
        self._still: dict[int, bytes] = {slot: self._bytes(slot) for slot in range(SLOTS)}
        """What is in the slots that no load may write"""

    @property
    def tier(self) -> Any:
        return self._opened.tier

    def run(self, steps: int) -> None:
        """Play this many steps, let all jobs end, and close the tier while others are under way."""
        moves = (self._store, self._load, self._load, self._poll, self._cancel, self._drop, self._touch, self._look)
        for _ in range(steps):
            self._rng.choice(moves)()
            self._look_at_slots()
            self.most = max(self.most, len(self.jobs))
        self._drain()
        if self._opened.kind.keeps:
            self._find_all()
        for _ in range(MOST_JOBS):
            self._rng.choice((self._store, self._load))()
        self._close()

    # What is asked of the tier.

    def _store(self) -> None:
        slots = self._chosen()
        for number, slot in slots.items():
            slot_of(self._setup, slot)[:] = content(number, self._latest[number])
            self._still[slot] = self._bytes(slot)
            self._may[number].add(self._latest[number])
            for job in self.jobs.values():
                if job.loads and number in job.allowed:
                    job.allowed[number].add(self._latest[number])
        if slots:
            self._begin(ModelJob(False, slots, {number: {self._latest[number]} for number in slots}, True))

    def _load(self) -> None:
        slots = self._chosen()
        for slot in slots.values():
            del self._still[slot]
        if slots:
            sure = self._opened.kind.keeps and self._opened.kind.steady and self._must.issuperset(slots)
            self._begin(ModelJob(True, slots, {number: {*self._may[number]} for number in slots}, sure))

    def _begin(self, job: ModelJob) -> None:
        self._number += 1
        self.jobs[self._number] = job
        pages = [page(self._setup, number, slot) for number, slot in job.slots.items()]
        if job.loads:
            self.tier.load(self._number, pages)
        else:
            sums = [checksum(slot_of(self._setup, slot)) for slot in job.slots.values()]
            stored = [one._replace(checksum=sum_) for one, sum_ in zip(pages, sums, strict=True)]
            self.tier.store(self._number, stored)

    def _chosen(self) -> dict[int, int]:
        """Return some pages, and a slot that no job has for each; none where there is no room."""
        numbers = self._rng.sample(NUMBERS, self._rng.randrange(1, 5))
        taken = {slot for job in self.jobs.values() for slot in job.slots.values()}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        if len(free) < len(numbers) or len(self.jobs) >= MOST_JOBS:
            return {}
        return dict(zip(numbers, self._rng.sample(free, len(numbers)), strict=True))

    def _cancel(self) -> None:
        """Cancel a job that is under way, or one that has ended, or none."""
        job = self._rng.choice([*self.jobs, *self.jobs, self._rng.randrange(self._number + 1), STRANGE_JOB])
        if job in self.jobs:
            self.jobs[job].cancelled = True
            self.cancelled += 1
        self.tier.cancel(job)

    def _drop(self) -> None:
        numbers = self._rng.sample(NUMBERS, 2)
        self.tier.drop([key(number) for number in numbers])
        self._must.difference_update(numbers)
        for job in self.jobs.values():
            job.doubted.update(numbers)
        storing = {number for job in self.jobs.values() if not job.loads for number in job.slots}
        for number in numbers:
            self._latest[number] += 1
            if number not in storing:
                self._may[number] = set()

    def _touch(self) -> None:
        self.tier.touch([key(number) for number in self._rng.sample(NUMBERS, 3)])

    def _look(self) -> None:
        found = {number for number, hit in zip(NUMBERS, has(self.tier, *NUMBERS), strict=True) if hit}
        gone = {number for number in found if not self._may[number]}
        assert not gone, f"pages {gone} are found, which were dropped or never stored"
        if self._opened.kind.keeps and self._opened.kind.steady:
            assert self._must <= found, f"pages {self._must - found} were stored, and are not found"

    # What comes of it.

    def _poll(self) -> None:
        for end in self.tier.poll():
            self._ended(end)

    def _ended(self, end: JobEnd) -> None:
        assert end.job in self.jobs, f"job {end.job} has ended twice, or never begun"
        job = self.jobs.pop(end.job)
        done = [*job.slots][: len(end.checksums)]
        assert len(end.checksums) <= len(job.slots), "more pages than the job has"
        assert not (end.failed and len(done) == len(job.slots)), "a job has failed of which every page was moved"
        assert end.failed or job.cancelled or len(done) == len(job.slots), (
            "pages are left out, and the job says nothing"
        )
        for number, sum_ in zip(done, end.checksums, strict=True):
            data = self._bytes(job.slots[number])
            assert sum_ == checksum(data), f"page {number} has another checksum"
            assert data in [content(number, version) for version in job.allowed[number]], f"page {number} is another"
        if job.loads:
            self.loaded += len(done)
            assert not (job.sure and end.failed) or job.doubted.intersection(job.slots), (
                "pages that were stored are lost"
            )
            for slot in job.slots.values():
                self._still[slot] = self._bytes(slot)
        else:
            self._must.update(number for number in done if number not in job.doubted)

    def _look_at_slots(self) -> None:
        changed = {slot for slot, data in self._still.items() if data != self._bytes(slot)}
        assert not changed, f"slots {changed} were written, which no load has"

    def _drain(self) -> None:
        until = time.monotonic() + END_SECONDS
        while self.jobs:
            self._poll()
            self._look_at_slots()
            assert time.monotonic() < until, f"jobs {[*self.jobs]} do not end"
            time.sleep(0)
        assert not self.tier.poll(), "a job has ended that was not begun"

    def _find_all(self) -> None:
        """Assert that all stored pages are found and loaded, once a lost connection is back."""
        numbers, until = sorted(self._must), time.monotonic() + END_SECONDS
        while not all(has(self.tier, *numbers)):
            assert time.monotonic() < until, "what was stored is not found"
            time.sleep(0.01)
        before = self.loaded
        if numbers:
            self._load_of(numbers)
            self._drain()
        assert self.loaded == before + len(numbers), "what was stored is lost"

    def _load_of(self, numbers: Sequence[int]) -> None:
        slots = dict(zip(numbers, range(SLOTS), strict=False))
        for slot in slots.values():
            del self._still[slot]
        self._begin(ModelJob(True, slots, {number: {*self._may[number]} for number in numbers}, True))

    def _close(self) -> None:
        """Closing ends every job that is under way, and from then on no slot changes."""
        tier = self.tier
        self._opened.close()
        closed = [self._bytes(slot) for slot in range(SLOTS)]
        self._look_at_slots()
        for end in tier.poll():
            self._ended(end)
        assert not self.jobs, f"jobs {[*self.jobs]} have not ended with the tier"
        quiet()
        assert closed == [self._bytes(slot) for slot in range(SLOTS)], "a slot was written after the tier was closed"

    def _bytes(self, slot: int) -> bytes:
        return bytes(slot_of(self._setup, slot))


def play(name: str, servers: TierServers, folder: str, seeds: int, steps: int) -> int:
    """Play scripts on tiers of this kind; return how many have failed."""
    failed = loaded = 0
    for seed in range(seeds):
        opened = OpenTier(name, servers, Path(tempfile.mkdtemp(dir=folder)), Namespace.of({"test": f"{name} {seed}"}))
        model = TierModel(opened, seed)
        try:
            model.run(steps)
        except AssertionError as error:
            failed += 1
            print(f"{name}, seed {seed}: {error}")
        loaded += model.loaded
        opened.stop()
    print(f"{name}: {seeds} scripts, {loaded} pages loaded")
    return failed


def main() -> int:
    """Play many scripts on tiers of some kinds; return how many have failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    known = ", ".join(KINDS)
    parser.add_argument("kinds", nargs="*", help=f"{known}; without one, all that need no other software")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    args, failed = parser.parse_args(), 0
    with tempfile.TemporaryDirectory() as folder:
        servers = TierServers(lambda name: Path(tempfile.mkdtemp(prefix=name, dir=folder)))
        try:
            for name in args.kinds or [name for name, kind in KINDS.items() if not (kind.server or kind.needs)]:
                try:
                    failed += play(name, servers, folder, args.seeds, args.steps)
                except pytest.skip.Exception as reason:
                    print(f"{name}: not played: {reason}")
        finally:
            servers.close()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
