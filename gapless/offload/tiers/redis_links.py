"""Connections of redis-py to one server, a cluster, or what sentinels name, whose answers are read into pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import BaseParser, ConnectionPool, parse_url
from redis.exceptions import (
    ConnectionError,
    InvalidResponse,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

LONGEST_ANSWER = 16_384
"""No answer but a page is longer, in bytes."""
SENTINEL_PORT = 26_379
FAULTS = (RedisError, RedisClusterException, OSError)

Reply = bytes | int | None
RedisCommand = Sequence[bytes]
"""A command's name, and a key"""
PoolOf = Callable[[bytes], ConnectionPool]
"""The pool of the server that has a key"""


class PageParser(BaseParser):  # type: ignore[misc]
    """Reads answers of RESP2, a value as long as `memory` into that; redis-py's own would copy it four times."""

    def __init__(self) -> None:
        self.memory: Sequence[memoryview] = ()
        self._file: BinaryIO

    def on_connect(self, connection: Any) -> None:
        self._file = connection._sock.makefile("rb")  # as every parser of redis-py does

    def on_disconnect(self) -> None:
        with suppress(AttributeError):  # never connected
            self._file.close()

    def read_response(self, disable_decoding: bool = False, timeout: Any = None) -> Reply | ResponseError:
        """Return the next answer, b"" for a value that went into `memory`. Of errors only the codes are kept: some
        servers repeat the command, and so the password."""
        line = self._file.readline(LONGEST_ANSWER)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server has closed the connection")
        kind, rest = line[:1], line[1:-2]
        try:
            if kind == b"$":
                return self._value(int(rest))
            if kind == b":":
                return int(rest)
        except ValueError:
            kind = b""
        if kind == b"-":
            code = rest.partition(b" ")[0].decode(errors="replace")
            return (ReadOnlyError if code == "READONLY" else ResponseError)(f"it answers {code}")
        if kind != b"+":
            raise InvalidResponse("what answers does not speak its protocol") from None
        return rest

    def _value(self, length: int) -> bytes | None:
        if length < 0:
            return None
        fits = length == sum(map(len, self.memory))
        if not fits and length > LONGEST_ANSWER:
            raise InvalidResponse(f"a value of {length} bytes, which is no page")
        value = b"" if fits else self._file.read(length)
        for part in self.memory if fits else ():
            if self._file.readinto(part) < len(part):  # type: ignore[attr-defined]
                raise ConnectionError("the server has closed the connection in the middle of a value")
        if len(value) != length * (not fits) or self._file.read(2) != b"\r\n":
            raise InvalidResponse("a value that does not end where it should")
        return value


class Link:
    """One connection, made when it is needed. Whatever goes wrong closes it, and for a while calls fail at once."""

    def __init__(self, pool: ConnectionPool, back_off: float) -> None:
        self._parser = PageParser()
        self._connection = pool.make_connection()
        self._connection.set_parser(lambda socket_read_size: self._parser)
        self._back_off, self._next_try = back_off, 0.0

    def send(self, commands: Sequence[RedisCommand]) -> None:
        """Send commands whose answers are read one by one. Raises one of FAULTS."""
        if not self._connection.is_connected and time.monotonic() < self._next_try:
            raise ConnectionError("the server has failed a moment ago")
        try:
            self._connection.connect()
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except FAULTS:
            self.close()
            raise

    def read(self, memory: Sequence[memoryview] = ()) -> Reply:
        """Return the next answer. Raises ResponseError for an error that the server reports, else another of FAULTS."""
        self._parser.memory = memory
        try:
            reply: Reply = self._connection.read_response()
        except ResponseError:
            raise
        except FAULTS:
            self.close()
            raise
        finally:
            self._parser.memory = ()  # it may be unmapped when the tier is closed
        return reply

    def close(self) -> None:
        self._connection.disconnect()
        if (now := time.monotonic()) >= self._next_try:  # calls that were refused meanwhile make it no later
            self._next_try = now + self._back_off


class RedisLinks:
    """Links to all servers that have pages. A server that fails answers None to everything."""

    def __init__(self, target: str, seconds: float, back_off: float) -> None:
        """Find the servers, and hear from one of them. Nothing waits longer than `seconds` for an answer; after a
        failure a server is left alone for `back_off`. Raises one of FAULTS, TypeError or ValueError."""
        self._back_off = back_off
        self._pool_of, self._renew = _pools(target, seconds)
        self._links: dict[ConnectionPool, Link] = {}
        self._next_renewal = 0.0
        link = self._link(b"")
        try:
            link.send([[b"PING"]])
            link.read()
        except FAULTS:
            link.close()
            raise

    def ask(self, commands: Sequence[RedisCommand], memories: Sequence[Sequence[memoryview]] = ()) -> list[Reply]:
        """Send commands together; return their answers, None for errors and for missing ones. Values as long as
        the memories in their places go there, and are b""."""
        answers: list[Reply] = [None] * len(commands)
        asked: dict[Link, list[int]] = {}
        lost = False
        for place, words in enumerate(commands):
            try:
                asked.setdefault(self._link(words[1]), []).append(place)
            except FAULTS:  # no server of the cluster has this key
                lost = True
        for link, places in [*asked.items()]:
            try:
                link.send([commands[place] for place in places])
            except FAULTS:
                lost = bool(asked.pop(link))
        for link, places in asked.items():
            try:
                for place in places:
                    try:
                        answers[place] = link.read(memories[place] if memories else ())
                    except ResponseError as error:
                        lost = lost or str(error).endswith("MOVED")
            except FAULTS:
                lost = True
        if lost:
            self._find_again()
        return answers

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _link(self, key: bytes) -> Link:
        pool = self._pool_of(key)
        if pool not in self._links:
            self._links[pool] = Link(pool, self._back_off)
        return self._links[pool]

    def _find_again(self) -> None:
        """Learn which servers a cluster has now."""
        if (now := time.monotonic()) >= self._next_renewal:
            self._next_renewal = now + self._back_off
            with suppress(*FAULTS):
                self._renew()


def _pools(target: str, seconds: float) -> tuple[PoolOf, Callable[[], None]]:
    """Return the client with a key's pool, and the function that looks for the servers again."""
    parts = urlsplit(target)
    scheme, _, kind = parts.scheme.partition("+")
    plain = f"{scheme}:{target.partition(':')[2]}"
    shared: dict[str, Any] = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    shared |= {"protocol": 2, "driver_info": None}
    once = Retry(NoBackoff(), 0)
    if kind == "cluster":
        options = parse_url(plain)
        for name in ("connection_class", "db"):
            options.pop(name, None)
        cluster = RedisCluster(retry=once, ssl=scheme == "rediss", **options, **shared)
        return (
            lambda key: cluster.get_redis_connection(cluster.get_node_from_key(key)).connection_pool,
            cluster.nodes_manager.initialize,
        )
    if kind == "sentinel":
        pool = _by_sentinels(target, shared | {"retry": once, "ssl": scheme == "rediss"})
    else:
        pool = ConnectionPool.from_url(plain.replace("redis:", "unix:", 1) if kind else plain, retry=once, **shared)
    return lambda key: pool, lambda: None


def _by_sentinels(target: str, shared: dict[str, Any]) -> ConnectionPool:
    """Return a pool of the server that is the master of the service in `//USER:PASSWORD@HOST,HOST/SERVICE/DB`."""
    parts = urlsplit(target)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    options = parse_url(f"redis://{user}{at}host/{database}?{parts.query}")
    del options["host"]
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in [*options] if name.startswith("sentinel_")}
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    asked = [urlsplit(f"//{host}") for host in hosts.split(",")]
    sentinels = [(one.hostname, one.port or SENTINEL_PORT) for one in asked]
    manager = Sentinel(sentinels, sentinel_kwargs=shared | tls | own, **shared, **options)
    pool: ConnectionPool = manager.master_for(service).connection_pool
    return pool
