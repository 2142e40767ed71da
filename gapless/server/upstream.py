"""One HTTP call to a server of ours on a unix socket, passed through as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from gapless.base.http import Connection, Headers, HttpError, HttpStream

CONNECT_SECONDS = 2.0
_NOT_PASSED = frozenset(
    [b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"]
)


@asynccontextmanager
async def called(
    path: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> AsyncIterator[HttpStream]:
    """Call the server at this unix socket. Leaving the block ends the call, at any point of the answer.

    Raises HttpError, also while the body is read.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_unix_connection(lambda: Connection(loop.time), path)
    except (OSError, TimeoutError) as error:
        raise HttpError(f"no server answers at {path}") from error
    try:
        yield await connection.stream(_request(method, target, headers, body))
    finally:
        connection.close()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that are not of one connection alone, with names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]


def _request(method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    own = [(b"host", b"localhost"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    passed = [pair for pair in passed_on(headers) if pair[0] not in (b"host", b"content-length")]
    lines = [f"{method} {target} HTTP/1.1".encode(), *[name + b": " + value for name, value in own + passed]]
    return b"\r\n".join([*lines, b"", body])
