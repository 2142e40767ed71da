"""The protections of tiers below the host tier: whose slots jobs hold, what of them counts, and what is in doubt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mutation.tools import Site, both, replaced
from simulation.scenario import Scenario

from gapless.memory.index import PrefixIndex
from gapless.offload.below import LowerTiers
from gapless.offload.copies import GroupCopies


def names_stay() -> AbstractContextManager[None]:
    """Other weights empty the index, and the names of pages stay as they were."""

    def rename(original: Callable[..., None], self: PrefixIndex, model: str) -> None:
        hasher = self.hasher
        original(self, model)
        self.hasher = hasher

    return replaced(PrefixIndex, "rename", rename)


def slots_not_held(loads: bool) -> Callable[[], AbstractContextManager[None]]:
    """Jobs of this kind hold their slots only while they are sent."""

    def begin(original: Callable[..., None], self: LowerTiers, *args: Any) -> None:
        before = set(self.jobs)
        original(self, *args)
        for number in self.jobs.keys() - before:
            for copy in self.jobs[number].copies:
                copy.unpin()

    def ended(original: Callable[..., None], self: LowerTiers, place: int, end: Any) -> None:
        job = self.jobs[end.job]
        for copy in job.copies if job.loads == loads else ():
            copy.pin()
        original(self, place, end)

    return lambda: both(replaced(LowerTiers, "load" if loads else "store", begin), replaced(LowerTiers, "ended", ended))


def found_before_it_came() -> AbstractContextManager[None]:
    """A copy can be loaded from the moment at which a tier below begins to fill it."""

    def load(original: Callable[..., None], self: LowerTiers, search: Any, place: int, copies: list[Any]) -> None:
        kept: Any = self.tiers[place].line
        original(self, search, place, copies)
        for copy in copies:
            copy.checksum = kept.kept[copy.key][1] if copy.key in kept.kept else None

    return replaced(LowerTiers, "load", load)


def all_pages_came() -> AbstractContextManager[None]:
    """The pages of a load that stopped early count as loaded."""

    def loaded(original: Callable[..., None], self: LowerTiers, place: int, job: Any, end: Any) -> None:
        lacking = len(job.copies) - len(end.checksums)
        original(self, place, job, end._replace(checksums=(*end.checksums, *[0] * lacking), failed=False))

    return replaced(LowerTiers, "loaded", loaded)


def room_made_of_its_own() -> AbstractContextManager[None]:
    """What the host has of a request may make room for what it lacks."""

    def load_lacking(original: Callable[..., None], self: LowerTiers, search: Any, missing: Any) -> None:
        pinned = [copy for group, digest in missing if (copy := group.find(digest)) is not None]

        def take(original: Callable[..., Any], self: Any, digest: bytes) -> Any:
            for copy in pinned:
                copy.pins -= 1
            new = original(self, digest)
            for copy in pinned:
                copy.pins += 1
            return new

        with replaced(GroupCopies, "take", take):
            original(self, search, missing)

    return replaced(LowerTiers, "load_lacking", load_lacking)


def doubtful_pages_stay_below() -> AbstractContextManager[None]:
    """A page that is in doubt stays in the tiers below."""
    return replaced(LowerTiers, "drop", lambda original, self, key: None)


def stored_in_doubt() -> AbstractContextManager[None]:
    """A page that comes in doubt while a tier below stores it stays there."""

    def stored(original: Callable[..., None], self: LowerTiers, place: int, job: Any, end: Any) -> None:
        job.doubted.clear()
        original(self, place, job, end)

    return replaced(LowerTiers, "stored", stored)


def lowers(scenario: Scenario) -> bool:
    return scenario.lower


def renews(scenario: Scenario) -> bool:
    return scenario.lower and any(fault.kind == "renew" for fault in scenario.faults)


def spoils_below(scenario: Scenario) -> bool:
    return scenario.lower and any(fault.kind == "spoil" for fault in scenario.faults)


SITES = (
    Site("a slot stays while a tier below reads it", 9, slots_not_held(loads=False), where=lowers),
    Site("a slot stays while a tier below fills it", 9, slots_not_held(loads=True), where=lowers),
    Site("a copy is found when it has come from below", 8, found_before_it_came, where=lowers),
    Site("of a load that stops early the pages that came count", 24, all_pages_came, where=lowers),
    Site("what the host has of a request makes no room for the rest", 9, room_made_of_its_own, where=lowers),
    Site("pages of other weights have other names", 10, names_stay, where=renews),
    Site("a page in doubt is dropped below", 10, doubtful_pages_stay_below, where=spoils_below),
    Site("a page that was stored while it came in doubt is dropped below", 10, stored_in_doubt, where=spoils_below),
)
