"""The protections between two engines: what is lent stays, what comes was asked for, and names follow weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from mutation.sites_of_lower import names_stay, slots_not_held
from mutation.sites_of_pages import load_published_at_once, load_without_pin
from mutation.tools import Site, both, replaced
from simulation.scenario import PAIRS, Scenario
from simulation.wire import WrongShelf

from gapless.base.shared import PeerMemory
from gapless.offload.below import LowerTiers
from gapless.offload.host import HostTier
from gapless.offload.search import Search
from gapless.offload.tiers.frames import FrameKind, FrameSocket
from gapless.offload.tiers.giving import PeerSession
from gapless.offload.tiers.seam import JobEnd, TierRelease
from gapless.offload.tiers.shelf import Shelf, ShelfPage

NEVER = 10**30
"""A time that does not come, ns"""


def lent_without_count() -> AbstractContextManager[None]:
    """A page that is lent may make room for another one."""
    lend = replaced(Shelf, "lend", lambda _, self, key: self.pages.get(key))
    return both(lend, replaced(Shelf, "give_back", lambda *_: None))


def kept_by_the_departed() -> AbstractContextManager[None]:
    """What was lent stays so when the reader's connection has ended."""

    def end(original: Callable[..., None], self: PeerSession) -> None:
        self.lent.clear()
        original(self)

    return replaced(PeerSession, "end", end)


def read_without_an_answer() -> AbstractContextManager[None]:
    """What was read in place counts without the giver's word that it was the same page until then."""

    def receive(original: Callable[..., Any], self: FrameSocket, *kinds: FrameKind, **options: Any) -> Any:
        return (kinds[0], b"") if kinds == (FrameKind.RETURNED,) else original(self, *kinds, **options)

    def send(original: Callable[..., None], self: FrameSocket, kind: FrameKind, *parts: Any, **options: Any) -> None:
        if kind is not FrameKind.RETURN:
            original(self, kind, *parts, **options)

    return both(replaced(FrameSocket, "receive", receive), replaced(FrameSocket, "send", send))


def given_without_pin() -> AbstractContextManager[None]:
    """A page that peers may take holds its slot only while it is put on the shelf."""

    def store(original: Callable[..., None], self: LowerTiers, place: int) -> None:
        before = set(self.given)
        original(self, place)
        for number in self.given.keys() - before:
            for copy in self.given[number].values():
                copy.unpin()

    def released(original: Callable[..., None], self: LowerTiers, news: TierRelease) -> None:
        self.given[news.job][news.place].pin()
        original(self, news)

    return both(replaced(LowerTiers, "store", store), replaced(LowerTiers, "released", released))


def returned_at_once() -> AbstractContextManager[None]:
    """What is lent goes back before it is read."""

    def ended(original: Callable[..., None], self: LowerTiers, place: int, end: JobEnd) -> None:
        if end.memory is not None and (exchange := self.tiers[place].exchange) is not None:
            exchange.give_back(end.job)
        original(self, place, end)

    return replaced(LowerTiers, "ended", ended)


def kept_by_those_that_ended() -> AbstractContextManager[None]:
    """What a request was lent stays so when it has ended."""
    return replaced(Search, "end", lambda *_: None)


def lent_for_ever() -> AbstractContextManager[None]:
    """The giver waits for what it has lent, however long."""
    return patch.object(PeerSession, "late", False)


def kept_for_ever() -> AbstractContextManager[None]:
    """A page is kept for peers until another needs its room."""
    return patch("gapless.offload.tiers.shelf.UNASKED_SECONDS", float("inf"))


def borrowed_for_ever() -> AbstractContextManager[None]:
    """The taker gives back what it has read, and has no time for the rest."""

    def poll(original: Callable[..., bool], self: LowerTiers) -> bool:
        with late_never(self):
            return original(self)

    return replaced(LowerTiers, "poll", poll)


def loaded_though_late() -> AbstractContextManager[None]:
    """A load begins of what should be back by now."""

    def next_load(original: Callable[..., Any], self: HostTier, *args: Any) -> Any:
        with late_never(self.below):
            return original(self, *args)

    return replaced(HostTier, "next_load", next_load)


@contextmanager
def late_never(below: LowerTiers) -> Iterator[None]:
    """What is lent has no end meanwhile."""
    ends = {lease: lease.late_at for lease in below.leases.values()}
    for lease in ends:
        lease.late_at = NEVER
    yield
    for lease, end in ends.items():
        lease.late_at = end


def unmapped_while_borrowed() -> AbstractContextManager[None]:
    """Memory of a peer goes with its connection, though a load may read there."""
    return patch.object(PeerMemory, "leases", property(lambda memory: 0, lambda memory, count: None), create=True)


def pages_without_names() -> AbstractContextManager[None]:
    """Whatever page comes counts as the one that was asked for."""

    lent: dict[ShelfPage, ShelfPage] = {}

    def lend(original: Callable[..., ShelfPage | None], self: Any, key: bytes) -> ShelfPage | None:
        if (page := original(self, key)) is None:
            return None
        lent[named := replace(page, key=key)] = page
        return named

    def give_back(original: Callable[..., None], self: Shelf, pages: Sequence[ShelfPage]) -> None:
        original(self, [lent.pop(page) for page in pages])

    return both(replaced(WrongShelf, "lend", lend), replaced(Shelf, "give_back", give_back))


def pairs(scenario: Scenario) -> bool:
    return scenario.pair is not None


def sound_pairs(scenario: Scenario) -> bool:
    """A copy that is refused is a fault of the engine's."""
    faults = *scenario.faults, *scenario.given_faults
    return scenario.pair == 0 and not any(fault.kind in ("flip", "raise") for fault in faults)


def wrong_pairs(scenario: Scenario) -> bool:
    return bool(scenario.pair)


def renewed_pairs(scenario: Scenario) -> bool:
    return any(fault.kind == "renew" for fault in (*scenario.faults, *scenario.given_faults))


SITES = (
    Site("a page that is lent makes no room", 13, lent_without_count, where=sound_pairs, first=PAIRS),
    Site(
        "what was lent is back when its connection has ended", 13, kept_by_the_departed, where=wrong_pairs, first=PAIRS
    ),
    Site("a page read in place counts when it was kept", 14, read_without_an_answer, where=wrong_pairs, first=PAIRS),
    Site("a page that comes is the one that was asked for", 24, pages_without_names, where=wrong_pairs, first=PAIRS),
    Site("a page that peers may take keeps its slot", 13, given_without_pin, where=sound_pairs, first=PAIRS),
    Site("what is lent goes back when it was read", 13, returned_at_once, where=sound_pairs, first=PAIRS),
    Site("what a request was lent goes back when it ends", 13, kept_by_those_that_ended, where=pairs, first=PAIRS),
    Site("what is lent has an end", 14, lent_for_ever, where=wrong_pairs, first=PAIRS),
    Site("what no peer asks for is kept for a time", 13, kept_for_ever, where=pairs, first=PAIRS),
    Site("what is borrowed goes back in time", 14, borrowed_for_ever, where=pairs, first=PAIRS),
    Site("no load begins of what should be back", 14, loaded_though_late, where=pairs, first=PAIRS),
    Site(
        "memory of a peer stays while pages are borrowed", 14, unmapped_while_borrowed, where=wrong_pairs, first=PAIRS
    ),
    Site("a slot stays while a peer fills it", 12, slots_not_held(loads=True), where=pairs, first=PAIRS),
    Site("a page from a peer is loaded where no step writes", 5, load_without_pin, where=sound_pairs, first=PAIRS),
    Site("a page from a peer is shared when it has come", 15, load_published_at_once, where=sound_pairs, first=PAIRS),
    Site("peers of other weights have other names", 22, names_stay, where=renewed_pairs, first=PAIRS),
)
