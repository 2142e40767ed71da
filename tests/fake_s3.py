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


class FakeS3:
    """Objects by path. `mood` is what happens to requests: sound, silent, closed, short or error."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.mood = "sound"
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                """Nobody reads it."""

            def answer(self, code: int, body: bytes = b"", length: int | None = None) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.send_header("ETag", '"0"')
                self.end_headers()
                self.wfile.write(body)

            def spoilt(self) -> bool:
                until = time.monotonic() + 60
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
                    fake.objects[self.path.partition("?")[0]] = body
                    self.answer(200)

            def do_HEAD(self) -> None:
                if not self.spoilt():
                    found = fake.objects.get(self.path.partition("?")[0])
                    self.answer(404 if found is None else 200, length=len(found or b""))

            def do_GET(self) -> None:
                if self.spoilt():
                    return
                found = fake.objects.get(self.path.partition("?")[0])
                if found is None:
                    self.answer(404)
                    return
                first, _, last = self.headers.get("Range", "").partition("=")[2].partition("-")
                part = found[int(first or 0) : int(last or len(found)) + 1]
                self.answer(206 if first else 200, part[: len(part) // 2] if fake.mood == "short" else part, len(part))

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The client has gone."""

        self._server = Server(("127.0.0.1", 0), Handler)
        where = f"http://127.0.0.1:{self._server.server_address[1]}"
        options = "scheme=http&region=us-east-1&use_virtual_addressing=false&access_key=a&secret_key=b"
        self.url = f"nixl://gapless-kv/tests?endpoint_override={where}&{options}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.mood = "closed"
        self._server.shutdown()
        self._server.server_close()
