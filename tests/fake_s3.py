"""A tiny server that keeps objects as S3 does, in one of several moods."""

from __future__ import annotations

import http.server
import io
import threading
import time
from collections.abc import Iterator
from typing import Any


def chunks(file: Any) -> Iterator[bytes]:
    """The body of a request in chunks; what follows them is read too."""
    while size := int(file.readline().split(b";")[0], 16):
        yield file.read(size)
        file.readline()
    while file.readline().strip():
        """Checksums of what came."""


class _S3Server(http.server.ThreadingHTTPServer):
    """Serves the objects of one FakeS3 on a port of its own."""

    daemon_threads = True

    def __init__(self, fake: FakeS3) -> None:
        super().__init__(("127.0.0.1", 0), _S3Handler)
        self.fake = fake

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone."""


class _S3Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection, in the mood of its server."""

    protocol_version = "HTTP/1.1"
    server: _S3Server

    def log_message(self, *args: Any) -> None:
        """Keep requests out of the output of tests."""

    def answer(self, code: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.write(body)

    @property
    def name(self) -> str:
        """The path of the object that is asked for."""
        return self.path.partition("?")[0]

    def spoilt(self) -> bool:
        """Return whether the mood leaves the request without an answer of ours."""
        fake, until = self.server.fake, time.monotonic() + 60
        while fake.mood == "silent" and time.monotonic() < until:
            time.sleep(0.02)
        if fake.mood == "error":
            self.answer(503)
        self.close_connection = fake.mood != "sound"
        return fake.mood in ("closed", "error", "silent")

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(chunks(self.rfile))
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = b"".join(chunks(io.BytesIO(body)))
        if not self.spoilt():
            self.server.fake.objects[self.name] = body
            self.answer(200)

    def do_HEAD(self) -> None:
        if not self.spoilt():
            found = self.server.fake.objects.get(self.name)
            self.answer(404 if found is None else 200, length=len(found or b""))

    def do_GET(self) -> None:
        if self.spoilt():
            return
        found = self.server.fake.objects.get(self.name)
        if found is None:
            self.answer(404)
            return
        first, _, last = self.headers.get("Range", "").partition("=")[2].partition("-")
        part, short = found[int(first or 0) : int(last or len(found)) + 1], self.server.fake.mood == "short"
        self.answer(206 if first else 200, part[: len(part) // 2] if short else part, len(part))


class FakeS3:
    """Objects by path. `mood` is what happens to requests: sound, silent, closed, short or error."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.mood = "sound"
        self._server = _S3Server(self)
        where = f"http://127.0.0.1:{self._server.server_address[1]}"
        options = "scheme=http&region=us-east-1&use_virtual_addressing=false&access_key=a&secret_key=b"
        self.url = f"nixl://gapless-kv/tests?endpoint_override={where}&{options}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.mood = "closed"
        self._server.shutdown()
        self._server.server_close()
