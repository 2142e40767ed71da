"""Slots of adapters on the device: their contents, and the next load."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.slots import NO_SLOT, Slots


class AdapterLoad(NamedTuple):
    """A running load of an adapter into a slot."""

    number: int
    """Number of the load on its clock"""
    adapter: str
    slot: int


class AdapterSlots(Slots):
    """Slots shared by the rows of one adapter, leased under its digest. A slot is reloaded only after all steps of its
    rows.

    An adapter without a slot is wanted as soon as a request needs it. If every slot is in use, the least recently taken
    adapter gets no more rows, so that others wait no longer than its rows run.
    """

    def __init__(self, count: int, ledger: Ledger) -> None:
        super().__init__(count, ledger)
        self.held: OrderedDict[str, int] = OrderedDict()
        """Loaded adapters and their slots, the least recently taken first."""
        self.rows: Counter[int] = Counter()
        """Rows of each slot with incomplete steps."""
        self.requests: Counter[str] = Counter()
        """Unfinished requests for each adapter."""
        self._fresh: set[str] = set()
        """Loaded adapters that no row has taken yet."""
        self.wanted: dict[str, None] = {}
        """Adapters that requests need and no slot holds, in order."""
        self.loads = 0
        """Number of loads begun."""
        self._loading: AdapterLoad | None = None
        self._closing = ""
        """Adapter that gets no more rows."""

    @property
    def free(self) -> list[int]:
        """Slots without rows in flight: unused, idle, or being loaded."""
        idle = [slot for slot in self.held.values() if not self.rows[slot]]
        return [*self.unused, *idle, *([self._loading.slot] if self._loading else [])]

    def available(self, adapter: str) -> int:
        """Return how many rows may take the adapter now. An adapter without a slot becomes wanted."""
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
        """Return the load to begin now: one at a time, into a slot that no step in flight reads."""
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
        """Free the adapter's slot; False, with nothing done, while a request, a step or a load may touch it."""
        read = self.rows[self.held.get(adapter, NO_SLOT)]
        if self.requests[adapter] or read or (self._loading and self._loading.adapter == adapter):
            return False
        if adapter in self.held:
            self.unused.append(self.held.pop(adapter))
        self.wanted.pop(adapter, None)
        self._fresh.discard(adapter)
        return True

    def _evict(self) -> bool:
        """Free a slot, or close the adapter with the next slot to free."""
        for adapter, slot in self.held.items():
            # A fresh adapter is reserved for the requests that wait for it.
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
