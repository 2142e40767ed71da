"""A proxy that keeps what clients say to a server, and the server behind it. The standard library alone."""

import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "test-key"
STEP_PATH = "/__step__"
KEPT_HEADERS = ("accept", "authorization", "content-type", "user-agent", "x-request-id")


class Recorder(ThreadingHTTPServer):
    """Passes every request on to `target`, and keeps it with the answer's status under the step that is played."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.steps: dict[str, list[dict[str, Any]]] = {"": []}
        self.step = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes a kept connection is no fault; anything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def exchanges(self, step: str) -> list[dict[str, Any]]:
        """Each kind of request once, in an order that does not depend on what ran at the same time."""
        asked = ("method", "path", "headers", "body")
        found = {json.dumps([one[name] for name in asked]): one for one in self.steps[step]}
        return [found[text] for text in sorted(found)]


class Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != STEP_PATH:
            self._pass(body)
            return
        self.server.step = body.decode()
        self.server.steps[self.server.step] = []
        self._reply(200, "text/plain", b"")

    def _pass(self, body: bytes | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() in KEPT_HEADERS}
        request = urllib.request.Request(self.server.target + self.path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, kind, answer = response.status, response.headers["content-type"], response.read()
        except urllib.error.HTTPError as error:
            status, kind, answer = error.code, error.headers["content-type"], error.read()
        kept = {"method": self.command, "path": self.path}
        kept["headers"] = {name.lower(): value for name, value in sorted(headers.items())}
        kept["body"] = None if body is None else json.loads(body)
        kept["status"] = status
        self.server.steps[self.server.step].append(kept)
        self._reply(status, kind, answer)

    def _reply(self, status: int, kind: str, answer: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def recording() -> Iterator[Recorder]:
    """`gapless serve` on the demo model under the name "demo", behind a recorder."""
    process, address = _serve()
    recorder = Recorder(address)
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        process.terminate()
        process.wait(30)


def _serve() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "gapless", "serve", "--port", "0", "--device", "cpu", "--api-key", KEY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if match := re.search(r" at (http://\S+?),", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, match[1]
    raise SystemExit(f"the server did not start:\n{''.join(told)}")
