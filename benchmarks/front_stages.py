"""Measures the front's processor time a token, by stage: a server without an engine is fed an engine's frames.

    python benchmarks/front_stages.py --streams 256

The HTTP server runs in this process, and another process reads its streams. Steps of one token a stream are delivered
as the engine's frames, one at a time, or several together as to a front that lags. `text` is the frame decoded, each
token with its stream and made into text; `event` the chunk of server-sent events as well; `write` the socket too. A
stage is what its absence saves. Least of several runs; nothing sleeps, so caches are warmer than in a server.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import selectors
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import numpy as np
from front_cost import PATHS, body, request

from gapless.base.config import EngineConfig
from gapless.base.records import StepTokens
from gapless.engine import messages as m
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.backend import MessageBackend
from gapless.engine.frontdoor import open_assets
from gapless.engine.seam import EngineInfo, Sink
from gapless.lab.environment import describe_host
from gapless.server.app import App
from gapless.server.config import ServerConfig
from gapless.server.event_stream import DirectBody, EventStream
from gapless.server.run import UvicornServer, listen, uvicorn_config

STEPS = 96
TRIES = 7
TOKENS = range(10, 250)


class Hand(MessageBackend):
    """A backend whose tokens come by hand, once it has that many requests."""

    def __init__(self, streams: int, vocabulary: int) -> None:
        super().__init__()
        self.info = EngineInfo("none", "none", "int", vocabulary, 1 << 20, 1024, 1024, 0, 1, "1", 0)
        self._streams = streams
        self.keys: list[int] = []
        self.all_open = asyncio.Event()

    async def start(self, sink: Sink) -> None:
        self.sink = sink
        self._ready.set()

    def _post(self, message: m.ToCore) -> bool:
        if isinstance(message, m.Add):
            self.keys.append(message.key)
            self.receive([m.Admitted(message.key, 0)])
            if len(self.keys) == self._streams:
                self.all_open.set()
        return True

    async def close(self) -> None:
        self._ready.clear()

    def deliver(self, frames: list[bytes]) -> None:
        self.receive([message for frame in frames for message in m.decode_from_core(frame)])


def read_streams(port: int, streams: int, kind: str, stop: list[str]) -> None:
    """Open the streams and throw away what comes, until the server hangs up."""
    wanted = selectors.DefaultSelector()
    sent = request(PATHS[kind], {**body(kind, 500_000), "stop": stop})
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(sent)
        wanted.register(connection, selectors.EVENT_READ)
    while all(key.fileobj.recv(1 << 20) for key, _ in wanted.select()):  # type: ignore[union-attr]
        pass


class Bench:
    """`streams` open streams, and steps for them."""

    def __init__(self, backend: Hand, streams: int) -> None:
        self._backend = backend
        self._streams = streams
        keys, random = np.array(backend.keys, np.int64), np.random.default_rng(0)
        columns = [random.integers(TOKENS.start, TOKENS.stop, streams).astype(np.int32) for _ in range(STEPS)]
        steps = [StepTokens(number, keys, tokens, np.zeros_like(tokens)) for number, tokens in enumerate(columns)]
        self._frames = [m.encode([m.Tokens(step)]) for step in steps]

    async def us(self, together: int) -> float:
        """Microseconds of this thread's processor time a token."""
        return min([await self._try(together) for _ in range(TRIES)])

    async def _try(self, together: int) -> float:
        await asyncio.sleep(0.02)  # what was written before is read by now
        begin = time.thread_time_ns()
        for at in range(0, STEPS, together):
            self._backend.deliver(self._frames[at : at + together])
            await asyncio.sleep(0)  # the event loop writes at the end of its turn
            await asyncio.sleep(0)
        return (time.thread_time_ns() - begin) / STEPS / self._streams / 1e3

    async def row(self, together: int) -> list[float]:
        """[text, event, write, all]"""
        whole = await self.us(together)
        with patch.object(DirectBody, "put", lambda body, data: None):
            event = await self.us(together)
        with patch.object(EventStream, "put", lambda stream, delta: True):
            text = await self.us(together)
        return [text, event - text, whole - event, whole]


async def served(streams: int, kind: str, stop: list[str], work: Callable[[Bench], Awaitable[None]]) -> None:
    """Run `work` on that many streams of a server."""
    front = open_assets(EngineConfig())
    backend = Hand(streams, front.tokenizer.vocab_size)
    config = ServerConfig(port=0, disable_uvicorn_access_log=True, log_level="warning")
    async with AsyncLLM(backend, front) as llm:
        app = App(llm, config, "demo")
        with listen(config) as listener:
            server = UvicornServer(uvicorn_config(app, config))
            serving = asyncio.create_task(server.serve([listener]))
            arguments = (listener.getsockname()[1], streams, kind, stop)
            reader = multiprocessing.get_context("spawn").Process(target=read_streams, args=arguments, daemon=True)
            reader.start()
            await backend.all_open.wait()
            bench = Bench(backend, streams)
            await bench.us(1)  # the heads are out after this
            await work(bench)
            reader.kill()  # its streams end as those of a client that has gone
            server.should_exit = True
            await serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[256])
    parser.add_argument("--kind", nargs="+", default=["completions"], choices=tuple(PATHS))
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4], help="steps a delivery")
    parser.add_argument("--stop", nargs="*", default=[], help="stop strings of each request")
    options = parser.parse_args()
    print(f"{describe_host()['cpu']}, {os.cpu_count()} cores; microseconds of processor time a token\n")
    print("| api | streams | steps a delivery | text | event | write | all | tokens/s of one core |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")

    async def table(bench: Bench) -> None:
        for together in options.together:
            times = await bench.row(together)
            cells = [kind, str(streams), str(together), *(f"{us:.2f}" for us in times), f"{1e6 / times[-1]:,.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)

    for kind in options.kind:
        for streams in options.streams:
            with asyncio.Runner(loop_factory=_loop()) as runner:
                runner.run(served(streams, kind, options.stop, table))
    return 0


def _loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The server's own, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
