"""serve --pd 1p1d: a prefiller and a decoder as child processes, and the router in front of them, ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import gapless
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, GaplessError
from gapless.base.peers import KEY_VARIABLE
from gapless.server.config import ServerConfig
from gapless.server.logs import logging_to_stderr, say
from gapless.server.router import healthy, router_app
from gapless.server.run import (
    ENDS_WITH_STDIN,
    UvicornServer,
    address_of,
    descriptors,
    listen,
    loop_factory,
    uvicorn_config,
)

log = logging.getLogger("gapless.server")

START_POLL_SECONDS = 0.1
END_SECONDS = 10.0
"""How long children may take beyond their time to drain"""


def serve_pair(argv: Sequence[str], engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; what goes wrong at start-up is one line on stderr.

    `argv` are the flags of `serve`, which both children get, with their roles added.
    """
    try:
        if engine.role is not None or engine.kv_peers or engine.kv_peer_listen:
            raise ConfigError(
                "pd gives each of its two servers a role and peers: leave role and every kv_peer flag out"
            )
        with (
            logging_to_stderr(server),
            tempfile.TemporaryDirectory(prefix="gapless-pd-") as folder,
            listen(server) as listener,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            return runner.run(PairServing(argv, engine, server, Path(folder), listener).run())
    except GaplessError as error:
        say(server, logging.ERROR, f"error: {' '.join(str(error).split())}")
        return 1


class PairServing:
    """A run of the two servers and the router, from their start to the exit code."""

    def __init__(
        self, argv: Sequence[str], engine: EngineConfig, server: ServerConfig, folder: Path, listener: socket.socket
    ) -> None:
        self._argv, self._engine, self._config, self._listener = argv, engine, server, listener
        self._prefill, self._decode, self._kv = (str(folder / f"{name}.sock") for name in ("prefill", "decode", "kv"))
        self._asked_to_end = asyncio.Event()
        self._key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)
        self._children: dict[str, Process] = {}

    async def run(self) -> int:
        began = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_end.set)
        try:
            await self._begin("prefiller", 0, "prefill", self._prefill, "--kv-peer-listen")
            await self._begin("decoder", 1, "decode", self._decode, "--kv-peer")
            if await self._up():
                await self._route(time.monotonic() - began)
        finally:
            await self._end()
        return 0

    async def _begin(self, name: str, number: int, role: str, path: str, flag: str) -> None:
        # The last of equal flags counts.
        flags = [*self._argv, "--pd", "none", "--role", role, "--uds", path, flag, f"unix:{self._kv}"]
        env = {**os.environ, KEY_VARIABLE: self._key, ENDS_WITH_STDIN: "1"}
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(devices) > 1:
            env["CUDA_VISIBLE_DEVICES"] = devices[number]
        command = [sys.executable, "-m", "gapless", "serve", *flags]
        child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=DEVNULL, env=env, start_new_session=True
        )
        self._children[name] = child

    async def _up(self) -> bool:
        """Wait until both take requests; false when we are asked to end before. Raises EngineDeadError."""
        while not self._asked_to_end.is_set():
            for name, child in self._children.items():
                if child.returncode is not None:
                    raise EngineDeadError(f"the {name} could not be started: it says why above")
            if all(await asyncio.gather(healthy(self._prefill), healthy(self._decode))):
                return True
            await asyncio.sleep(START_POLL_SECONDS)
        return False

    async def _route(self, seconds: float) -> None:
        app = router_app(self._prefill, self._decode, self._kv, self._config)
        front = UvicornServer(uvicorn_config(app, self._config))
        serving = asyncio.create_task(front.serve(descriptors(self._listener)))
        watching = [asyncio.create_task(self._watch(name, child)) for name, child in self._children.items()]
        paths = (self._prefill, self._decode)
        where, curl = address_of(self._config, self._listener)
        sides = [
            f"  {name} {child.pid} at {path}\n"
            for (name, child), path in zip(self._children.items(), paths, strict=True)
        ]
        line = f"gapless {gapless.__version__} serves {self._engine.model}, prefill and decode apart, at {where}, ready"
        print(f"{line} after {seconds:.1f} s\n{''.join(sides)}  curl {curl}/health", flush=True)
        await self._asked_to_end.wait()
        for task in watching:
            task.cancel()
        self._signal()  # they let what runs finish, which passes through here
        await asyncio.wait(
            [asyncio.create_task(child.wait()) for child in self._children.values()], timeout=self._grace
        )
        front.should_exit = True
        await serving

    async def _watch(self, name: str, child: Process) -> None:
        code = await child.wait()
        goes_on = "the decoder computes prompts itself" if name == "prefiller" else "requests are refused with 503"
        log.error("the %s has ended with %s: %s", name, code, goes_on)

    @property
    def _grace(self) -> float:
        return self._config.drain_seconds + END_SECONDS

    def _signal(self) -> None:
        for child in self._children.values():
            if child.returncode is None:
                child.terminate()

    async def _end(self) -> None:
        self._signal()
        for child in self._children.values():
            try:
                async with asyncio.timeout(self._grace):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
