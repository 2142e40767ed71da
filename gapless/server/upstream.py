"""One HTTP call to a server of ours on a unix socket, passed through as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httptools

CONNECT_SECONDS = 2.0
READ_BYTES = 65_536
_NOT_PASSED = frozenset(
    [b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"]
)

Headers = list[tuple[bytes, bytes]]


class UpstreamError(ConnectionError):
    """The server has gone, or does not speak HTTP."""


@asynccontextmanager
async def called(
    path: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> AsyncIterator[UpstreamAnswer]:
    """Call the server at this unix socket. Leaving the block ends the call, whatever has come of the answer.

    Raises UpstreamError, also while the body is read.
    """
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError) as error:
        raise UpstreamError(f"no server answers at {path}") from error
    try:
        writer.write(_request(method, target, headers, body))
        await writer.drain()
        answer = UpstreamAnswer(reader)
        while not answer.status:
            await answer.read()
        yield answer
    except (OSError, httptools.HttpParserError) as error:
        raise error if isinstance(error, UpstreamError) else UpstreamError(str(error)) from error
    finally:
        writer.close()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that are not of one connection alone, with names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]


def _request(method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    own = [(b"host", b"localhost"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    passed = [pair for pair in passed_on(headers) if pair[0] not in (b"host", b"content-length")]
    lines = [f"{method} {target} HTTP/1.1".encode(), *[name + b": " + value for name, value in own + passed]]
    return b"\r\n".join([*lines, b"", body])


class UpstreamAnswer:
    """An answer on its way. The parser calls the methods that begin with on_."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.headers: Headers = []
        self.status = 0
        """HTTP status, once all headers have come"""
        self._ended = False
        self._parts: deque[bytes] = deque()
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)

    async def read(self) -> None:
        """Take in what comes next. Raises UpstreamError where nothing does, and HttpParserError."""
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise UpstreamError("the server ended in the middle of its answer")
        self._parser.feed_data(data)

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            while self._parts:
                yield self._parts.popleft()
            if self._ended:
                return
            await self.read()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.headers, self.status = passed_on(self.headers), self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._ended = True
