"""Frames between two peers, and how they make sure of each other before the first page.

Between machines they speak over TLS. Both prove that they have the key, over nonces of both and the namespaces of both,
so that no proof can be used again. Only then do they name their pages' model, and go no further unless it is
the same. Frames have a type and a length, which has a bound; whatever takes too long, or is not as it should be, ends
the connection.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from hashlib import sha256
from typing import Any

from gapless.base.errors import ConfigError
from gapless.base.peers import PeerFiles
from gapless.offload.tiers.seam import Found, Namespace

FRAME_SECONDS = 1.0
"""How long a peer may take for a frame that is due, or a page"""
KEY_BYTES = 36
MAX_KEYS = 16_384
"""Keys of one question"""
MAX_FETCH = 64
"""Pages of one fetch"""
MAX_NAME = 512
"""Bytes of the name of a request"""
LEASE_SECONDS = 3.0
"""How long a lease lasts after the last frame of the peer that has it. The taker renews after a third of that."""
PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A lost machine sends nothing: after a minute the system ends its connections. Seconds, seconds, tries"""
_MAGIC = b"gaplessP6"
_NONCE = 32
_MAC = 32
_HEAD = struct.Struct("<BI")
_USER = struct.Struct("iII")
"""The system's record of a peer: process, user, group"""
ASK = struct.Struct("<HI")
"""Begins a question: bytes of the request's name, keys"""
LEASE = struct.Struct("<Q")
"""Begins a fetch: the number for the return of its pages, if they are lent"""
PAGE_HEAD = struct.Struct(f"<{KEY_BYTES}sqI")
"""Stands before a page: its key, checksum, bytes"""
LENT = struct.Struct(f"<{KEY_BYTES}sqIQ")
"""A page that is lent: its key, checksum, bytes, and where they begin in the memory that the taker has mapped"""
MEMORY = struct.Struct("<?")
"""Whether a file follows"""
ANSWERS = (Found.MISS, Found.HIT, Found.PENDING)


class FrameKind(IntEnum):
    """Kinds of frames: number, and the most bytes that one may have."""

    limit: int

    def __new__(cls, number: int, limit: int) -> FrameKind:
        kind = int.__new__(cls, number)
        kind._value_, kind.limit = number, limit
        return kind

    HELLO = 1, len(_MAGIC) + _NONCE + 32
    CHALLENGE = 2, _NONCE + 32 + _MAC
    PROOF = 3, _MAC + 65_536
    WELCOME = 4, 65_536
    ASK = 5, ASK.size + MAX_NAME + MAX_KEYS * KEY_BYTES
    """Which of these keys exist, for the request of this name?"""
    ANSWER = 6, MAX_KEYS
    """A byte a key: its place in ANSWERS"""
    FETCH = 7, LEASE.size + MAX_FETCH * KEY_BYTES
    """Send these pages, until one is not there."""
    PAGE = 8, PAGE_HEAD.size
    """A page; its bytes follow the frame."""
    GONE = 9, 0
    """The next page is not there."""
    MAP = 10, 0
    """May your memory be read in place? Asked at a unix socket."""
    MEMORY = 11, MEMORY.size
    """The answer to MAP, yes or no; with a yes comes the file."""
    LENT = 12, MAX_FETCH * LENT.size
    """The pages of a fetch in that memory, up to the first that is not there. They stay as they are until they are
    returned, or the connection ends."""
    RETURN = 13, LEASE.size
    """The taker has read what a fetch of this number lent it."""
    RETURNED = 14, 0
    """The answer to a RETURN in time: it was the same page until then. What is late ends the connection."""
    RENEW = 15, 0
    """The taker still uses its loan. Not answered; every other frame means it too."""


class PeerError(OSError):
    """The peer has left, was late, or broke the protocol."""


class PeerRefused(PeerError):
    """The peer has no valid certificate, another key, or pages of something else, or there is no room for it."""


class FrameSocket:
    """A connection whose every read and write has an end."""

    def __init__(
        self, raw: socket.socket, tls: ssl.SSLContext | None = None, host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Take over a connection; with `tls`, `secure` comes first. `host` is that of a peer that was connected to."""
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, number in PROBES.items():
                if hasattr(socket, name):
                    raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
        if tls is not None:
            raw = tls.wrap_socket(raw, not host, do_handshake_on_connect=False, server_hostname=host or None)
        self._raw, self._clock = raw, clock
        self._wire: Any = super(ssl.SSLSocket, raw) if isinstance(raw, ssl.SSLSocket) else raw
        """The socket below TLS"""

    def secure(self) -> None:
        """Have both sides show their certificates, if there is TLS. Raises PeerRefused, OSError."""
        if isinstance(self._raw, ssl.SSLSocket):
            self._raw.settimeout(FRAME_SECONDS)
            try:
                self._raw.do_handshake()
            except ssl.SSLError as error:
                raise PeerRefused(error.strerror or str(error)) from error

    def send(
        self, kind: FrameKind, *parts: bytes, page: bytes | memoryview = b"", seconds: float = FRAME_SECONDS
    ) -> None:
        """Send a frame, and the page that follows it. Raises OSError."""
        body = b"".join(parts)
        self._raw.settimeout(seconds)
        self._raw.sendall(_HEAD.pack(kind, len(body)) + body)
        if page:
            self._raw.sendall(page)

    def receive(self, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
        """Return the next frame, which must be one of these. Raises OSError."""
        until = self._clock() + FRAME_SECONDS
        head = bytearray(_HEAD.size)
        self.fill(memoryview(head), until)
        number, length = _HEAD.unpack(head)
        kind = next((kind for kind in kinds if kind == number), None)
        if kind is None or length > kind.limit:
            raise PeerError(f"the peer sent a frame of type {number} and {length} bytes, which was not due")
        body = bytearray(length)
        self.fill(memoryview(body), until)
        return kind, bytes(body)

    def fill(self, memory: memoryview, until: float) -> None:
        """Read as many bytes as fit into this memory. Raises OSError."""
        while memory:
            left = until - self._clock()
            if left <= 0:
                raise PeerError("the peer was late")
            self._raw.settimeout(left)
            count = self._raw.recv_into(memory)
            if not count:
                raise PeerError("the peer has closed the connection")
            memory = memory[count:]

    @property
    def stranger(self) -> bool:
        """Return whether the peer is known to be another user's process, by the system's record of a unix socket."""
        if not self.local or not hasattr(socket, "SO_PEERCRED"):
            return False
        _, user, _ = _USER.unpack(self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
        return bool(user != os.geteuid())

    @property
    def local(self) -> bool:
        """Return whether the peer is a process of this host that files can be sent to."""
        return self._raw.family == socket.AF_UNIX

    def send_memory(self, fd: int) -> None:
        """Answer MAP with this file, or with none if it is -1. Raises OSError."""
        self._raw.settimeout(FRAME_SECONDS)
        frame = _HEAD.pack(FrameKind.MEMORY, MEMORY.size) + MEMORY.pack(fd >= 0)
        sent = socket.send_fds(self._raw, [frame], [fd]) if fd >= 0 else self._raw.send(frame)
        self._raw.sendall(frame[sent:])

    def receive_memory(self) -> int:
        """Return the file of a MEMORY frame, for the caller to close, or -1. Raises OSError."""
        self._raw.settimeout(FRAME_SECONDS)
        size = _HEAD.size + MEMORY.size
        frame, files, _, _ = socket.recv_fds(self._raw, size, 1)
        expected = _HEAD.pack(FrameKind.MEMORY, MEMORY.size) + MEMORY.pack(bool(files))
        if frame != expected:
            for fd in files:
                os.close(fd)
            raise PeerError("the peer sent something else than its memory")
        return files[0] if files else -1

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the peer sends something; return whether that is more than its end. Raises OSError."""
        self._raw.settimeout(seconds)
        return bool(self._peek())

    @property
    def silent(self) -> bool:
        """Return whether the peer has sent nothing, not even its end."""
        self._raw.settimeout(0)
        try:
            self._peek()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def stop(self) -> None:
        """End what another thread waits for here."""
        try:
            # Not SSLSocket's: from then on the other thread would read and send without TLS.
            self._wire.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            return

    def close(self) -> None:
        self._raw.close()

    def _peek(self) -> bytes:
        """Return the next byte on the wire, which stays there. As each frame begins a record, TLS holds none back."""
        return bytes(self._wire.recv(1, socket.MSG_PEEK))


def tls_of(files: PeerFiles | None, gives: bool) -> ssl.SSLContext | None:
    """Return what the connections of one side need, which shows a certificate and trusts an authority of its own; None
    where there is no TLS. Raises ConfigError naming the file."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if gives else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    where = f"kv_peer_ssl_certfile {files.certfile} with kv_peer_ssl_keyfile {files.keyfile}"
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password="")  # never asked for at a terminal
        where = f"kv_peer_ssl_ca_certs {files.ca_certs}"
        context.load_verify_locations(files.ca_certs)
    except OSError as error:
        raise ConfigError(f"{where} cannot be used: {error.strerror or error}") from error
    return context


def keys_in(body: bytes, count: int) -> list[bytes]:
    """Return the keys in a frame. Raises PeerError where there are more or fewer."""
    if len(body) != count * KEY_BYTES:
        raise PeerError(f"the peer sent {len(body)} bytes for {count} keys")
    return [body[start : start + KEY_BYTES] for start in range(0, len(body), KEY_BYTES)]


def greet(peer: FrameSocket, key: bytes, namespace: Namespace) -> None:
    """Begin a connection as the one that takes pages. Raises PeerRefused, OSError."""
    _check_user(peer, key)
    peer.secure()
    hello = _MAGIC + secrets.token_bytes(_NONCE) + namespace.digest
    peer.send(FrameKind.HELLO, hello)
    challenge = peer.receive(FrameKind.CHALLENGE)[1]
    said, proof = challenge[:-_MAC], challenge[-_MAC:]
    if len(challenge) != FrameKind.CHALLENGE.limit or not _proves(proof, key, b"gives", hello + said):
        raise PeerRefused("the peer has another key")
    peer.send(FrameKind.PROOF, _proof(key, b"takes", hello + said), namespace.text.encode())
    check_same(namespace, said[_NONCE:], peer.receive(FrameKind.WELCOME)[1])


def admit(peer: FrameSocket, key: bytes, namespace: Namespace, enter: Callable[[], None] = lambda: None) -> None:
    """Begin as the one that gives pages; `enter` may refuse a peer that has the key. Raises PeerRefused, OSError."""
    _check_user(peer, key)
    peer.secure()
    hello = peer.receive(FrameKind.HELLO)[1]
    if len(hello) != FrameKind.HELLO.limit or not hello.startswith(_MAGIC):
        raise PeerError("the peer speaks another protocol, or another version of it")
    said = secrets.token_bytes(_NONCE) + namespace.digest
    peer.send(FrameKind.CHALLENGE, said, _proof(key, b"gives", hello + said))
    proof = peer.receive(FrameKind.PROOF)[1]
    if not _proves(proof[:_MAC], key, b"takes", hello + said):
        raise PeerRefused("a peer that connected has another key")
    enter()
    peer.send(FrameKind.WELCOME, namespace.text.encode())
    check_same(namespace, hello[-32:], proof[_MAC:])


def _check_user(peer: FrameSocket, key: bytes) -> None:
    """Refuse another user's process where there is no key. Raises PeerRefused."""
    if not key and peer.stranger:
        raise PeerRefused("the peer runs as another user: give both sides a key (kv_peer_key_file)")


def _proof(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, who + said, "sha256")


def _proves(proof: bytes, key: bytes, who: bytes, said: bytes) -> bool:
    return hmac.compare_digest(proof, _proof(key, who, said))


def check_same(namespace: Namespace, digest: bytes, text: bytes) -> None:
    """Refuse a peer whose pages are of something else, whatever words it finds for them."""
    if digest != namespace.digest or sha256(text).digest() != digest:
        raise PeerRefused(f"the peer's pages are of something else: {_differences(namespace.text, text)}")


def _differences(ours: str, text: bytes) -> str:
    """Return what differs between two namespaces, with both values of it."""
    theirs = text.decode(errors="replace")
    try:
        facts, others = json.loads(ours), json.loads(theirs)
        names = [name for name in {**facts, **others} if facts.get(name) != others.get(name)]
        return ", ".join([f"{name} {others.get(name)}, ours {facts.get(name)}" for name in names])
    except (ValueError, AttributeError):
        return f"ours: {ours}; theirs: {theirs}"
