"""Reads where peers listen and how they know each other: engines that give each other copies of KV pages."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gapless.base.errors import ConfigError

ROLES = ("prefill", "decode", "both")
LISTEN = "127.0.0.1:5600"
PEER_TIERS = ("host:1GiB", "peer:1GiB")
"""Bytes of host memory of an engine with peers if the user gives no size"""
KEY_VARIABLE = "GAPLESS_KV_PEER_KEY"
LEAST_KEY_BYTES = 16


class PeerAddress(NamedTuple):
    """A peer's listening address: host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, field: str) -> PeerAddress:
        """Read HOST:PORT or unix:PATH. Raises ConfigError naming the field."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{field} must be HOST:PORT or unix:PATH, such as 127.0.0.1:5600, got {text!r}")
        try:
            host.encode("idna")
        except UnicodeError as error:  # resolvers and TLS raise it, each time
            raise ConfigError(f"{field}: {host!r} is no name of a host: give a name or an IP address") from error
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"{host}:{self.port}"

    @property
    def everywhere(self) -> bool:
        """Return whether it stands for all addresses of this machine: no peer can connect to it by this name."""
        return self._ip is not None and self._ip.is_unspecified

    @property
    def local(self) -> bool:
        """Return whether only this machine can reach it."""
        return bool(self.path) or self.host == "localhost" or (self._ip is not None and self._ip.is_loopback)

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:  # a name
            return None


class PeerFiles(NamedTuple):
    """Files in PEM form for TLS: this engine's certificate and key, and the authority of the peers' certificates."""

    certfile: str
    keyfile: str
    ca_certs: str


class PeerPlan(NamedTuple):
    """Settings of an engine that gives pages to peers or takes theirs."""

    listen: PeerAddress | None = None
    """Listening address for peers that take pages; None if it gives none"""
    peers: tuple[PeerAddress, ...] = ()
    """The peers that it takes pages from"""
    key: bytes = b""
    tls: PeerFiles | None = None
    """TLS files of connections over TCP; unix sockets have no TLS"""

    def __bool__(self) -> bool:
        """Return whether there are peers."""
        return self.listen is not None or bool(self.peers)

    def addresses(self) -> Iterator[tuple[str, PeerAddress]]:
        """Yield the addresses, each with its field."""
        for field, address in (("kv_peer_listen", self.listen), *[("kv_peers", peer) for peer in self.peers]):
            if address is not None:
                yield field, address


def role_plan(
    role: str | None, listen: str | None, peers: Sequence[str], files: Sequence[str | None] = ()
) -> PeerPlan:  # fmt: skip
    """Return the plan of connections, without the key; `files` are for PeerFiles. Raises ConfigError."""
    if role == "decode" and (listen or not peers):
        field, text = ("kv_peer_listen", "is for prefill and both") if listen else ("kv_peers", "must name prefillers")
        raise ConfigError(f"{field} {text}: role is decode, which takes pages and gives none")
    if role == "prefill" and peers:
        raise ConfigError("kv_peers is for decode and both: role is prefill, which gives pages and takes none")
    addresses = tuple([PeerAddress.parse(text, "kv_peers") for text in peers])
    if len(set(addresses)) < len(addresses):
        raise ConfigError("kv_peers names a peer twice: give it once")
    listen = listen or (LISTEN if role in ("prefill", "both") else None)
    plan = PeerPlan(PeerAddress.parse(listen, "kv_peer_listen") if listen else None, addresses)
    if plan and any(files):
        if not all(files):
            raise ConfigError(
                "kv_peer_ssl_certfile, kv_peer_ssl_keyfile and kv_peer_ssl_ca_certs belong together: "
                "give all three or none"
            )
        return plan._replace(tls=PeerFiles(*map(str, files)))
    for field, address in plan.addresses():
        if not address.local:
            raise ConfigError(
                f"{field}: {address} crosses machines, and pages would go there in the clear: give "
                "kv_peer_ssl_certfile, kv_peer_ssl_keyfile and kv_peer_ssl_ca_certs, or a loopback address or unix:PATH"
            )
    return plan


def with_key(plan: PeerPlan, path: str | None) -> PeerPlan:
    """Return the plan with the key that all peers share, from its file or else the environment; between unix sockets
    there may be none. Raises ConfigError."""
    key, where = os.environ.get(KEY_VARIABLE, "").strip().encode(), f"${KEY_VARIABLE}"
    if path is not None:
        where = f"kv_peer_key_file {path}"
        try:
            with open(path, "rb") as file:
                key = file.read(4096).strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    if len(key) < LEAST_KEY_BYTES and (key or path is not None):
        raise ConfigError(
            f"{where} has {len(key)} bytes, a key at least {LEAST_KEY_BYTES}: make one with openssl rand -hex 32"
        )
    for field, address in plan.addresses() if not key else ():
        if not address.path:  # other users have no permission to connect to a unix socket, and cannot be its server
            raise ConfigError(
                f"{field}: every user of its machine can connect to {address}, or listen there, so peers need a key: "
                f"give kv_peer_key_file or ${KEY_VARIABLE}, with what openssl rand -hex 32 has made, or use unix:PATH"
            )
    return plan._replace(key=key)
