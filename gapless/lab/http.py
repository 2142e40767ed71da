"""A small HTTP/1.1 client for all commands: every piece of an answer keeps the time at which it was read.

Only framing is parsed while answers arrive. A measurement parses their contents after the run, so that the client takes
little processor time from the server and delays none of its own readings.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import NamedTuple, TypeVar

from gapless.base.errors import ServerError
from gapless.lab.target import Target

T = TypeVar("T")
MANY_FILES = 1 << 16
MAX_HEAD = 64 << 10
MAX_CHUNK = 64 << 20
MAX_BODY = 512 << 20
"""Limits in bytes; a larger answer is refused."""


class Piece(NamedTuple):
    """Bytes of a body, and when they were read (seconds on the event loop's clock)."""

    at: float
    data: bytes


class HttpAnswer(NamedTuple):
    """One whole answer. `ended` is when its last byte was read."""

    status: int
    headers: Mapping[str, str]
    pieces: tuple[Piece, ...]
    ended: float

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


class HttpError(ServerError):
    """A connection failed, or received something that is not HTTP."""


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.split(b";")[0], 16)
    except ValueError as error:
        raise HttpError(f"not the size of a chunk: {line[:40]!r}") from error
    _limit(size, MAX_CHUNK)
    return size


def _limit(size: int, limit: int) -> None:
    if not 0 <= size <= limit:
        raise HttpError(f"the answer has a part of {size} bytes")


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers, names in lower case. Raises HttpError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise HttpError(f"the server does not speak HTTP/1.1: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


OnPiece = Callable[[Piece], None]


class Connection(asyncio.Protocol):
    """One connection, for one exchange at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self.touched = False
        """Whether a part of the present answer has arrived."""

    @property
    def idle(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    def send(self, data: bytes, on_piece: OnPiece | None = None) -> asyncio.Future[HttpAnswer]:
        """Write a request. The future gets the answer or HttpError; `on_piece` the pieces of one with status 200."""
        assert self.idle and self._transport is not None
        self._on_piece = on_piece
        self._rest = b""
        self._pieces: list[Piece] = []
        self._size, self._status, self._headers = 0, 0, dict[str, str]()
        self._ends_with_connection = self.touched = False
        self._reading = self._read()
        next(self._reading)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._answer is None:
            self.close()  # not the answer to any request
            return
        self.touched = True
        try:
            self._reading.send(data)
        except StopIteration:
            self._end()
        except HttpError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._now = None, self._clock()
        if self._answer is None:
            return
        if self._ends_with_connection and exc is None:
            self._end()
        else:
            self._end(HttpError(f"the connection broke off{f': {exc}' if exc else ''}"))

    def _end(self, error: HttpError | None = None) -> None:
        waiter, self._answer = self._answer, None
        assert waiter is not None
        if error is not None or self._headers.get("connection", "").lower() == "close":
            self.close()
        if waiter.done():
            return
        if error is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(HttpAnswer(self._status, self._headers, tuple(self._pieces), self._now))

    def _read(self) -> Generator[None, bytes, None]:
        """Read one answer. The generator is sent what arrives, and yields where it needs more."""
        while self._status < 200:  # 100 Continue and other interim answers come first
            self._status, self._headers = parse_head((yield from self._until(b"\r\n\r\n")))
        if self._status in (204, 304):
            return
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            yield from self._read_chunks()
            return
        length = self._headers.get("content-length", "")
        if length and not length.isdecimal():
            raise HttpError(f"Content-Length is {length[:40]!r}")
        if length:
            _limit(int(length), MAX_BODY)
        self._ends_with_connection = not length
        left = int(length) if length else MAX_BODY + 1  # more than _keep() takes
        while left:
            data = (self._rest or (yield))[:left]
            self._rest = b""
            self._keep(data)
            left -= len(data)

    def _read_chunks(self) -> Generator[None, bytes, None]:
        while size := _chunk_size((yield from self._until(b"\r\n"))):
            while len(self._rest) < size + 2:
                self._rest += yield
            if not self._rest.startswith(b"\r\n", size):
                raise HttpError("a chunk of the answer does not end where it said")
            self._keep(self._rest[:size])
            self._rest = self._rest[size + 2 :]
        while (yield from self._until(b"\r\n")):
            pass  # trailers, up to an empty line

    def _until(self, mark: bytes) -> Generator[None, bytes, bytes]:
        """Return the bytes before `mark`."""
        while (end := self._rest.find(mark)) < 0:
            _limit(len(self._rest), MAX_HEAD)
            self._rest += yield
        found, self._rest = self._rest[:end], self._rest[end + len(mark) :]
        return found

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        _limit(self._size, MAX_BODY)
        self._pieces.append(Piece(self._now, data))
        if self._on_piece is not None and self._status == 200:
            self._on_piece(self._pieces[-1])


Connect = Callable[[Callable[[], Connection]], Awaitable[Connection]]
"""Opens a connection with the protocol that the factory makes. Tests pass their own."""


class Client:
    """Requests to one server over connections that are kept open. Use as `async with`, or close it."""

    def __init__(self, target: Target, connect: Connect | None = None) -> None:
        self.target = target
        self._connect = connect or _connector(target)
        self._kept: list[Connection] = []

    async def __aenter__(self) -> Client:
        _raise_file_limit()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is idle. A request that is under way ends its connection when it is cancelled."""
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    async def send(self, data: bytes, on_piece: OnPiece | None = None) -> HttpAnswer:
        """Send a request and wait for its whole answer.

        `on_piece` is called with each piece of an answer with status 200 as it is read. Cancelling closes the
        connection. Raises HttpError, also when the target's timeout has passed.
        """
        try:
            async with asyncio.timeout(self.target.timeout):
                return await self._send(data, on_piece)
        except TimeoutError as error:
            raise HttpError(f"{self.target.base_url}: no whole answer in {self.target.timeout:g} s") from error
        except HttpError as error:
            raise HttpError(f"{self.target.base_url}: {error}") from error

    async def _send(self, data: bytes, on_piece: OnPiece | None) -> HttpAnswer:
        while self._kept:
            kept = self._kept.pop()
            if not kept.idle:
                continue
            try:
                return await self._exchange(kept, data, on_piece)
            except HttpError:
                if kept.touched:
                    raise
            break  # the server had closed a kept connection, which says nothing about the request
        return await self._exchange(await self._open(), data, on_piece)

    async def _exchange(self, connection: Connection, data: bytes, on_piece: OnPiece | None) -> HttpAnswer:
        try:
            answer = await connection.send(data, on_piece)
        except BaseException:
            connection.close()
            raise
        if connection.idle:
            self._kept.append(connection)
        return answer

    async def _open(self) -> Connection:
        clock = asyncio.get_running_loop().time
        try:
            return await self._connect(lambda: Connection(clock))
        except OSError as error:
            raise HttpError(f"cannot connect: {error}; is a server running there? (gapless serve)") from error


async def with_client(target: Target, ask: Callable[[Client], Awaitable[T]]) -> T:
    """Return what `ask` does with a client of its own."""
    async with Client(target) as client:
        return await ask(client)


def _raise_file_limit() -> None:
    """Raise the limit on open files: every request is a socket, and the usual soft limit is 1,024."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _connector(target: Target) -> Connect:
    at = target.address()
    context = ssl.create_default_context() if at.tls else None
    if context is not None and target.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def connect(factory: Callable[[], Connection]) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(factory, at.host, at.port, ssl=context)
        return connection

    return connect
