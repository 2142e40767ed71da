"""Slots, pages and tiers for the tests of tiers: what a page holds follows from its key and its version."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from waiting import until

from gapless.offload.tiers.seam import Found, JobEnd, Namespace, TierPage, TierSetup, key_of

SLOT = 4096
SLOTS = 16
NAMESPACE = Namespace.of({"model": "checksum", "page_size": 4})


class Hand:
    """A clock that is set."""

    now = 100.0

    def __call__(self):
        return self.now


def setup_of(target: str, pages: int = 64, namespace: Namespace = NAMESPACE) -> TierSetup:
    """A tier of this many pages over slots that begin with a page of memory."""
    raw = np.zeros((SLOTS + 1) * SLOT, np.uint8)
    start = -raw.ctypes.data % SLOT
    memory = raw[start : start + SLOTS * SLOT].data
    return TierSetup(target, pages * SLOT, namespace, (memory,), (SLOT,))


def slot_of(setup: TierSetup, slot: int) -> memoryview:
    return setup.memory[0][slot * SLOT : (slot + 1) * SLOT]


def key(number: int) -> bytes:
    return key_of(0, sha256(b"page %d" % number).digest())


def content(number: int, version: int = 0) -> bytes:
    return (b"%d.%d " % (number, version)).ljust(64, b"x") * (SLOT // 64)


def checksum(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.int64).sum(dtype=np.int64))


def page(setup: TierSetup, number: int, slot: int, version: int | None = None) -> TierPage:
    """A page in a slot, which holds its content where it has a version."""
    memory = slot_of(setup, slot)
    if version is not None:
        memory[:] = content(number, version)
    return TierPage(key(number), memory, checksum(memory) if version is not None else 0)


def end_of(tier, job: int) -> JobEnd:
    """The end of the only job of a tier."""
    (end,) = until(tier.poll)
    assert end.job == job
    return end


def stored(tier, setup: TierSetup, *numbers: int, version: int = 0, job: int = 1) -> JobEnd:
    """Store these pages from the first slots."""
    tier.store(job, [page(setup, number, slot, version) for slot, number in enumerate(numbers)])
    return end_of(tier, job)


def loaded(tier, setup: TierSetup, *numbers: int, job: int = 2) -> tuple[JobEnd, list[bytes]]:
    """Load these pages; the end of the job, and what is in the slots of the good ones."""
    tier.load(job, [page(setup, number, slot) for slot, number in enumerate(numbers)])
    end = end_of(tier, job)
    return end, [bytes(slot_of(setup, slot)) for slot in range(len(end.checksums))]


def has(tier, *numbers: int) -> list[bool]:
    found = [Found.PENDING] * len(numbers)
    while places := [place for place, one in enumerate(found) if one is Found.PENDING]:
        for place, one in zip(places, tier.lookup([key(numbers[place]) for place in places]), strict=True):
            found[place] = one
    return [one is Found.HIT for one in found]
