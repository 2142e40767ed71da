"""serve --pd 1p1d: a prefiller and a decoder as child processes, and the router in front of them, ended together.

A child that has ended is started again after a while. The router's own end, which children see at a pipe, ends all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import gapless
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, GaplessError, exit_code
from gapless.base.peers import KEY_VARIABLE
from gapless.base.variables import SEEN_DEVICES
from gapless.server.config import ServerConfig
from gapless.server.errors import log
from gapless.server.folders import own_folder
from gapless.server.logs import logging_to_stderr, say
from gapless.server.router import PairRouter, healthy
from gapless.server.run import (
    ENDS_WITH_STDIN,
    UvicornServer,
    address_of,
    check_tls,
    descriptors,
    listen,
    loop_factory,
    refuse_beside_engines,
    uvicorn_config,
)

START_POLL_SECONDS = 0.1
END_SECONDS = 10.0
"""How long children may take beyond their time to drain"""
SIDE_PROGRAM = ("-m", "gapless")
"""Python's arguments for the server of a side"""
COUNT_PROGRAM = "import torch; print(torch.accelerator.device_count())"
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
"""Seconds before a child is started again; twice as many each time, until one has lasted LAST_PAUSE"""


class Side(NamedTuple):
    """One of the two servers."""

    name: str
    number: int
    role: str
    path: str
    """Path of the unix socket for HTTP"""
    flag: str
    """The argument with the prefiller's address for pages"""
    without: str
    """The effect of its absence"""


def devices_of(side: int, engine: EngineConfig, env: Mapping[str, str], seen: int) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the variables that give a side devices of its own: its part of the ones that `env` names, if
    these are enough for both. If it names none of the `seen` devices, the decoder has the ones after the
    prefiller's; one that is named for an only rank is both sides'."""
    numbers = engine.devices
    ranks, named = len(numbers), {name: env[name].split(",") for name in SEEN_DEVICES if name in env}
    if side and not named and (seen >= 2 and engine.device_ids is None if ranks == 1 else seen):
        return ["--device-ids", ",".join(str(ranks + number) for number in numbers)], {}
    enough = {name: devices for name, devices in named.items() if len(devices) >= 2 * ranks}
    return [], {name: ",".join(devices[side * ranks :][:ranks]) for name, devices in enough.items()}


async def seen_devices() -> int:
    """Return the number of accelerators that torch sees, in a process of its own: this one never needs torch."""
    count = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", COUNT_PROGRAM, stdout=PIPE)
    said, _ = await count.communicate()
    return int(said) if said.strip().isdigit() else 0  # torch fails in the sides, too


def serve_pair(argv: Sequence[str], engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; what goes wrong at start-up is one line on stderr.

    `argv` are the flags of `serve`, which both children get, with their roles added.
    """
    try:
        if engine.role is not None or engine.peer_plan or engine.file_without_peers:
            raise ConfigError(
                "pd gives each of its two servers a role and peers: leave role and every kv_peer flag out"
            )
        if server.api_server_count > 1:
            raise ConfigError("api_server_count: one router answers for the two servers of pd: leave one of them out")
        refuse_beside_engines(engine, server)
        check_tls(server)
        with (
            logging_to_stderr(server),
            own_folder() as folder,
            listen(server) as listener,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            return runner.run(PairServing(argv, engine, server, folder, listener).run())
    except GaplessError as error:
        say(server, logging.ERROR, f"error: {' '.join(str(error).split())}")
        return exit_code(error)


class PairServing:
    """A run of the two servers and the router, from their start to the exit code."""

    def __init__(
        self, argv: Sequence[str], engine: EngineConfig, server: ServerConfig, folder: Path, listener: socket.socket
    ) -> None:
        self._argv, self._engine, self._config, self._listener = argv, engine, server, listener
        self._prefill, self._decode, self._kv = (str(folder / f"{name}.sock") for name in ("prefill", "decode", "kv"))
        goes_on, stops = "the decoder computes prompts itself", "requests are refused with 503"
        self._sides = (
            Side("prefiller", 0, "prefill", self._prefill, "--kv-peer-listen", goes_on),
            Side("decoder", 1, "decode", self._decode, "--kv-peer", stops),
        )
        self._asked_to_end = asyncio.Event()
        self._key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)
        self._children: dict[str, Process] = {}
        self._seen = 0

    async def run(self) -> int:
        began = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_end.set)
        try:
            prefiller, decoder = self._sides
            await self._begin(prefiller)
            self._seen = await seen_devices()
            await self._begin(decoder)
            if await self._up():
                await self._route(time.monotonic() - began)
        finally:
            await self._end()
        return 0

    async def _begin(self, side: Side) -> None:
        # The last of equal flags counts.
        flags = [*self._argv, "--pd", "none", "--role", side.role, "--uds", side.path, side.flag, f"unix:{self._kv}"]
        chosen, own = devices_of(side.number, self._engine, os.environ, self._seen)
        env = {**os.environ, **own, KEY_VARIABLE: self._key, ENDS_WITH_STDIN: "1"}
        command = [sys.executable, *SIDE_PROGRAM, "serve", *flags, *chosen]
        child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=DEVNULL, env=env, start_new_session=True
        )
        self._children[side.name] = child

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
        router = PairRouter(self._prefill, self._decode, self._kv, self._config)
        front = UvicornServer(uvicorn_config(router, self._config))
        serving = asyncio.create_task(front.serve(descriptors(self._listener)))
        keeping = [asyncio.create_task(self._keep(side)) for side in self._sides]
        where, curl = address_of(self._config, self._listener)
        sides = [f"  {side.name} {self._children[side.name].pid} at {side.path}\n" for side in self._sides]
        line = f"gapless {gapless.__version__} serves {self._engine.model}, prefill and decode apart, at {where}, ready"
        print(f"{line} after {seconds:.1f} s\n{''.join(sides)}  curl {curl}/health", flush=True)
        await self._asked_to_end.wait()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await self._end()  # before the front's, since what runs passes through here
        front.should_exit = True
        await serving

    async def _keep(self, side: Side) -> None:
        """Start a side again whenever it has ended."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            code = await self._children[side.name].wait()
            if time.monotonic() - began > LAST_PAUSE:
                pause = FIRST_PAUSE
            text = "the %s has ended with %s: it is started again in %g s; until then %s"
            log.error(text, side.name, code, pause, side.without)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
            try:
                await self._begin(side)
            except OSError as error:  # a fork that the machine refused
                log.error("the %s cannot be started: %s", side.name, error.strerror or error)
            else:
                log.info("the %s was started again: process %d", side.name, self._children[side.name].pid)

    async def _end(self) -> None:
        """Have the sides finish their requests, and kill a side that takes too long for that."""
        running = [child for child in self._children.values() if child.returncode is None]
        for child in running:
            child.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_seconds + END_SECONDS):
                await asyncio.gather(*[child.wait() for child in running])
        for child in running:
            if child.returncode is None:
                child.kill()
                await child.wait()
