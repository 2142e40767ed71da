"""The protections between two engines: what is lent stays, what comes was asked for, and names follow weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mutation.sites_of_lower import names_stay, slots_not_held
from mutation.sites_of_pages import load_published_at_once, load_without_pin
from mutation.tools import Site, both, replaced
from simulation.scenario import PAIRS, Scenario
from simulation.wire import WrongShelf

from gapless.tiers.frames import FrameKind, FrameSocket
from gapless.tiers.giving import PeerSession
from gapless.tiers.shelf import Shelf, ShelfPage


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


def pages_without_names() -> AbstractContextManager[None]:
    """Whatever page comes counts as the one that was asked for."""

    def lend(original: Callable[..., ShelfPage | None], self: Any, key: bytes) -> ShelfPage | None:
        page = original(self, key)
        return page and page._replace(key=key)

    return replaced(WrongShelf, "lend", lend)


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
    Site("a page that is lent makes no room", 13, lent_without_count, where=wrong_pairs, first=PAIRS),
    Site(
        "what was lent is back when its connection has ended", 13, kept_by_the_departed, where=wrong_pairs, first=PAIRS
    ),
    Site("a page read in place counts when it was kept", 14, read_without_an_answer, where=wrong_pairs, first=PAIRS),
    Site("a page that comes is the one that was asked for", 24, pages_without_names, where=wrong_pairs, first=PAIRS),
    Site("a slot stays while a peer fills it", 12, slots_not_held(loads=True), where=pairs, first=PAIRS),
    Site("a page from a peer is loaded where no step writes", 5, load_without_pin, where=sound_pairs, first=PAIRS),
    Site("a page from a peer is shared when it has come", 15, load_published_at_once, where=sound_pairs, first=PAIRS),
    Site("peers of other weights have other names", 22, names_stay, where=renewed_pairs, first=PAIRS),
)
