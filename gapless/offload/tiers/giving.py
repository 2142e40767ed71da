"""The side of a peer that gives pages: a listening socket and a thread for each connection.

These threads read the shelf and nothing else of the engine, so that no peer waits for a step, and no step for a peer.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gapless.base.errors import ConfigError
from gapless.base.peers import PeerAddress
from gapless.offload.tiers.frames import (
    ANSWERS,
    ASK,
    KEY_BYTES,
    LEASE,
    LEASE_SECONDS,
    LENT,
    MAX_NAME,
    PAGE_HEAD,
    FrameKind,
    FrameSocket,
    PeerError,
    PeerRefused,
    admit,
    keys_in,
)
from gapless.offload.tiers.seam import Namespace
from gapless.offload.tiers.shelf import Shelf, ShelfPage

MAX_CONNECTIONS = 64
"""Connections of peers that have proved themselves"""
MAX_STRANGERS = 32
"""Connections that have not proved themselves; where one more comes, the oldest ends: strangers keep no peer out."""
ADMIT_SECONDS = 2.0
"""How long a connection may take to prove itself"""
SHELF_LOOK_SECONDS = 1.0
"""How often the shelf gives up pages that no peer has asked for"""
LONGEST_LEASE_SECONDS = 10.0
"""The longest loan to a peer that renews. Then its connection ends, and the places serve others."""
MAX_LEASES = 4096
"""Fetches that one peer may have to return"""
FROM_TAKERS = (FrameKind.ASK, FrameKind.FETCH, FrameKind.MAP, FrameKind.RETURN, FrameKind.RENEW)

log = logging.getLogger("gapless.offload.tiers")


class PeerServer:
    """Gives the pages of a shelf to peers that have the key, and pages of the same."""

    def __init__(
        self, address: PeerAddress, key: bytes, namespace: Namespace, shelf: Shelf, tls: ssl.SSLContext | None = None
    ) -> None:  # fmt: skip
        """Listen; a unix socket does without TLS. Raises ConfigError."""
        self._key, self._namespace, self._shelf = key, namespace, shelf
        self._tls = None if address.path else tls
        self._path = address.path
        self._closing = threading.Event()
        self.connections: dict[FrameSocket, threading.Thread] = {}
        self._strangers: dict[FrameSocket, float] = {}
        """Connections that have not proved themselves, the oldest first, and when they came"""
        self._lock = threading.Lock()
        self._refusals: set[str] = set()
        """Lines that were logged"""
        try:
            self._listener = _listen(address)
        except OSError as error:
            raise ConfigError(f"kv_peer_listen: cannot listen on {address}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._accept, name="gapless-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            threads = [self._thread, *self.connections.values()]
            for peer in self.connections:
                peer.stop()
        with suppress(OSError):  # not every system wakes listeners
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(SHELF_LOOK_SECONDS)
        self._listener.close()
        if self._path:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self) -> None:
        self._listener.settimeout(SHELF_LOOK_SECONDS / 4)
        while not self._closing.is_set():
            self._shelf.expire()
            self._turn_away()
            try:
                raw, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # too many files are open
                self._closing.wait(SHELF_LOOK_SECONDS / 4)
                continue
            try:
                peer = FrameSocket(raw, self._tls)
            except OSError:  # it was closed already
                raw.close()
                continue
            with self._lock:
                if self._closing.is_set():
                    peer.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(peer,), name="gapless-peer", daemon=True)
                self.connections[peer], self._strangers[peer] = thread, time.monotonic()
                thread.start()

    def _turn_away(self) -> None:
        """End the connections that take too long to prove themselves, and the oldest of too many."""
        late = time.monotonic() - ADMIT_SECONDS
        with self._lock:
            over = len(self._strangers) - MAX_STRANGERS
            away = [peer for place, (peer, came) in enumerate(self._strangers.items()) if place < over or came < late]
            threads = [self.connections[peer] for peer in away]
            for peer in away:
                peer.stop()
        for thread in threads:
            thread.join(SHELF_LOOK_SECONDS)

    def _enter(self, peer: FrameSocket) -> None:
        """A connection has proved itself. Raises PeerRefused where there is no room for it."""
        with self._lock:
            if len(self.connections) - len(self._strangers) >= MAX_CONNECTIONS:
                raise PeerRefused(f"{MAX_CONNECTIONS} peers are connected already")
            del self._strangers[peer]

    def _serve(self, peer: FrameSocket) -> None:
        session = PeerSession(peer, self._shelf)
        try:
            admit(peer, self._key, self._namespace, lambda: self._enter(peer))
            while session.turn():
                pass
        except PeerRefused as error:
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                log.warning("a peer was refused: %s", error)
        except OSError as error:  # it may come again
            log.debug("a peer has gone: %s", error)
        finally:
            session.end()
            with self._lock:
                del self.connections[peer]
                self._strangers.pop(peer, None)


class PeerSession:
    """The giving side of one connection.

    Lent pages keep their places until the peer returns them, or has sent nothing for LEASE_SECONDS, or has had
    them for LONGEST_LEASE_SECONDS. A peer that is later than that may still read, and sees other pages there: it finds
    the connection ended, or other checksums.
    """

    def __init__(
        self, peer: FrameSocket, shelf: Shelf, shared: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`shared`: whether the peer has mapped the shelf's memory."""
        self.lent: dict[int, list[ShelfPage]] = {}
        """Pages by the number of their fetch"""
        self._due: dict[int, float] = {}
        """When they must be back, the first ones first"""
        self._heard = clock()
        """When the peer's last frame was read"""
        self._peer, self._shelf, self._shared, self._clock = peer, shelf, shared, clock

    def turn(self) -> bool:
        """Wait for a frame and answer it; return False when the peer has closed, or is late. Raises OSError."""
        # A frame that waits is read though the peer seems silent: this process may have been the one that was stopped.
        if self._overdue or not self._peer.wait(self.left()):
            return False
        kind, body = self._peer.receive(*FROM_TAKERS)
        self._heard = self._clock()
        if kind is FrameKind.ASK:
            self._answer(body)
        elif kind is FrameKind.FETCH:
            self._send(body)
        elif kind is FrameKind.RETURN:
            self._take_back(_number_in(body))
            self._peer.send(FrameKind.RETURNED)
        elif kind is FrameKind.MAP:
            fd = self._shelf.memory.fd if self._shelf.memory is not None and self._peer.local else -1
            self._shared = fd >= 0
            self._peer.send_memory(fd)
        return True

    def end(self) -> None:
        """Close the connection, and only then take back its loans: the peer must not believe later reads."""
        self._peer.stop()
        for number in [*self.lent]:
            self._take_back(number)
        self._peer.close()

    @property
    def _overdue(self) -> bool:
        return next(iter(self._due.values()), math.inf) <= self._clock()

    def left(self) -> float | None:
        """Return the seconds until the peer must send a frame or return pages; None where it has borrowed nothing."""
        if not self._due:
            return None
        return max(0.0, min(self._heard + LEASE_SECONDS, next(iter(self._due.values()))) - self._clock())

    def _lend(self, number: int, key: bytes) -> ShelfPage | None:
        if (page := self._shelf.lend(key)) is not None:
            self.lent.setdefault(number, []).append(page)
        return page

    def _take_back(self, number: int) -> None:
        self._due.pop(number, None)
        self._shelf.give_back(self.lent.pop(number, ()))

    def _answer(self, body: bytes) -> None:
        if len(body) < ASK.size:
            raise PeerError("a question without a beginning")
        length, count = ASK.unpack_from(body)
        if length > MAX_NAME:  # the shelf remembers names
            raise PeerError(f"the peer sent a name of {length} bytes")
        name = body[ASK.size : ASK.size + length].decode(errors="replace")
        keys = keys_in(body[ASK.size + length :], count)
        self._peer.send(FrameKind.ANSWER, bytes([ANSWERS.index(found) for found in self._shelf.find(name, keys)]))

    def _send(self, body: bytes) -> None:
        """Send the pages, or where they are in memory that the peer has mapped; these are lent from then on."""
        number = _number_in(body)
        keys = keys_in(body[LEASE.size :], (len(body) - LEASE.size) // KEY_BYTES)
        if number in self.lent or len(self.lent) >= MAX_LEASES:
            raise PeerError(f"the peer fetches under a number that is in use, or has {MAX_LEASES} fetches to return")
        if self._shared:
            while keys and self._lend(number, keys[0]) is not None:
                keys = keys[1:]
            if lent := self.lent.get(number, []):
                self._due[number] = self._clock() + LONGEST_LEASE_SECONDS
            self._peer.send(FrameKind.LENT, *map(self._place_of, lent))
            return
        for key in keys:
            if (page := self._lend(number, key)) is None:
                self._peer.send(FrameKind.GONE)
                return
            head = PAGE_HEAD.pack(page.key, page.checksum, len(page.data))
            self._peer.send(FrameKind.PAGE, head, page=page.data)
            self._take_back(number)

    def _place_of(self, page: ShelfPage) -> bytes:
        assert self._shelf.memory is not None, "pages are lent that no peer can map"
        return LENT.pack(page.key, page.checksum, len(page.data), self._shelf.memory.start_of(page.data))


def _number_in(body: bytes) -> int:
    """Return the number that begins a frame. Raises PeerError."""
    if len(body) < LEASE.size:
        raise PeerError("the peer sent a frame without its number")
    return int(LEASE.unpack_from(body)[0])


def _listen(address: PeerAddress) -> socket.socket:
    if not address.path:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=MAX_CONNECTIONS)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(address.path) and stat.S_ISSOCK(os.stat(address.path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(address.path):  # left by a process that has ended
                    os.unlink(address.path)
        listener.bind(address.path)
        os.chmod(address.path, 0o600)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
