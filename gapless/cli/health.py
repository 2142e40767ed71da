"""`python -m gapless.cli.health` ends with 0 if the server that a container runs is healthy, for its HEALTHCHECK.

The address comes from that server's own command line, variables and --config.
"""

from __future__ import annotations

import socket
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from gapless.cli.serve import command
from gapless.server.config import ServerConfig

FIRST_PROCESS = Path("/proc/1/cmdline")
HEALTH_SECONDS = 5.0
EVERYWHERE = ("0.0.0.0", "::", "")


def main(command_line: Path = FIRST_PROCESS) -> int:
    words = command_line.read_text(encoding="utf-8").split("\0")[:-1]
    if "serve" not in words:
        print(f"process 1 is no `gapless serve` but {words[0]}", file=sys.stderr)  # what follows may be a key
        return 1
    server = command().read(words[words.index("serve") + 1 :]).build(ServerConfig)
    try:
        return 0 if status(server) == 200 else 1
    except (OSError, HTTPException) as error:
        print(error, file=sys.stderr)
        return 1


def status(server: ServerConfig) -> int:
    """Return the status of /health; 200 where clients need certificates and a connection is made. Raises OSError and
    HTTPException where no server answers."""
    host = "localhost" if server.host in EVERYWHERE else server.host
    connection = HTTPConnection(host, server.port, timeout=HEALTH_SECONDS)
    if server.ssl_certfile and not server.uds:
        if server.ssl_cert_reqs == ssl.CERT_REQUIRED:
            connection.connect()
            connection.close()
            return 200
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it names the server's own host
        connection = HTTPSConnection(host, server.port, timeout=HEALTH_SECONDS, context=context)
    if server.uds:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(HEALTH_SECONDS)
        connection.sock.connect(server.uds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
