"""The client of all commands: requests to one server over kept connections, with TLS if its URL asks for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gapless.base.http import Connection, HttpAnswer, HttpError, OnPiece
from gapless.lab.target import Target

T = TypeVar("T")
MANY_FILES = 1 << 16

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
        """Close idle connections. A request that is under way ends its connection when it is cancelled."""
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
            break  # the server had closed a kept connection, which is no fault of the request
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
        except ssl.SSLCertVerificationError as error:
            mend = "set SSL_CERT_FILE to the file of its authority, or give --insecure"
            raise HttpError(f"its certificate is not trusted ({error.verify_message}): {mend}") from error
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
