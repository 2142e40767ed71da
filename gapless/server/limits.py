"""Limits on headers and bodies, as plain ASGI: they hold for every route, whatever the handler does.

CORS headers lie around them: a page of another origin sees no status of an answer without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server.config import ServerConfig
from gapless.server.errors import ApiError, error_response

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_LABEL = 128
BODY_SECONDS = 10.0
_CLOSE = {"connection": "close"}


def guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Return the app with the limits of a server, and around them the headers for pages of its allowed origins."""
    limited = RequestLimits(app, config.max_body_bytes)
    if not config.allowed_origins:
        return limited
    return CORSMiddleware(limited, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])


def unrooted(path: str, root: str) -> str:
    """Return the path behind --root-path, which a proxy may have taken away already."""
    return path.removeprefix(root) or "/" if root and f"{path}/".startswith(f"{root}/") else path


def label_of(text: str) -> str:
    """Return a client's name for its request, or '' where it is none that logs and headers can bear."""
    return text if len(text) <= MAX_LABEL and text.isascii() and text.isprintable() else ""


def origin_headers(allowed: Sequence[str], headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the CORS headers of an answer that is made before there is an app, to a request with these headers."""
    if "*" in allowed:
        return {"access-control-allow-origin": "*"}
    origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
    return {"access-control-allow-origin": origin, "vary": "Origin"} if origin in allowed and origin else {}


class RequestLimits:
    """Refuses too many or too long headers (431) and too long (413), too slow (408) or encoded (415) bodies."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_headers(scope["headers"])
        except ApiError as error:
            return await error_response(error, scope)(scope, receive, send)
        await self._app(scope, _BodyGate(receive, self._max_body).receive, send)

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            limits = f"at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together are allowed"
            raise ApiError(431, limits, code="headers_too_large", headers=_CLOSE)
        for name, value in headers:
            if name == b"content-length" and int(value) > self._max_body:
                raise too_long(self._max_body)
            if name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError(415, "encoded bodies are not accepted", code="unsupported_encoding", headers=_CLOSE)


class _BodyGate:
    """Counts and times one body. After its end it only passes on, so that a handler can wait for a disconnect."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = self._limit = limit
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._open = True

    async def receive(self) -> Message:
        if not self._open:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout", headers=_CLOSE) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise too_long(self._limit)
        self._open = bool(message.get("more_body", False))
        return message


def too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large", headers=_CLOSE)
