"""The side of a peer that takes pages: one connection to one peer, and the thread that waits for it."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from gapless.base.peers import PeerAddress
from gapless.base.shared import Bytes, PeerMemory, mapped
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.frames import (
    ANSWERS,
    ASK,
    FRAME_SECONDS,
    LEASE,
    LEASE_SECONDS,
    LENT,
    MAX_FETCH,
    MAX_KEYS,
    PAGE_HEAD,
    FrameKind,
    FrameSocket,
    PeerError,
    greet,
)
from gapless.offload.tiers.seam import Found, JobEnd, Namespace, TierPage, group_in

FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 60.0
"""Seconds without a try of a peer after failures"""
PEER_LOOK_SECONDS = 1.0
"""How often it is looked whether a peer of this host is still there"""
RENEW_SECONDS = LEASE_SECONDS / 3
"""Seconds between two renewals of the leases that a peer has given"""
REPEAT_SECONDS = 0.001
"""Seconds until a pending question is asked again, times the number of pending questions"""

log = logging.getLogger("gapless.offload.tiers")


@dataclass(eq=False)
class LinkQuestion:
    """Keys that a peer is asked for until it has decided about all, or `until`. Its thread alone writes `found`."""

    link: PeerLink
    name: str
    keys: Sequence[bytes]
    until: float
    found: list[Found]
    due: float = 0.0
    """When it is asked again"""

    @property
    def open(self) -> bool:
        return Found.PENDING in self.found

    def give_up(self) -> None:
        """The peer has nothing else."""
        self.found = [Found.MISS if found is Found.PENDING else found for found in self.found]


@dataclass(eq=False)
class LinkLoad:
    job: int
    pages: Sequence[TierPage]
    borrows: bool = False
    """Whether the pages stay in the peer's memory, until `LinkReturn`"""
    cancelled: bool = False
    checksums: list[int] = field(default_factory=list)
    """Checksums of the received pages"""
    memory: PeerMemory | None = None
    places: list[int] = field(default_factory=list)
    """The slots of the peer that borrowed pages are in"""
    nbytes: int = 0

    def end(self) -> JobEnd:
        """Return its end: the received pages, whatever failed after them."""
        failed = len(self.checksums) < len(self.pages) and not self.cancelled
        return JobEnd(self.job, tuple(self.checksums), failed, self.nbytes, 0.0, self.memory, tuple(self.places))


@dataclass(frozen=True)
class LinkReturn:
    job: int
    """The load whose pages go back"""


LinkOrder = LinkQuestion | LinkLoad | LinkReturn
Adopt = Callable[[Bytes], Callable[[], None] | None]
"""Lets the device read memory of a peer, and returns what ends that; None where the device cannot."""


class PeerCaller:
    """Connects to a peer that has the key, and pages of the same."""

    def __init__(
        self, address: PeerAddress, key: bytes, namespace: Namespace, tls: ssl.SSLContext | None = None
    ) -> None:  # fmt: skip
        """A unix socket does without TLS."""
        self.address = address
        self._key, self._namespace = key, namespace
        self._tls = None if address.path else tls
        self._found: Future[list[str]] | None = None
        """The look-up of the host's addresses that has begun"""

    def connect(self) -> FrameSocket:
        """Return a connection that has not begun. Raises OSError."""
        address = self.address
        raw = _to_path(address.path) if address.path else _to_one_of(self._addresses(), address.port)
        return FrameSocket(raw, self._tls, address.host)

    def _addresses(self) -> list[str]:
        """Return the host's addresses. The system's look-up has no deadline, so it has a thread of its own; one that
        takes longer than a peer may is left to the next call. Raises OSError."""
        if self._found is None:
            self._found = Future()
            threading.Thread(target=self._look_up, args=(self._found,), name="gapless-look-up", daemon=True).start()
        found = self._found
        wait([found], FRAME_SECONDS)
        if not found.done():
            raise PeerError("the look-up of its host takes too long")
        self._found = None
        return found.result()

    def _look_up(self, found: Future[list[str]]) -> None:
        try:
            lines = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
            found.set_result([str(address[0]) for *_, address in lines])
        except Exception as error:
            found.set_exception(error)

    def greet(self, peer: FrameSocket) -> Bytes | None:
        """Begin; return the peer's pages where it is a process of this host. Raises PeerRefused, OSError."""
        greet(peer, self._key, self._namespace)
        return _memory_of(peer) if peer.local else None


class PeerLink:
    """A connection that is made in the background, and made again a while after each failure.

    While there is none, nothing is found: what a peer does, or does not do, makes a request slow and never stops it.
    """

    def __init__(
        self, caller: PeerCaller, copies: CopyThreads, slot_bytes: Sequence[int], adopt: Adopt = lambda data: None,
        back_off: float = FIRST_BACK_OFF, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`slot_bytes` are the bytes of a page, by page group."""
        self.address = caller.address
        self.error = ""
        """Why there is no connection"""
        self.ended: deque[JobEnd] = deque()
        """Ends of loads"""
        self.news: Callable[[], None] = lambda: None
        """Called, from the thread, when a load has ended or a question has another answer"""
        self._caller, self._copies, self._clock = caller, copies, clock
        self._first = self._back_off = back_off
        self._slot_bytes, self._adopt = slot_bytes, adopt
        self._peer: FrameSocket | None = None
        self._memory: PeerMemory | None = None
        self._borrowed: dict[int, PeerMemory] = {}
        """Owners of the pages that loads have borrowed, until these give them back"""
        self._renew_at = 0.0
        """When the leases are renewed next"""
        self._tried = self._next_try = 0.0
        self._served = False
        """Whether the peer has served a request since it was connected: only then is it tried again at once"""
        self._orders: deque[LinkOrder] = deque()
        self._open: list[LinkQuestion] = []
        self._current: LinkLoad | None = None
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gapless-peer-{self.address}", daemon=True)

    def start(self) -> PeerLink:
        self._thread.start()
        return self

    # For the tier.

    def ask(self, name: str, keys: Sequence[bytes], until: float) -> LinkQuestion:
        """Ask for these keys. Pages of the request of this name are waited for; a peer that it names is tried again."""
        question = LinkQuestion(self, name, keys, until, [Found.PENDING] * len(keys))
        self._order(question)
        return question

    @property
    def lends(self) -> bool:
        """Return whether the device can read the peer's pages where they are."""
        memory = self._memory
        return memory is not None and memory.readable

    def load(self, job: int, pages: Sequence[TierPage], borrows: bool = False) -> None:
        self._order(LinkLoad(job, pages, borrows))

    def give_back(self, job: int) -> None:
        """Nothing reads the pages any more that this load has borrowed."""
        self._order(LinkReturn(job))

    def cancel(self, job: int) -> None:
        """End this load soon; in the middle of a page that takes the connection."""
        for load in (self._current, *[*self._orders]):
            if isinstance(load, LinkLoad) and load.job == job:
                load.cancelled = True
                if load is self._current and not load.borrows and (peer := self._peer) is not None:
                    peer.stop()

    def stop(self) -> None:
        """End all loads soon."""
        self._closing = True
        self._wake.set()
        if (peer := self._peer) is not None:
            peer.stop()

    def close(self) -> None:
        """End all loads: no slot is written from now on."""
        self.stop()
        self._thread.join()

    def _order(self, order: LinkOrder) -> None:
        self._orders.append(order)
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            if not self.turn():
                self._wake.wait(self._pause())
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, LinkLoad):
                self.ended.append(order.end())
        self._lose()  # loads may still read borrowed pages: the device ends that when it closes

    def turn(self) -> bool:
        """Do the next due thing; return whether there was one."""
        order = self._next()
        if order is not None:
            self._do(order)
        elif self._memory is not None and self._has_gone():  # its memory must not stay because nothing is asked
            return True
        elif self._renews and self._clock() >= self._renew_at:
            self._safely(self._renew)
        elif self._peer is None and self._clock() >= self._next_try:
            self._safely(self._connect)
        else:
            return False
        return True

    def _next(self) -> LinkOrder | None:
        if self._orders:
            return self._orders.popleft()
        now = self._clock()
        self._open = [question for question in self._open if question.open and now < question.until]
        return next((question for question in self._open if now >= question.due), None)

    def _pause(self) -> float | None:
        times = [question.due for question in self._open]
        times += [self._next_try] if self._peer is None else []
        times += [self._clock() + PEER_LOOK_SECONDS] if self._memory is not None else []
        times += [self._renew_at] if self._renews else []
        return max(0.0, min(times) - self._clock()) if times else None

    def _do(self, order: LinkOrder) -> None:
        if isinstance(order, LinkReturn):
            if (memory := self._borrowed.pop(order.job, None)) is not None:
                memory.leases -= 1
                if not self._has_gone() and (peer := self._peer) is not None and memory is self._memory:
                    self._safely(lambda: self._return(peer, order.job))
                self._close_unless_used(memory)
            return
        if isinstance(order, LinkQuestion):
            if self._serves(lambda: self._ask(order)) and order.open:
                if order not in self._open:
                    self._open.append(order)
                order.due = self._clock() + REPEAT_SECONDS * len(self._open)
            else:
                order.give_up()
                self.news()
            return
        self._current = order
        try:
            if not order.cancelled:
                self._serves(lambda: self._fetch(order))
        finally:
            self._current = None
            self.ended.append(order.end())
            self.news()

    def _ask(self, question: LinkQuestion) -> None:
        peer, name = self._connected(bool(question.name)), question.name.encode()
        places = [place for place, found in enumerate(question.found) if found is Found.PENDING]
        found = [*question.found]
        for first in range(0, len(places), MAX_KEYS):
            some = places[first : first + MAX_KEYS]
            peer.send(FrameKind.ASK, ASK.pack(len(name), len(some)), name, *[question.keys[place] for place in some])
            answer = peer.receive(FrameKind.ANSWER)[1]
            if len(answer) != len(some) or max(answer) >= len(ANSWERS):
                raise PeerError("the peer gave an answer to something else")
            for place, byte in zip(some, answer, strict=True):
                found[place] = ANSWERS[byte]
        if found != question.found:
            question.found = found
            self.news()

    def _fetch(self, load: LinkLoad) -> None:
        peer = self._connected(named=False)
        if load.cancelled:  # while there was no connection that `cancel` could stop
            return
        if load.borrows and not self.lends:  # it was another connection that lends
            return
        pages = load.pages[:MAX_FETCH]
        peer.send(FrameKind.FETCH, LEASE.pack(load.job), *[page.key for page in pages])
        if self._memory is not None:
            self._read_in_place(peer, load, pages, self._memory)
            return
        for page in pages:
            kind, body = peer.receive(FrameKind.PAGE, FrameKind.GONE)
            if kind is FrameKind.GONE:
                break
            if len(body) != PAGE_HEAD.size:
                raise PeerError("the peer sent a page without its name")
            key, checksum, nbytes = PAGE_HEAD.unpack(body)
            self._check(page, key, nbytes)
            peer.fill(page.slot, self._clock() + FRAME_SECONDS)
            load.checksums.append(checksum)
            load.nbytes += nbytes

    def _read_in_place(self, peer: FrameSocket, load: LinkLoad, pages: Sequence[TierPage], memory: PeerMemory) -> None:
        """Copy the pages that the peer lends, or keep them for the device to read."""
        body = peer.receive(FrameKind.LENT)[1]
        if len(body) % LENT.size or len(body) > len(pages) * LENT.size:
            raise PeerError("the peer lent something else than pages that it was asked for")
        sources, places, checksums = list[Bytes](), list[int](), list[int]()
        for page, (key, checksum, nbytes, start) in zip(pages, LENT.iter_unpack(body), strict=False):
            self._check(page, key, nbytes)
            if start % nbytes or start + nbytes > len(memory.data):
                raise PeerError("the peer lent a page outside of its slots")
            sources.append(memory.data[start : start + nbytes])
            places.append(start // nbytes)
            checksums.append(checksum)
        if not sources:
            return
        if load.borrows and not load.cancelled:
            self._borrowed[load.job] = load.memory = memory
            memory.leases += 1
            self._renew_at = self._clock() + RENEW_SECONDS
            load.places = places
        else:
            if not load.cancelled:
                slots = [np.frombuffer(page.slot, np.uint8) for page in pages[: len(sources)]]
                self._copies.each(np.copyto, slots, sources)
            self._return(peer, load.job)  # otherwise the places may have served other pages meanwhile
        if not load.cancelled:
            load.checksums, load.nbytes = checksums, sum(map(len, sources))

    @property
    def _renews(self) -> bool:
        """Return whether pages are borrowed over this connection. Leases of an earlier connection are lost."""
        return self._memory is not None and self._memory.leases > 0

    def _renew(self) -> None:
        """Keep what the peer has lent. Raises OSError."""
        assert self._peer is not None
        self._peer.send(FrameKind.RENEW)
        self._renew_at = self._clock() + RENEW_SECONDS

    def _return(self, peer: FrameSocket, job: int) -> None:
        """Give back what the peer has lent to a load; its answer counts where pages were copied. Raises OSError."""
        peer.send(FrameKind.RETURN, LEASE.pack(job))
        peer.receive(FrameKind.RETURNED)

    def _check(self, page: TierPage, key: bytes, nbytes: int) -> None:
        """Raise PeerError unless what the peer gives is this page."""
        if key != page.key or nbytes != self._slot_bytes[group_in(key)]:
            raise PeerError("the peer sent another page than it was asked for")

    def _close_unless_used(self, memory: PeerMemory) -> None:
        if not memory.leases and memory is not self._memory:
            memory.close()

    def _connected(self, named: bool) -> FrameSocket:
        """Return the connection. A peer that a request names is tried again before its time. Raises OSError."""
        self._has_gone()
        if self._peer is None:
            if self._clock() < (self._tried + self._first if named else self._next_try):
                raise PeerError(self.error)
            self._connect()
        assert self._peer is not None
        return self._peer

    def _has_gone(self) -> bool:
        """Return whether the peer has closed while nothing was asked; it may be there again at once."""
        gone = self._peer is not None and not self._peer.silent
        if gone:
            self._lose()
            if self._served:
                self._tried = self._next_try = 0.0
        return gone

    def _connect(self) -> None:
        try:
            self._peer = peer = self._caller.connect()
            if self._closing:  # `close` may have been called too early to stop it
                raise PeerError("this engine ends")
            if (data := self._caller.greet(peer)) is not None:
                self._memory = PeerMemory(data, self._adopt(data))
        except Exception:  # also where a resolver raises no OSError: without a pause the thread would spin
            self._lose()
            raise
        self._served, self.error = False, ""
        log.info("peer %s: connected%s", self.address, ", its pages are read where they are" if self.lends else "")

    def _serves(self, work: Callable[[], None]) -> bool:
        """Do it; a peer that does its part is tried again as soon as the first time."""
        if done := self._safely(work):
            self._served, self._back_off = True, self._first
        return done

    def _safely(self, work: Callable[[], None]) -> bool:
        """Do it; what goes wrong ends the connection."""
        try:
            work()
        except Exception as error:  # whatever a peer does, its loads end, and it is asked again later
            text = (isinstance(error, OSError) and error.strerror) or str(error)
            if text != self.error and not self._closing:
                self.error = text
                log.warning("peer %s: %s (prompts are computed here until it is back)", self.address, text)
            if self._peer is not None:
                self._lose()
            return False
        return True

    def _lose(self) -> None:
        """There is no connection any more, or none yet: the peer is left alone for a while."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        memory, self._memory = self._memory, None
        if memory is not None:
            self._close_unless_used(memory)
        self._tried = self._clock()
        self._next_try = self._tried + self._back_off
        self._back_off = min(2 * self._back_off, LAST_BACK_OFF)


def _memory_of(peer: FrameSocket) -> Bytes | None:
    peer.send(FrameKind.MAP)
    fd = peer.receive_memory()
    if fd < 0:
        return None
    try:
        return mapped(fd)
    finally:
        os.close(fd)


def _to_one_of(addresses: Sequence[str], port: int) -> socket.socket:
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), FRAME_SECONDS)
    return socket.create_connection((addresses[-1], port), FRAME_SECONDS)


def _to_path(path: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(FRAME_SECONDS)
    try:
        raw.connect(path)
    except OSError:
        raw.close()
        raise
    return raw
