"""uvicorn's HTTP protocol with bounds of its own on the head of a request (bytes, and time to send them), and with
answers that clients of HTTP/1.0 can read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gapless.server.answer import DIRECT_BODY, DirectBody
from gapless.server.errors import ApiError
from gapless.server.limits import MAX_HEADER_BYTES, origin_headers

HEAD_SECONDS = 5.0
MAX_HEAD_BYTES = MAX_HEADER_BYTES + 16 * 1024
"""Raw bytes before the end of the headers; the exact limits are tested later, on parsed headers."""


class UnchunkedCycle(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which has no chunks: a body without a length ends with the connection."""

    _unsized = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._unsized = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._unsized else None
        elif self._unsized and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedProtocol(HttpToolsProtocol):
    """Limits the head of a request: a client could send one endless header, or a byte a minute, and hold memory."""

    allowed_origins: Sequence[str] = ()
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                ApiError(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UnchunkedCycle  # its task has not begun
            self.cycle.waiting_for_100_continue = False  # RFC 9110, 10.1.1
        self.scope["extensions"] = {DIRECT_BODY: DirectBody(self.cycle, self.flow)}  # type: ignore[dict-item]

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP", code="invalid_http"))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, "the headers did not arrive in time", code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        body = error.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= origin_headers(self.allowed_origins, self.headers or ())
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1") + b"\r\n" + body)
        self.transport.close()
