"""A small HTTP/1.1 client: every piece of an answer keeps the time at which it was read.

Only framing is parsed while answers arrive. A measurement parses their contents after the run, so that the client takes
little processor time from the server and delays none of its own readings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import NamedTuple, cast

from gapless.base.errors import ServerError

MAX_HEAD = 64 << 10
MAX_CHUNK = 64 << 20
MAX_BODY = 512 << 20
"""Limits in bytes; a larger answer is refused, or forwarded in parts."""
MANY_PARTS = 16

Headers = list[tuple[bytes, bytes]]


class Piece(NamedTuple):
    """Bytes of a body, and when they were read (seconds on the event loop's clock)."""

    at: float
    data: bytes


class HttpAnswer(NamedTuple):
    """One whole answer. `ended` is when its last byte was read."""

    status: int
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


def parse_head(head: bytes) -> tuple[int, Headers]:
    """Return status and headers, names in lower case. Raises HttpError."""
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise HttpError(f"the server does not speak HTTP/1.1: {first[:80]!r}")
    pairs = (line.partition(b":") for line in lines)
    return int(words[1]), [(name.strip().lower(), value.strip()) for name, _, value in pairs]


class HttpStream:
    """An answer whose head was read. If much of its body waits to be taken, reading from the server pauses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.status = 0
        self.headers: Headers = []
        self.ended: asyncio.Future[HttpAnswer]
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        """An empty chunk for the head, the chunks of the body, and None for the end"""
        self._transport = transport

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the chunks as they arrive. Raises HttpError if the answer breaks off."""
        while (part := await self.parts.get()) is not None:
            yield part
            if self.parts.empty() and not self._transport.is_closing():
                self._transport.resume_reading()
        self.ended.result()

    def add(self, data: bytes) -> None:
        self.parts.put_nowait(data)
        if self.parts.qsize() >= MANY_PARTS:
            self._transport.pause_reading()

    def end(self, ended: asyncio.Future[HttpAnswer]) -> None:
        ended.exception()  # looked at, so that asyncio does not complain of an answer that is left before its end
        self.parts.put_nowait(None)


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

    async def stream(self, data: bytes) -> HttpStream:
        """Write a request, and return its answer as soon as the head is read. Raises HttpError."""
        assert self._transport is not None
        stream = HttpStream(self._transport)
        stream.ended = self.send(data, stream=stream)
        stream.ended.add_done_callback(stream.end)
        if await stream.parts.get() is None:
            stream.ended.result()
        return stream

    def send(
        self, data: bytes, on_piece: OnPiece | None = None, stream: HttpStream | None = None
    ) -> asyncio.Future[HttpAnswer]:
        """Write a request. The future gets the answer or HttpError; `on_piece` the pieces of one with status 200.

        An answer that goes to `stream` has no pieces of its own.
        """
        assert self.idle and self._transport is not None
        self._on_piece, self._stream = on_piece, stream
        self._rest = b""
        self._pieces: list[Piece] = []
        self._size, self._status, self._headers = 0, 0, dict[bytes, bytes]()
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

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
        if error is not None or self._headers.get(b"connection", b"").lower() == b"close":
            self.close()
        if waiter.done():
            return
        if error is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(HttpAnswer(self._status, tuple(self._pieces), self._now))

    def _read(self) -> Generator[None, bytes, None]:
        """Read one answer. The generator is sent what arrives, and yields where it needs more."""
        while self._status < 200:  # 100 Continue and other interim answers come first
            self._status, headers = parse_head((yield from self._until(b"\r\n\r\n")))
        self._headers = dict(headers)
        if self._stream is not None:
            self._stream.status, self._stream.headers = self._status, headers
            self._stream.add(b"")
        if self._status in (204, 304):
            return
        if b"chunked" in self._headers.get(b"transfer-encoding", b"").lower():
            yield from self._read_chunks()
            return
        length = self._headers.get(b"content-length", b"")
        if length and not length.isdigit():
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
        if self._stream is not None:
            self._stream.add(data)
            return
        self._size += len(data)
        _limit(self._size, MAX_BODY)
        self._pieces.append(Piece(self._now, data))
        if self._on_piece is not None and self._status == 200:
            self._on_piece(self._pieces[-1])
