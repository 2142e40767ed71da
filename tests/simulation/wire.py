"""What is between the peer tiers of a pair, without threads: connections in memory, a clock, and what goes wrong there.

Tiers, workers, links, sessions and shelves are the engine's own. This says which of them moves next, whenever a loop
looks at its tier, and while a link waits for an answer.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from simulation.scenario import PEER

from gapless.base.peers import PeerAddress
from gapless.base.shared import Bytes, SharedMemory
from gapless.loop.loop import Loop
from gapless.offload.below import LEASE_NS
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.frames import FRAME_SECONDS, KEY_BYTES, LEASE, FrameKind, FrameSocket, keys_in
from gapless.offload.tiers.giving import LEASE_SECONDS, PeerSession
from gapless.offload.tiers.link import PeerCaller, PeerLink
from gapless.offload.tiers.peer import PeerTier, PeerWorker
from gapless.offload.tiers.seam import Namespace
from gapless.offload.tiers.shelf import UNASKED_SECONDS, Shelf, ShelfPage
from gapless.testing.sim import SimDevice

T = TypeVar("T")
BACK_OFF = 0.1
MOST_MOVES = 8
STOPS = 5
"""How much oftener readers are stopped than other things go wrong: there are fewer of them"""
TURNS = 0.1
"""How often a shelf gives up all its pages while some are lent"""
PAUSES = (0.0, 0.0, 0.0, 0.001, 0.006, 0.05)
"""Seconds between two moves"""
Check = Callable[[bytes, memoryview], None]
"""Asserts that the page of a key holds what it means."""


class Half:
    """One end of a connection, as a FrameSocket uses its socket."""

    family = socket.AF_UNIX

    def __init__(self, net: Net, gives: bool) -> None:
        self.other = self
        self.inbox = bytearray()
        self.keys: list[bytes] = []
        """What was asked for last"""
        self.gone = self.cut = False
        """Whether the other end has closed, and whether this one has vanished: nothing of it arrives any more."""
        self._net, self._gives, self._closed, self._timeout = net, gives, False, 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = float("inf") if seconds is None else seconds

    def sendall(self, data: bytes | memoryview) -> None:
        if self._closed or self.gone:
            raise BrokenPipeError("sim: closed")
        self._net.renewed += not self._gives and data[0] == FrameKind.RENEW
        if not self._gives and data[0] == FrameKind.FETCH:
            body = bytes(data[5 + LEASE.size :])
            self.keys = keys_in(body, len(body) // KEY_BYTES)
        if not self.cut:
            self.other.inbox += self._net.spoil(self, bytes(data)) if self._gives else data

    def recv_into(self, memory: memoryview) -> int:
        if not self.inbox and not self._gives:
            self._net.answer(self)
        if not self.inbox and not self.gone:
            self._net.now += self._timeout
            raise TimeoutError("sim: late")
        count = min(len(memory), len(self.inbox))
        memory[:count] = self.inbox[:count]
        del self.inbox[:count]
        return count

    def recv(self, count: int, flags: int) -> bytes:
        if not self.inbox and not self.gone:
            raise TimeoutError("sim: nothing comes") if self._timeout else BlockingIOError
        return bytes(self.inbox[:count])

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        if not self.cut:
            self.other.gone = True


class Inline(CopyThreads):
    """Copies by the thread that asks."""

    def each(self, copy: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        return [copy(*some) for some in zip(*arguments, strict=True)]


class Stopping(Inline):
    """A reader that is stopped for a while before one of its pages, or killed there."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self._net = net

    def each(self, copy: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        some = list(zip(*arguments, strict=True))
        at = self._net.rng.randrange(len(some))
        done = super().each(copy, *zip(*some[:at], strict=True)) if at else []
        self._net.stop_reader()
        return done + super().each(copy, *zip(*some[at:], strict=True))


class WrongShelf(Shelf):
    """Now and then refuses a page, or lends another one. Looks at each that is put there."""

    def __init__(
        self, net: Net, nbytes: int, slot_bytes: Sequence[int], memory: SharedMemory | None, check: Check
    ) -> None:
        super().__init__(nbytes, slot_bytes, memory, net.clock)
        self._net, self._check = net, check

    def put(self, pages: Sequence[ShelfPage]) -> list[bool]:
        for page in pages:
            try:
                self._check(page.key, page.data)
            except AssertionError as error:  # a tier's thread swallows it
                self._net.wrong.append(str(error))
        return super().put(pages)

    def lend(self, key: bytes) -> ShelfPage | None:
        if self._net.happens():
            return None
        others = [other for other in self.pages if other != key]
        if others and self._net.happens():
            self._net.foreign += 1
            return super().lend(self._net.rng.choice(others))
        return super().lend(key)


class End:
    """The peer tier of one engine of a pair."""

    def __init__(self, net: Net, loop: Loop, gives: bool, takes: bool, check: Check) -> None:
        transfers = loop.parts.transfers
        assert transfers is not None
        strides = [transfers.stride(group) for group in range(len(transfers.memory))]
        nbytes = sum(map(len, transfers.memory)) * net.rng.choice((0.1, 0.3, 0.5))
        self.shelf = WrongShelf(net, max(int(nbytes), sum(strides)), strides, transfers.shared, check)
        self._net, self._loop = net, loop
        self.links = []
        if takes:

            def adopt(data: Bytes) -> Callable[[], None] | None:
                return partial(self._unmap, data) if net.rng.random() < 0.5 else None

            self.links = [PeerLink(Caller(net, self), Stopping(net), strides, adopt, BACK_OFF, net.clock)]
        tier = PeerTier(self.shelf, self.links, Inline(), clock=net.clock)
        self.line = PairLine(net, tier, loop.bell.ring)
        self.line.gives = gives

    def close(self) -> None:
        if self.shelf.memory is not None:
            self.shelf.memory.close()

    def _unmap(self, data: Bytes) -> None:
        """Record a fault if memory of a peer is unmapped while pages in it are borrowed."""
        transfers = self._loop.parts.transfers
        assert transfers is not None
        for lease in transfers.host.below.leases.values():
            if lease.memory is not None and lease.memory.data is data:  # a tier's thread swallows what is raised
                self._net.wrong.append("memory of a peer is unmapped that has lent pages")

    def borrowed(self) -> set[bytes]:
        """Return the keys of pages that are a peer's."""
        transfers = self._loop.parts.transfers
        assert transfers is not None
        return {copy.key for group in transfers.host.groups for copy in group.copies.values() if copy.lease}

    def stand_still(self) -> None:
        """Advance the clock past the deadline of everything that is borrowed, as if the loop had been late."""
        device = self._loop.device
        assert isinstance(device, SimDevice)
        device.host_now += LEASE_NS * 3 // 2

    def turn_over(self) -> None:
        """Give up all pages and copies, as other ones may make shelf and host tier do, and write over free slots."""
        self.shelf.drop([*self.shelf.pages])
        transfers = self._loop.parts.transfers
        assert transfers is not None
        if not self.line.looks:
            transfers.host.below.poll()
        for group in transfers.host.groups:
            for copy in [copy for copy in group.copies.values() if not (copy.pins or copy.lease)]:
                copy.lose()
            for slot in group.free:
                transfers.slot(group.number, slot)[:] = b"\xa5" * transfers.stride(group.number)


class Caller(PeerCaller):
    """Connects to the other end. Nothing is proved there, and memory is mapped without a file."""

    def __init__(self, net: Net, taker: End) -> None:
        super().__init__(PeerAddress.parse(PEER, "sim"), b"", Namespace(""))
        self._net, self._taker = net, taker
        self._memory: Bytes | None = None

    def connect(self) -> FrameSocket:
        peer, self._memory = self._net.reach(self._taker)
        return peer

    def greet(self, peer: FrameSocket) -> Bytes | None:
        return self._memory


class PairLine(PeerWorker):
    """Lets the net move whenever its loop looks."""

    def __init__(self, net: Net, tier: PeerTier, ring: Callable[[], None]) -> None:
        super().__init__("pair", tier, ring, net.clock)
        self._net = net
        self.looks = False
        """Whether its loop looks now"""

    def take(self) -> list[Any]:
        if not self.looks:
            self.looks = True
            self._net.work()
            self.looks = False
        return super().take()


class Net:
    """Connections between the ends of a pair, of which there is one a side at a time."""

    def __init__(self, seed: int, rate: float) -> None:
        """`rate`: how often whatever may go wrong does."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self.ends: dict[str, End] = {}
        self.rotten: set[bytes] = set()
        """Keys of pages that may not be what they should be on the way, or where they come from"""
        self.wrong: list[str] = []
        """What a tier has found amiss"""
        self.foreign = self.late = self.stopped = self.cut = self.refused = self.flipped = self.expired = 0
        self.renewed = 0
        self._rate, self._slow = rate, random.Random(seed + 2)
        self._sessions: list[tuple[Half, PeerSession, WrongShelf, End]] = []

    def clock(self) -> float:
        return self.now

    def happens(self) -> bool:
        return self.rng.random() < self._rate

    def heal(self) -> None:
        self._rate = 0.0

    def open(self, name: str, end: End) -> PairLine:
        """An engine has started; the one before it is gone, with its connections."""
        if name in self.ends:
            self._close(self.ends[name])
        self.ends[name] = end
        return end.line

    def _close(self, end: End) -> None:
        for half, session, shelf, taker in self._sessions:
            if shelf is end.shelf:
                session.end()
            elif taker is end:
                half.other.close()
        self._sessions = [one for one in self._sessions if one[2] is not end.shelf]
        end.close()

    def reach(self, taker: End) -> tuple[FrameSocket, Bytes | None]:
        """Connect to the other one, if it is there and takes the call."""
        giver = next((end for end in self.ends.values() if end is not taker), None)
        if giver is None or self.happens():
            self.refused += 1
            raise ConnectionRefusedError("sim: refused")
        half, other = Half(self, False), Half(self, True)
        half.other, other.other = other, half
        shared = self.rng.random() < 0.5
        memory = giver.shelf.memory.data if shared and giver.shelf.memory is not None else None
        session = PeerSession(
            FrameSocket(cast(socket.socket, other), clock=self.clock), giver.shelf, shared, self.clock
        )
        self._sessions.append((other, session, giver.shelf, taker))
        return FrameSocket(cast(socket.socket, half), clock=self.clock), memory

    # Who moves.

    def work(self) -> None:
        """Some threads go on for a while."""
        for _ in range(self.rng.randrange(MOST_MOVES)):
            self.now += self.rng.choice(PAUSES)
            end = self.rng.choice([*self.ends.values()])
            self.rng.choice([end.line.turn, self.expire, *[link.turn for link in end.links]])()
        if any([session.lent for _, session, *_ in self._sessions]):
            if self.rng.random() < STOPS * self._rate:
                self._stand_still()  # also what was borrowed is lent only for a while
            elif self.rng.random() < TURNS:
                self._turn_over()
        for end in self.ends.values():
            if end.borrowed() and self._slow.random() < self._rate:
                end.stand_still()

    def expire(self) -> None:
        """Sessions read what has come without a question, and end whose peer has closed, or reads for too long."""
        for one in [*self._sessions]:
            half, session, *_ = one
            while one in self._sessions and (session.left() == 0.0 or half.gone or half.inbox):
                self._serve(*one)
        for end in self.ends.values():
            end.shelf.expire()

    def answer(self, half: Half) -> None:
        """A taker waits at this half: the giver goes on, unless it is late."""
        if self.happens():
            self.late += 1
            self.now += 2 * FRAME_SECONDS
            return
        for one in [one for one in self._sessions if one[0].other is half]:
            while one in self._sessions and one[0].inbox:
                self._serve(*one)

    def _serve(self, half: Half, session: PeerSession, shelf: WrongShelf, taker: End) -> None:
        late = session.left() == 0.0 and not half.inbox
        try:
            there = session.turn()
        except OSError:
            there = False
        if not there:
            self.expired += late
            # What the device is to read there may change from now on; what was copied is known to have been kept.
            self.rotten |= {page.key for pages in session.lent.values() for page in pages} & taker.borrowed()
            session.end()
            self._sessions = [one for one in self._sessions if one[1] is not session]

    # What goes wrong.

    def spoil(self, half: Half, data: bytes) -> bytes:
        """What arrives of what a giver sends."""
        if self.happens():
            at = self.rng.randrange(len(data))
            self.flipped += 1
            self.rotten |= {*half.other.keys}
            data = data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]
        if self.happens():
            self.cut += 1
            data = data[: self.rng.randrange(len(data))]
            half.close()
        return data

    def stop_reader(self) -> None:
        """A reader in place stands still, or is gone; what it was lent is not held for ever."""
        if self.rng.random() < STOPS * self._rate:
            self._stand_still()
        elif self.happens():
            taken = [half.other for half, session, *_ in self._sessions if session.lent]
            for half in taken:
                half.cut = True
            raise OSError("sim: killed")

    def _stand_still(self) -> None:
        self.stopped += 1
        self.expire()
        self.now += self.rng.choice((0.5, 2.0)) * LEASE_SECONDS
        self.expire()
        self._turn_over()

    def _turn_over(self) -> None:
        for end in self.ends.values():
            end.turn_over()

    # At the end.

    def check(self) -> None:
        """No tier has raised, or found anything amiss; links have failed as they may."""
        assert not self.wrong, self.wrong
        for end in self.ends.values():
            assert not end.line.error, end.line.error
            for link in end.links:
                assert not link.error or link.error.startswith(("the peer", "sim: ")), link.error

    def check_rest(self) -> None:
        """What was lent is back, and every place is accounted for."""
        assert not any([end.borrowed() for end in self.ends.values()]), "an engine keeps what it was lent"
        self.now += 2 * LEASE_SECONDS
        self.expire()
        for end in self.ends.values():
            assert not end.shelf.lent, "places are still lent"
            end.shelf.check()
        self.now += 2 * UNASKED_SECONDS
        self.expire()
        for end in self.ends.values():
            assert not end.shelf.used, "a shelf keeps pages that no peer has asked for"
            end.close()
