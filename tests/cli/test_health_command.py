"""`python -m gapless.cli.health`: a container's health check, by the address that its server was given."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, needs_openssl

from gapless.cli import health


class Healthy(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def address_string(self) -> str:
        return "here"

    def log_message(self, *_: Any) -> None: ...


class Loading(Healthy):
    status = 503


class OnPath(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


@contextmanager
def serving(server: HTTPServer) -> Iterator[HTTPServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def started_as(folder: Path, *words: str) -> Path:
    file = folder / "cmdline"
    file.write_text("".join(f"{word}\0" for word in words))
    return file


@pytest.mark.parametrize(("handler", "code"), [(Healthy, 0), (Loading, 1)])
def test_a_server_is_asked_at_the_port_of_its_command_line(tmp_path, handler, code, monkeypatch):
    with serving(HTTPServer(("127.0.0.1", 0), handler)) as server:
        python, port = "/usr/local/bin/python", str(server.server_port)
        line = started_as(tmp_path, python, "/usr/local/bin/gapless", "serve", "demo", "--host", "0.0.0.0", "-p", port)
        assert health.main(line) == code
        monkeypatch.setenv("GAPLESS_PORT", port)
        assert health.main(started_as(tmp_path, "/sbin/init", "--", "gapless", "serve")) == code


def test_a_server_on_a_unix_socket_is_asked_there(tmp_path):
    path = str(tmp_path / "socket")
    with serving(OnPath(path, Healthy)):  # type: ignore[arg-type]
        assert health.main(started_as(tmp_path, "gapless", "serve", "--uds", path)) == 0


def test_a_server_that_does_not_answer_is_not_healthy(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        line = started_as(tmp_path, "gapless", "serve", "--port", str(taken.getsockname()[1]))
        assert health.main(line) == 1
    assert "refused" in capsys.readouterr().err
    assert health.main(started_as(tmp_path, "sleep", "9")) == 1
    assert capsys.readouterr().err == "process 1 is no `gapless serve` but sleep\n"
    assert health.main(started_as(tmp_path, "sh", "-c", "gapless serve --api-key s3cret")) == 1
    assert "s3cret" not in capsys.readouterr().err


@needs_openssl
@pytest.mark.parametrize("clients", [(), ("--ssl-cert-reqs", "2", "--ssl-ca-certs", "CA")])
def test_a_server_that_speaks_https_is_asked_so(tmp_path, clients):
    files = Authority(tmp_path / "authority").files("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certfile, files.keyfile)
    with serving(HTTPServer(("127.0.0.1", 0), Healthy)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        line = started_as(
            tmp_path, "gapless", "serve", "--port", str(server.server_port), "--ssl-certfile", files.certfile, *clients
        )
        assert health.main(line) == 0
