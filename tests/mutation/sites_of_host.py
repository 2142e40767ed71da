"""The protections of the host tier: when a page may be stored, a copy read or given away, and a loaded page shared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mutation.sites_of_pages import load_without_pin, store_without_pin
from mutation.tools import Site, replaced
from simulation.scenario import Scenario

from gapless.memory.pages import PageListener, PagePool
from gapless.offload.copies import GroupCopies, PageCopy
from gapless.offload.host import HostTier
from gapless.offload.transfers import MOST_AT_REST, TransferWay


def stored_before_observed() -> AbstractContextManager[None]:
    """A page is stored as soon as it is published, while the step that fills it may not have begun."""
    return replaced(PagePool, "settled", lambda _, self, page: page in self.digest_of)


def ended_when_begun() -> AbstractContextManager[None]:
    """A transfer counts as ended without a look at its fence."""

    def ended(_: Any, self: TransferWay) -> Any:
        if not self.underway:
            return None
        batch = self.underway.popleft().batch
        return batch, [copy.checksum or 0 for _, _, copy in batch.moves]

    return replaced(TransferWay, "ended", ended)


def evicted_under_a_transfer(stores: bool) -> Callable[[], AbstractContextManager[None]]:
    """A slot is given to another page while a load reads it, or a store fills it."""

    def take(original: Callable[..., PageCopy | None], self: GroupCopies, digest: bytes) -> PageCopy | None:
        held = [copy for copy in self.copies.values() if copy.pins and (copy.checksum is None) == stores]
        if not self.free and held:
            del self.copies[held[0].digest]
            self.free.append(held[0].slot)
        return original(self, digest)

    return lambda: replaced(GroupCopies, "take", take)


def shared_unchecked() -> AbstractContextManager[None]:
    """What arrives is not compared with what was stored."""

    def loaded(original: Callable[..., None], self: HostTier, batch: Any, _: Any) -> None:
        original(self, batch, [copy.checksum for _, _, copy in batch.moves])

    return replaced(HostTier, "loaded", loaded)


def doubtful_copies_stay() -> AbstractContextManager[None]:
    """A copy of a page that is in doubt stays where it is found."""

    def hide(original: Callable[..., None], self: PagePool, pages: Any) -> None:
        watcher, self.watcher = self.watcher, PageListener()
        original(self, pages)
        self.watcher = watcher

    return replaced(PagePool, "hide", hide)


def shared_though_lost() -> AbstractContextManager[None]:
    """It does not matter that a copy came in doubt while it was loaded."""

    def loaded(original: Callable[..., None], self: HostTier, batch: Any, checksums: Any) -> None:
        lost = [copy for _, _, copy in batch.moves if copy.gone]
        for copy in lost:
            copy.gone = False
        with replaced(PageCopy, "unpin", unpin):
            original(self, batch, checksums)

    def unpin(original: Callable[..., None], self: PageCopy) -> None:
        self.gone = self.group.copies.get(self.digest) is not self
        original(self)

    return replaced(HostTier, "loaded", loaded)


def one_transfer_after_the_other(attribute: str) -> Callable[[], AbstractContextManager[None]]:
    """All transfers of a direction have one slot of a ring, though two may be under way."""

    def init(original: Callable[..., None], self: TransferWay, *args: Any) -> None:
        original(self, *args)
        setattr(self, attribute, [getattr(self, attribute)[0]] * MOST_AT_REST)

    return lambda: replaced(TransferWay, "__init__", init)


def hosts(scenario: Scenario) -> bool:
    return scenario.host > 0


def flips(scenario: Scenario) -> bool:
    return hosts(scenario) and any(fault.kind == "flip" for fault in scenario.faults)


def spoils(scenario: Scenario) -> bool:
    return hosts(scenario) and any(fault.kind == "spoil" for fault in scenario.faults)


def nothing_in_doubt(scenario: Scenario) -> bool:
    """A copy that is refused is a fault of the engine's."""
    return hosts(scenario) and not any(fault.kind in ("flip", "raise", "spoil") for fault in scenario.faults)


SITES = (
    Site("the host tier stores what was observed", 1, stored_before_observed, where=hosts),
    Site("the host tier's transfers end at their fences", 6, ended_when_begun, where=hosts),
    Site("a page of the host tier's store is not given away", 3, store_without_pin, where=nothing_in_doubt),
    Site("a page is loaded where no step reads or writes", 4, load_without_pin, where=hosts),
    Site("a copy stays while a load reads it", 9, evicted_under_a_transfer(False), where=nothing_in_doubt),
    Site("a copy stays while a store fills it", 9, evicted_under_a_transfer(True), where=nothing_in_doubt),
    Site("what is loaded is compared with what was stored", 24, shared_unchecked, where=flips),
    Site("a copy in doubt is dropped", 10, doubtful_copies_stay, where=spoils),
    Site("a page is not shared whose copy was lost under its load", 10, shared_though_lost, where=hosts),
    Site("places of a load stay until it has ended", 18, one_transfer_after_the_other("places"), where=hosts),
    Site("checksums of a load stay until they are read", 20, one_transfer_after_the_other("arrived"), where=hosts),
)
