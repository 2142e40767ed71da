"""A tier below the host tier whose answers and ends come as late as a seed says, and which fails now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from gapless.base.records import KVTransfer
from gapless.offload.tiers.seam import JobEnd, TierAnswer, TierPage

Kept = dict[bytes, tuple[bytes, int]]
"""Bytes and checksum of each page, by key"""


DELAYS = (0, 0, 0, 0, 1, 1, 2, 5, 20)
"""Looks of the loop before an order is due"""


class Order(NamedTuple):
    """Something that the loop has asked for; what comes of it is decided when it is due."""

    number: int
    kind: str
    pages: Sequence[TierPage]
    named: frozenset[bytes] = frozenset()
    """Keys that open answers have named"""


class LateLine:
    """Takes the orders of a loop. It reads and writes slots at the last moment, and in any order."""

    name, exchange = "late", None

    def __init__(self, kept: Kept, seed: int, delays: Sequence[int] = DELAYS, fails: float = 0.1) -> None:
        """`kept` outlives engines. Each of `delays` is as likely; `fails` is how often a job does."""
        self._delays, self._fails = delays, fails
        self.kept = kept
        self.new: set[bytes] = set()
        """Keys that were stored since somebody looked"""
        self.orders: list[tuple[Order, int]] = []
        """Each with the number of looks before it is due"""
        self._rng = random.Random(seed)

    def ask(self, number: int, keys: Sequence[bytes], seconds: float, transfer: KVTransfer) -> None:
        self._add(Order(number, "ask", [TierPage(key, memoryview(b"")) for key in keys]))

    def load(self, job: int, pages: Sequence[TierPage], seconds: float) -> None:
        self._add(Order(job, "load", pages))

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        self._add(Order(job, "store", pages))

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def _add(self, order: Order) -> None:
        self.orders.append((order, self._rng.choice(self._delays)))

    def room(self) -> tuple[int, int]:
        return len(self.kept), 0

    @property
    def has_news(self) -> bool:
        return any(due == 0 for _, due in self.orders)

    def take(self) -> list[TierAnswer | JobEnd]:
        due = [order for order, looks in self.orders if not looks]
        self.orders = [(order, looks - 1) for order, looks in self.orders if looks]
        self._rng.shuffle(due)
        return [self._end(order) for order in due]

    def _end(self, order: Order) -> TierAnswer | JobEnd:
        if order.kind == "ask":
            return self._answer(order, [page.key for page in order.pages])
        fails = self._rng.random() < self._fails
        good = self._rng.randrange(len(order.pages)) if fails else len(order.pages)
        return self._load(order, good) if order.kind == "load" else self._store(order, good)

    def _answer(self, order: Order, keys: Sequence[bytes]) -> TierAnswer:
        """All of it, or now and then a part: the rest comes later."""
        new = [key for key in keys if key in self.kept and key not in order.named]
        if not new or self._rng.random() < 0.7:
            return TierAnswer(order.number, tuple(key in self.kept for key in keys))
        some = {*self._rng.sample(new, self._rng.randint(1, len(new)))}
        self._add(order._replace(named=order.named | some))
        return TierAnswer(order.number, tuple(key in some for key in keys), True)

    def _store(self, order: Order, good: int) -> JobEnd:
        for page in order.pages[:good]:
            if page.key not in self.kept:
                self.kept[page.key] = bytes(page.slot), page.checksum
                self.new.add(page.key)
        return JobEnd(order.number, tuple(page.checksum for page in order.pages[:good]), good < len(order.pages))

    def _load(self, order: Order, good: int) -> JobEnd:
        sums: list[int] = []
        for page in order.pages[:good]:
            if page.key not in self.kept:
                break
            page.slot[:], checksum = self.kept[page.key]
            sums.append(checksum)
        for page in order.pages[len(sums) :]:
            page.slot[:] = b"\xa5" * len(page.slot)  # what comes of a load that fails
        return JobEnd(order.number, tuple(sums), len(sums) < len(order.pages))

    def rot(self) -> set[bytes]:
        """A bit of every page is another, which the host tier's flip cannot make up for; returns their keys."""
        for key, (data, checksum) in self.kept.items():
            self.kept[key] = bytes([data[0] ^ 64]) + data[1:], checksum
        return set(self.kept)
