"""Loads adapters from host memory into their slots on the device, while steps run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gapless.base.bell import Bell
from gapless.base.errors import RequestError
from gapless.base.part import Part
from gapless.base.records import Request
from gapless.device import Device, Fence
from gapless.memory.adapters import AdapterLoad, AdapterSlots
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.rows import RowTable
from gapless.memory.slots import NO_SLOT
from gapless.step.orders import AdapterOrder, Ranks

if TYPE_CHECKING:  # its import brings file readers
    from gapless.model.adapters import AdapterTables


class AdapterContents(NamedTuple):
    """An adapter in host memory."""

    parts: list[Tensor]
    """Ring memory, in the order and shapes of `AdapterTables.slot`"""
    digest: str
    """Identity of its slot and its KV"""
    path: str = ""
    """The directory that it was read from"""


class Adapters(NamedTuple):
    """The adapters of an engine."""

    tables: AdapterTables
    contents: Mapping[str, AdapterContents]
    """Name -> adapter"""


class AdapterLoader(Part):
    """The adapters of an engine. A load runs on its own stream: no step waits for it, and it waits for no step.

    It writes a slot unused by rows in flight, and rows take the slot after the host has seen the load's fence. Adapters
    go by their digests, so that a name may be given to another one at any time. Other ranks keep the same adapters, and
    load them in the order of steps.
    """

    def __init__(
        self, device: Device, adapters: Adapters, rows: RowTable, ledger: Ledger, ranks: Ranks | None = None
    ) -> None:
        self.names: dict[str, str] = {}
        """Name -> digest"""
        self.contents: dict[str, AdapterContents] = {}
        """Digest -> adapter, named or still needed by requests"""
        self.slots = AdapterSlots(adapters.tables.count, ledger)
        self._leases = rows.slots
        self._nameless: set[str] = set()
        self._device = device
        self._tables = adapters.tables
        self._ledger = ledger
        self._ranks = ranks
        self._load: tuple[AdapterLoad, Fence] | None = None
        for name, contents in adapters.contents.items():
            self.put(name, contents)

    def put(self, name: str, contents: AdapterContents) -> None:
        """Serve the adapter to new requests for this name. Running requests keep theirs."""
        self.names[name] = digest = contents.digest
        if digest not in self.contents:
            self.contents[digest] = contents
            self._leases[digest] = self.slots
            self._order(digest, contents.path)
        self._forget()

    def drop(self, name: str) -> None:
        """Serve no new request for this name. The adapter's slot and memory are freed after its requests."""
        del self.names[name]
        self._forget()

    def name_of(self, digest: str) -> str:
        """Return an adapter's name, or its digest if it has none any more."""
        return next((name for name, held in self.names.items() if held == digest), digest)

    def _forget(self) -> None:
        self._nameless = self.contents.keys() - self.names.values()
        for digest in filter(self.slots.forget, [*self._nameless]):
            self._nameless.remove(digest)
            del self.contents[digest], self._leases[digest]
            self._order(digest, "")

    def _order(self, digest: str, path: str, slot: int = NO_SLOT) -> None:
        """Send the other ranks the same change of an adapter."""
        if self._ranks is not None:
            self._ranks.send(AdapterOrder(digest, path, slot))

    def check(self, request: Request) -> Request:
        """Return the request with its adapter's digest in place of the name, which may be given to another adapter."""
        if not request.adapter:
            return request
        if request.adapter not in self.names:
            raise RequestError(f"this engine has no adapter {request.adapter!r}", "model", "model_not_found")
        return request._replace(adapter=self.names[request.adapter])

    def begin(self, request: Request) -> None:
        if request.adapter:
            self.slots.requests[request.adapter] += 1

    def end(self, request: Request) -> None:
        if request.adapter:
            self.slots.requests[request.adapter] -= 1

    def before_plan(self) -> None:
        """Note an ended load, and begin the next one."""
        if self._load is not None and self._load[1].done():
            load, self._load = self._load[0], None
            self._ledger.advance(Clock.ADAPTERS, load.number)
        if self._nameless:
            self._forget()
        found = self.slots.next_load()
        if found is not None:
            self._load = found, self._start(found)

    def wait(self, bell: Bell, seconds: float) -> bool:
        """Wait for the running load, or the bell; return whether there was a load."""
        self.before_plan()  # the last plan may have asked for one
        if self._load is None:
            return False
        self._load[1].wait(bell)
        return True

    def _start(self, load: AdapterLoad) -> Fence:
        stream, (sources, digest, path) = self._device.bulk_in, self.contents[load.adapter]
        assert load.slot != NO_SLOT
        self._order(digest, path, load.slot)
        for target, source in zip(self._tables.slot(load.slot), sources, strict=True):
            stream.upload(target, source)
        return stream.record()
