"""Slots of adapters on the device: which adapter is in which, and which is loaded next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.slots import NO_SLOT


class AdapterLoad(NamedTuple):
    """An adapter on its way into a slot."""

    number: int
    """The number of the load on its clock"""
    adapter: str
    slot: int


class AdapterSlots:
    """Rows of one adapter share its slot. A slot is loaded again only when all steps of its rows have completed.

    An adapter that no slot holds is wanted as soon as a request asks for it. If every slot is in use then, the adapter
    that was taken least recently takes no more rows, so that others wait no longer than its rows run.
    """

    def __init__(self, count: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.free = list(range(count, NO_SLOT, -1))
        self.size = count
        self.held: OrderedDict[str, int] = OrderedDict()
        """Adapters that have been loaded, and their slots; the least recently taken first."""
        self.rows: Counter[str] = Counter()
        """Rows of each adapter whose last step has not completed."""
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

    def asked(self, adapter: str) -> bool:
        """Return whether a row may take the adapter now. If no slot holds it, it is wanted from now on."""
        if adapter not in self.held and not (self._loading and adapter == self._loading.adapter):
            self.wanted[adapter] = None
        return adapter in self.held and adapter != self._closing

    def take(self, adapter: str) -> int:
        """Return the adapter's slot, for one more row."""
        self.held.move_to_end(adapter)
        self.rows[adapter] += 1
        self._fresh.discard(adapter)
        return self.held[adapter]

    def retire(self, adapter: str, last_step: int) -> None:
        """The row leaves; `last_step` is the last step that reads the slot for it."""
        self._ledger.retire(((Clock.COMPUTE, last_step),), self._left, adapter)

    def next_load(self) -> AdapterLoad | None:
        """Return the load to begin now: one at a time, into a free slot or one that no step in flight reads."""
        if self._loading:
            return None
        self.wanted = {adapter: None for adapter in self.wanted if self.requests[adapter]}
        if not self.wanted:
            self._closing = ""
        if not self.wanted or not (self.free or self._evict()):
            return None
        adapter = next(iter(self.wanted))
        del self.wanted[adapter]
        self.loads += 1
        self._loading = load = AdapterLoad(self.loads, adapter, self.free.pop())
        self._ledger.retire(((Clock.ADAPTERS, load.number),), self._loaded, load)
        return load

    def forget(self, adapter: str) -> bool:
        """Give up the adapter's slot. False, and nothing done, while a request, a step or a load may touch it."""
        if self.requests[adapter] or self.rows[adapter] or (self._loading and self._loading.adapter == adapter):
            return False
        if adapter in self.held:
            self.free.append(self.held.pop(adapter))
        self.wanted.pop(adapter, None)
        self._fresh.discard(adapter)
        return True

    def reusable(self) -> list[int]:
        """Return the slots that no step in flight may read: free, idle, or being loaded."""
        idle = [slot for adapter, slot in self.held.items() if not self.rows[adapter]]
        return [*self.free, *idle, *([self._loading.slot] if self._loading else [])]

    def _evict(self) -> bool:
        """Free a slot, or close the adapter whose slot is to be freed next."""
        for adapter in self.held:
            # One that was just loaded is for requests that are about to take it.
            if not self.rows[adapter] and not (adapter in self._fresh and self.requests[adapter]):
                self.free.append(self.held.pop(adapter))
                self._closing = ""
                return True
        self._closing = next((adapter for adapter in self.held if self.rows[adapter]), "")
        return False

    def _loaded(self, load: AdapterLoad) -> None:
        self.held[load.adapter] = load.slot
        self._fresh.add(load.adapter)
        self._loading = None

    def _left(self, adapter: str) -> None:
        self.rows[adapter] -= 1


class AdapterLease:
    """What rows of one adapter lease; stands in `RowTable.slots` under the adapter's own name."""

    def __init__(self, slots: AdapterSlots, adapter: str) -> None:
        self._slots = slots
        self._adapter = adapter
        self.size = slots.size

    @property
    def free(self) -> list[int]:
        return self._slots.reusable()

    def available(self) -> int:
        return self.size if self._slots.asked(self._adapter) else 0

    def take(self) -> int:
        return self._slots.take(self._adapter)

    def retire(self, slot: int, last_step: int) -> None:
        self._slots.retire(self._adapter, last_step)


def lease_name(adapter: str) -> str:
    """Return the name of what rows of this adapter lease."""
    return f"adapter {adapter}"
