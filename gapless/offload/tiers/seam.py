"""The interface of tiers below the host tier: disks, servers, plug-ins. No torch, no device, no stream.

A tier moves bytes between slots of the host tier, which have one address for life, and wherever it keeps them. It is
called from one thread that is not the loop's (`tiers.worker`), so it may block there as long as it has deadlines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from hashlib import blake2b, sha256
from typing import Any, NamedTuple, Protocol

from gapless.base.shared import PeerMemory, SharedMemory

GROUP_BYTES = 4
"""Bytes of a key after the page's digest: the number of its page group"""
SEAL_BYTES = 8


class Found(Enum):
    """A tier's answer about a key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    """The key is asked for again; after a deadline of the caller's this is a MISS."""


class TierPage(NamedTuple):
    """A page of a job: its key, the host's slot, and the checksum that travels with it."""

    key: bytes
    slot: memoryview = memoryview(b"")
    """None of a page that is borrowed"""
    checksum: int = 0
    """The checksum of a page to store; a load returns it."""


class JobEnd(NamedTuple):
    """The end of a job. Every job ends exactly once."""

    job: int
    checksums: tuple[int, ...]
    """Checksums of the pages that were moved: the first ones, in the order of the job"""
    failed: bool = False
    """Whether the page after these could not be moved. A load that was cancelled has not failed."""
    nbytes: int = 0
    seconds: float = 0.0
    """Duration without the wait for earlier jobs; the worker measures it."""
    memory: PeerMemory | None = None
    """Memory of borrowed pages, until they are given back"""
    places: tuple[int, ...] = ()
    """Their places there"""


class TierRelease(NamedTuple):
    """A page that a job has stored where it is: its slot is free to go."""

    job: int
    place: int
    """Which of the job's pages it is, from 0"""


class TierAnswer(NamedTuple):
    """A tier's pages among the keys of one question, as far as its time allowed."""

    number: int
    hits: tuple[bool, ...]
    open: bool = False
    """Whether another answer comes: these are the hits that none has named before. The last one names all of them."""
    lends: bool = False
    """Whether the pages can be borrowed: the device reads them where they are"""


class Namespace(NamedTuple):
    """All that makes the bytes of pages incompatible, in words, ranks included. Hosts and processes are not in it."""

    text: str
    """JSON, with its keys in order"""

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Namespace:
        return cls(json.dumps(facts, sort_keys=True))

    @property
    def digest(self) -> bytes:
        return sha256(self.text.encode()).digest()


class TierSetup(NamedTuple):
    """Arguments for opening a tier."""

    target: str
    """The user's text for it: a path, an address"""
    nbytes: int
    """How much it may keep; 0: that is its own business."""
    namespace: Namespace
    memory: tuple[memoryview, ...]
    """The host tier's slots, one buffer of bytes for each page group: a tier may register them."""
    slot_bytes: tuple[int, ...]
    """Bytes of one slot, by page group: multiples of 4096"""
    shared: SharedMemory | None = None
    """The file of all of `memory`, if other processes may map it"""


class KVTier(Protocol):
    """A tier. All calls come from one thread; none but `close` may take longer than its deadlines.

    A tier that counts its bytes has a property `room`: bytes of kept pages, and the most that it may keep.
    """

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        """Return what there is, in the order of the keys."""
        ...

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        """Begin to keep these pages, in this order. The slots stay as they are until the job has ended.

        Pages that it has already count as stored.
        """
        ...

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        """Begin to fill these slots. They belong to the job until it has ended."""
        ...

    def poll(self) -> list[JobEnd]:
        """Return the jobs that have ended since the last call."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these pages are in use: they are given up last."""
        ...

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these pages: their content is in doubt."""
        ...

    def cancel(self, job: int) -> None:
        """Ask a job to end soon, whatever it has moved by then. `poll` returns its end."""
        ...

    def close(self) -> None:
        """End all jobs, and leave the slots alone for good."""
        ...


TierFactory = Callable[[TierSetup], KVTier]
"""Opens a tier. Raises ConfigError for what the user can mend."""


def key_of(group: int, digest: bytes) -> bytes:
    """Return the key of a page. Its digest stands for model, tenant, adapter and tokens."""
    return digest + group.to_bytes(GROUP_BYTES, "little")


def group_in(key: bytes) -> int:
    """Return the number of the page group in a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "little")


def seal(namespace: bytes, *parts: bytes) -> bytes:
    """Return a digest that binds a page's key to its checksum, so that no other page's record passes for it."""
    return blake2b(b"".join(parts), digest_size=SEAL_BYTES, key=namespace).digest()


class PeerExchange(Protocol):
    """Orders to a tier whose pages come from peers, or go to them."""

    gives: bool
    """Whether peers may take pages here"""

    def begin(self, name: str) -> None:
        """Announce a request whose pages will follow."""

    def end(self, name: str, whole: bool) -> None:
        """End a request's pages; if it is whole, after the stores that wait now."""

    def borrow(self, job: int, keys: Sequence[bytes], seconds: float) -> None:
        """Have a peer lend these pages until `give_back`."""

    def give_back(self, job: int) -> None:
        """Return the pages of a job: nothing reads them any more."""
