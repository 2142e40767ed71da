"""`python -m gapless.cli.health` ends with 0 if the server that a container runs is healthy, for its HEALTHCHECK.

The address comes from that server's own command line, variables and --config.
"""

from __future__ import annotations

import socket
import ssl
import sys
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

from gapless.cli.serve import command
from gapless.server.config import ServerConfig

FIRST = Path("/proc/1/cmdline")
SECONDS = 5.0
EVERYWHERE = ("0.0.0.0", "::", "")


def main(command_line: Path = FIRST) -> int:
    words = command_line.read_text(encoding="utf-8").split("\0")[:-1]
    if "serve" not in words:
        print(f"process 1 is no `gapless serve`: {' '.join(words)}", file=sys.stderr)
        return 1
    server = command().read(words[words.index("serve") + 1 :]).build(ServerConfig)
    try:
        return 0 if status(server) == 200 else 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


def status(server: ServerConfig) -> int:
    """Return the status of /health, or 200 once a server that wants a certificate of its clients takes a connection.

    Raises OSError where no server answers.
    """
    host = "localhost" if server.host in EVERYWHERE else server.host
    if server.ssl_cert_reqs == ssl.CERT_REQUIRED and not server.uds:
        socket.create_connection((host, server.port), SECONDS).close()
        return 200
    if server.ssl_certfile and not server.uds:
        here = ssl.create_default_context()
        here.check_hostname, here.verify_mode = False, ssl.CERT_NONE  # the certificate is for the name of the service
        connection: HTTPConnection = HTTPSConnection(host, server.port, timeout=SECONDS, context=here)
    else:
        connection = HTTPConnection(host, server.port, timeout=SECONDS)
    if server.uds:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(SECONDS)
        connection.sock.connect(server.uds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
