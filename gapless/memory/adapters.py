"""Slots of adapters on the device: which adapter is in which, and which is loaded next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.slots import NO_SLOT, Slots


class AdapterLoad(NamedTuple):
    """An adapter on its way into a slot."""

    number: int
    """The number of the load on its clock"""
    adapter: str
    slot: int


class AdapterSlots(Slots):
    """Rows of one adapter share its slot, which they lease under its digest. A slot is loaded again only when all steps
    of its rows have completed.

    An adapter that no slot holds is wanted as soon as a request asks for it. If every slot is in use then, the adapter
    that was taken least recently takes no more rows, so that others wait no longer than its rows run.
    """

    def __init__(self, count: int, ledger: Ledger) -> None:
        super().__init__(count, ledger)
        self.held: OrderedDict[str, int] = OrderedDict()
        """Adapters that have been loaded, and their slots; the least recently taken first."""
        self.rows: Counter[int] = Counter()
        """Rows of each slot whose last step has not completed."""
        self.requests: Counter[str] = Counter()
        """Requests for each adapter that have not ended."""
        self._fresh: set[str] = set()
        """Adapters that no row has taken since they were loaded."""
        self.wanted: dict[str, None] = {}
        """Adapters without a slot that requests ask for, in order."""
        self.loads = 0
        """Loads that were begun."""
        self._loading: AdapterLoad | None = None
        self._closing = ""
        """The adapter that takes no more rows."""

    @property
    def free(self) -> list[int]:
        """Slots that no row of a step in flight has: unused, idle, or being loaded."""
        idle = [slot for slot in self.held.values() if not self.rows[slot]]
        return [*self.unused, *idle, *([self._loading.slot] if self._loading else [])]

    def available(self, adapter: str) -> int:
        """Return how many rows may take the adapter now. If no slot holds it, it is wanted from now on."""
        if adapter not in self.held and not (self._loading and adapter == self._loading.adapter):
            self.wanted[adapter] = None
        return self.size if adapter in self.held and adapter != self._closing else 0

    def take(self, adapter: str) -> int:
        """Return the adapter's slot, for one more row."""
        self.held.move_to_end(adapter)
        slot = self.held[adapter]
        self.rows[slot] += 1
        self._fresh.discard(adapter)
        return slot

    def retire(self, slot: int, last_step: int) -> None:
        self._ledger.retire((Clock.COMPUTE, last_step), self._left, slot)

    def next_load(self) -> AdapterLoad | None:
        """Return the load to begin now: one at a time, into a free slot or one that no step in flight reads."""
        if self._loading:
            return None
        self.wanted = {adapter: None for adapter in self.wanted if self.requests[adapter]}
        if not self.wanted:
            self._closing = ""
        if not self.wanted or not (self.unused or self._evict()):
            return None
        adapter = next(iter(self.wanted))
        del self.wanted[adapter]
        self.loads += 1
        self._loading = load = AdapterLoad(self.loads, adapter, self.unused.pop())
        self._ledger.retire((Clock.ADAPTERS, load.number), self._loaded, load)
        return load

    def forget(self, adapter: str) -> bool:
        """Give up the adapter's slot. False, and nothing done, while a request, a step or a load may touch it."""
        read = self.rows[self.held.get(adapter, NO_SLOT)]
        if self.requests[adapter] or read or (self._loading and self._loading.adapter == adapter):
            return False
        if adapter in self.held:
            self.unused.append(self.held.pop(adapter))
        self.wanted.pop(adapter, None)
        self._fresh.discard(adapter)
        return True

    def _evict(self) -> bool:
        """Free a slot, or close the adapter whose slot is to be freed next."""
        for adapter, slot in self.held.items():
            # One that was just loaded is for requests that are about to take it.
            if not self.rows[slot] and not (adapter in self._fresh and self.requests[adapter]):
                self.unused.append(self.held.pop(adapter))
                self._closing = ""
                return True
        self._closing = next((adapter for adapter, slot in self.held.items() if self.rows[slot]), "")
        return False

    def _loaded(self, load: AdapterLoad) -> None:
        self.held[load.adapter] = load.slot
        self._fresh.add(load.adapter)
        self._loading = None

    def _left(self, slot: int) -> None:
        self.rows[slot] -= 1
