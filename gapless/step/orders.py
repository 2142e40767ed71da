"""Orders: what an engine's leader does to its device, for the ranks that follow it.

All executors of an engine obey the same orders in the same order, so their tables, rings and graphs stay alike. On the
wire an order is a header, a key if its follower has not seen it, and the words that travel. A key book on both sides
numbers the keys, so that a key is sent once, and a step's key is the same object each time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from gapless.base.records import MoveOrder
from gapless.base.shared import SharedMemory
from gapless.model.seam import BatchShape
from gapless.step.keys import ForwardKey, Load, LoadKey, ProgramKey, SampleKey, StepKey
from gapless.step.packet import PacketShape

BOOK = 1_024
"""[keys] Keys that a book keeps. The oldest goes first; a chunk of a CPU's prompt has a key of its own."""
_HEADER = struct.Struct("<BBHIII")
"""Kind, flags, number of the key, bytes of the key or 0, bytes of the words, crc32 of all orders so far"""
_WORDS = 1


class Order(NamedTuple):
    """A step for every executor: its key, and the sent words of the packet.

    Without words the step runs from the packet that the last step left.
    """

    key: StepKey
    words: bytes | None


class CaptureOrder(NamedTuple):
    """Graphs to capture, and graphs to drop first. Nothing is in flight on the leader's device."""

    capture: tuple[ProgramKey, ...]
    drop: tuple[ProgramKey, ...]


class AdapterOrder(NamedTuple):
    """An adapter that every rank reads and keeps, copies to a slot, or forgets."""

    digest: str
    path: str
    """The directory of it; empty to forget it"""
    slot: int
    """NO_SLOT to read it alone. No step in flight reads any other."""


class WeightsOrder(NamedTuple):
    """New weights that every rank reads beside its steps, and takes once nothing is in flight."""

    path: str
    """The directory of a checkpoint; empty to drop the last one"""
    digest: str
    """The digest of the leader's, to take them; empty to read them"""


AnyOrder = Order | CaptureOrder | AdapterOrder | WeightsOrder | MoveOrder


class Ranks(Protocol):
    """The ranks that follow, as their leader sees them."""

    def room(self, orders: int) -> int:
        """Return how many of these there is room for now. Never waits."""
        ...

    def send(self, order: AnyOrder) -> None:
        """Send an order to all. There is room for a step; other orders wait for it."""
        ...

    def captured(self, order: CaptureOrder) -> list[bool]:
        """Return which graphs of the last order, this one, all of them have. Waits; nothing is in flight."""
        ...

    def host_memory(self, nbytes: int) -> SharedMemory:
        """Return the memory of the host tier, which all map. Called once at most, before the first order."""
        ...

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None:
        """Return the int64 checksums of the pages that each has moved by the order of this number, empty if it has
        failed there; None until all have moved them. Never waits."""
        ...

    def read_weights(self) -> Sequence[tuple[str, str]] | None:
        """Return the digest of the weights that each has read by the last order, or "" and why it could not; None until
        all have. Never waits."""
        ...

    def waited(self) -> Sequence[int]:
        """Return the time that each rank's programs have waited for other ranks so far, ns, the leader first."""
        ...

    def lags(self) -> Sequence[int]:
        """Return the number of orders that each rank has been sent and has not taken up, the leader first."""
        ...


def followed(order: AnyOrder) -> AnyOrder:
    """Return an order as ranks without samplers and lanes need it: loads and forwards."""
    if isinstance(order, AdapterOrder | WeightsOrder | MoveOrder):
        return order
    if isinstance(order, CaptureOrder):
        return CaptureOrder(*(tuple(key for key in keys if isinstance(key, ForwardKey)) for keys in order))
    key, words = order
    if words is not None and key.load is None:
        words = words[-4 * key.forward.packet.words :]  # without the lists before it
    return Order(_followed(key), words)


@lru_cache(maxsize=BOOK)
def _followed(key: StepKey) -> StepKey:
    return key._replace(before=(), after=(), lists=0, scores=0)


class WireError(ValueError):
    """An order that differs from the one sent: lost, changed, or out of place."""


class OrderWriter:
    """Puts `followed` orders into bytes, for any number of readers that get all of them."""

    def __init__(self) -> None:
        self._numbers: dict[StepKey, int] = {}
        self._next = 0
        self._crc = 0

    def write(self, order: AnyOrder) -> bytes:
        """Return the bytes of an order."""
        order = followed(order)
        if isinstance(order, MoveOrder):
            facts = _MOVE_FACTS.pack(order.number, order.after)
            return self._sealed(_MOVE, order.stores, 0, facts + _packed(order.counts), order.places)
        if not isinstance(order, Order):
            return self._sealed(_WHOLE, 0, 0, _packed(order), b"")
        key, words = order
        number, fresh = self._number(key._replace(load=None))
        parts = (key if fresh else None, key.load)
        named = _packed(parts) if fresh or key.load is not None else b""
        return self._sealed(_STEP, _WORDS if words is not None else 0, number, named, words or b"")

    def _number(self, key: StepKey) -> tuple[int, bool]:
        """Return the number of a key, and whether it is new to the readers."""
        number = self._numbers.get(key)
        if number is not None:
            return number, False
        if len(self._numbers) == BOOK:
            del self._numbers[next(iter(self._numbers))]
        self._numbers[key] = number = self._next
        self._next = (number + 1) % BOOK
        return number, True

    def _sealed(self, kind: int, flags: int, number: int, named: bytes, words: bytes) -> bytes:
        head = _HEADER.pack(kind, flags, number, len(named), len(words), 0)
        self._crc = zlib.crc32(words, zlib.crc32(named, zlib.crc32(head, self._crc)))
        return _HEADER.pack(kind, flags, number, len(named), len(words), self._crc) + named + words


class OrderReader:
    """Reads what one `OrderWriter` wrote, in order."""

    def __init__(self) -> None:
        self._keys: list[StepKey | None] = [None] * BOOK
        self._crc = 0

    def read(self, data: bytes | memoryview) -> AnyOrder:
        """Return the order. Raises WireError if some order before it is missing, or any byte is another."""
        size = _HEADER.size
        try:
            kind, flags, number, named, length, crc = _HEADER.unpack_from(data)
        except struct.error as error:
            raise WireError(f"an order of {len(data)} bytes has no whole header") from error
        if len(data) != size + named + length:
            raise WireError(f"an order of {size + named + length} bytes came as {len(data)}")
        head = _HEADER.pack(kind, flags, number, named, length, 0)
        self._crc = zlib.crc32(data[size:], zlib.crc32(head, self._crc))
        if crc != self._crc:
            raise WireError("an order is not the next one of its leader, or was changed on its way")
        if kind == _MOVE:
            order, after = _MOVE_FACTS.unpack_from(data, size)
            counts = _unpacked(bytes(data[size + _MOVE_FACTS.size : size + named]))
            return MoveOrder(bool(flags), order, after, counts, bytes(data[size + named :]))
        parts = _unpacked(bytes(data[size : size + named])) if named else (None, None)
        if kind == _WHOLE:
            assert isinstance(parts, CaptureOrder | AdapterOrder | WeightsOrder), "a whole order"
            return parts
        fresh, load = parts
        if fresh is not None:
            self._keys[number] = fresh._replace(load=None)
        key = self._keys[number]
        assert key is not None, "a key is sent before its number"
        words = bytes(data[size + named :]) if flags & _WORDS else None
        return Order(key if load is None else key._replace(load=load), words)


_STEP, _WHOLE, _MOVE = range(3)
_MOVE_FACTS = struct.Struct("<QQ")
"""Number of a move, and the steps that it comes after"""
_RECORDS = {kind.__name__: kind for kind in (
    BatchShape, PacketShape, ForwardKey, SampleKey, LoadKey, Load, StepKey, CaptureOrder, AdapterOrder, WeightsOrder
)}  # fmt: skip
"""The records that travel, by name"""


def _packed(value: Any) -> bytes:
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        assert not name or name in _RECORDS, f"{name} is no record that travels"
        return [name, *map(_plain, value)]
    assert value is None or isinstance(value, int | str), f"{value!r} is neither a number nor a name"
    return value


def _unpacked(data: bytes) -> Any:
    return _revived(json.loads(data))


def _revived(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, *items = value
    fields = map(_revived, items)
    return _RECORDS[name](*fields) if name else tuple(fields)
