"""The protections of adapters: whose slot may be written and read when, and which bytes a name stands for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mutation.tools import Site, replaced
from simulation.scenario import CHANGES, Scenario

from gapless.memory.adapters import AdapterLoad, AdapterSlots
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Clock
from gapless.memory.slots import NO_SLOT
from gapless.step.adapters import AdapterContents, AdapterLoader


def loaded_over_its_readers() -> AbstractContextManager[None]:
    """A slot is loaded again as soon as its rows have left."""
    return replaced(AdapterSlots, "retire", lambda retire, self, slot, last_step: retire(self, slot, 0))


def taken_while_it_loads() -> AbstractContextManager[None]:
    """An adapter is taken for loaded when its load has begun."""

    def poll(original: Any, self: AdapterLoader) -> None:
        original(self)
        if self._load is not None:
            load, self._load = self._load[0], None
            self._ledger.advance(Clock.ADAPTERS, load.number)

    return replaced(AdapterLoader, "poll", poll)


def loads_meet() -> AbstractContextManager[None]:
    """The slot that is being loaded stays among the free."""

    def next_load(original: Any, self: AdapterSlots) -> AdapterLoad | None:
        load: AdapterLoad | None = original(self)
        if load is not None:
            self.unused.append(load.slot)
        return load

    return replaced(AdapterSlots, "next_load", next_load)


def one_prefix_for_all() -> AbstractContextManager[None]:
    """KV is found by tokens and salt, whatever adapter it was made with."""
    return replaced(PrefixIndex, "chain", lambda chain, self, tokens, salt, adapter="": chain(self, tokens, salt))


def identity_by_name() -> AbstractContextManager[None]:
    """An adapter is who its name says, and not what its files hold."""

    def put(original: Any, self: AdapterLoader, name: str, contents: AdapterContents) -> None:
        original(self, name, contents._replace(digest=name))

    return replaced(AdapterLoader, "put", put)


def forgotten_at_once() -> AbstractContextManager[None]:
    """An adapter that has lost its name is dropped, although requests still need it."""

    def forget(original: Any, self: AdapterSlots, adapter: str) -> bool:
        self.requests[adapter] = self.rows[self.held.get(adapter, NO_SLOT)] = 0
        return bool(original(self, adapter))

    return replaced(AdapterSlots, "forget", forget)


def adapted(scenario: Scenario) -> bool:
    return scenario.adapters > 0


def changes(scenario: Scenario) -> bool:
    return adapted(scenario) and any(fault.kind in CHANGES for fault in scenario.faults)


SITES = (
    Site("a slot is loaded when no step reads it", 11, loaded_over_its_readers, where=adapted),
    Site("an adapter is taken when its load has ended", 1, taken_while_it_loads, where=adapted),
    Site("a slot is loaded with one adapter at a time", 12, loads_meet, where=adapted),
    Site("KV of an adapter is found by that adapter alone", 25, one_prefix_for_all, where=adapted),
    Site("a name's other files are another adapter", 25, identity_by_name, where=changes),
    Site("an adapter without a name stays for its requests", 11, forgotten_at_once, where=changes),
)
