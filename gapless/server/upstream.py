"""HTTP calls to a server of ours on a unix socket, passed through as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.base.http import Connection, Headers, HttpError, HttpStream
from gapless.server.answer import body_part, write
from gapless.server.endpoint import ClientGone, Handler, HttpCall
from gapless.server.errors import ApiError, unavailable

CONNECT_SECONDS = 2.0
IN_PATH = "/:@!$&'()*+,;=-._~"
"""Characters that stand for themselves in a path, beside letters and digits (RFC 3986, 3.3)"""
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


def target_of(request: Request) -> str:
    """Return the path, quoted, and the query of a request as they stand in a request line."""
    query = request.scope["query_string"].decode("latin-1")
    return quote(request.scope["path"], safe=IN_PATH) + (f"?{query}" if query else "")


async def passed_through(path: str, request: Request, body: bytes, send: Send, missing: ApiError) -> None:
    """Have the server at this unix socket answer. Raises `missing` while no answer has begun, later HttpError."""
    begun = False
    try:
        async with called(path, request.method, target_of(request), request.headers.raw, body) as answer:
            begun = True
            await send({"type": "http.response.start", "status": answer.status, "headers": passed_on(answer.headers)})
            if request.method != "HEAD":
                async for part in answer.body():
                    await send(body_part(part))
            await send(body_part(b"", more=False))
    except HttpError as error:
        if begun:  # too late for a status: the connection ends, which the client can see
            raise
        raise missing from error


def asked_of(path: str) -> Handler:
    """Return a handler that has the first front answer, at this unix socket."""

    async def handler(call: HttpCall) -> ASGIApp:
        try:
            body = await call.request.body()
        except ClientDisconnect:
            raise ClientGone from None
        return _Asked(path, call, body)

    return handler


class _Asked:
    """The first front's answer to one call."""

    def __init__(self, path: str, call: HttpCall, body: bytes) -> None:
        self._path, self._call, self._body = path, call, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        missing = unavailable("the first front does not answer", "front_down")
        try:
            answer = passed_through(self._path, self._call.request, self._body, noted, missing)
            await self._call.while_wanted(answer, None)
        except ApiError:
            if not begun:
                raise
            await write(send, b"", more=False)  # the server closes


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that are not of one connection alone, with names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]


def _request(method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    own = [(b"host", b"localhost"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    passed = [pair for pair in passed_on(headers) if pair[0] not in (b"host", b"content-length")]
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), *[name + b": " + value for name, value in own + passed]]
    return b"\r\n".join([*lines, b"", body])
