"""The process of a further front: `python -m gapless.server.further LINK LISTENER`, FrontSettings on standard input."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from gapless.base.errors import EngineDeadError
from gapless.engine import messages as m
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.backend import MessageBackend
from gapless.engine.frontdoor import open_assets
from gapless.engine.inputs import mix
from gapless.engine.seam import Sink
from gapless.server import links
from gapless.server.app import App
from gapless.server.errors import log
from gapless.server.fronts import FrontSettings
from gapless.server.links import FrontLink
from gapless.server.logs import logging_to_stderr
from gapless.server.metrics import MovedCounts
from gapless.server.run import UvicornServer, descriptors, drained, loop_factory, settle_memory, uvicorn_config
from gapless.server.tracing import open_tracing

COUNT_SECONDS = 0.1
"""Time between two reports of counts: the metrics page may be so old."""
SENT_ANYWAY = 10
"""One report in ten is sent even if nothing has moved: it shows that this front lives."""


class LinkedBackend(MessageBackend):
    """An engine behind the first front. Orders and questions are the first front's alone."""

    def __init__(self, link: FrontLink) -> None:
        super().__init__()
        self._link = link

    async def start(self, sink: Sink) -> None:
        self.sink = sink
        self._link.begin()
        await self._ready.wait()

    async def close(self) -> None:
        self._ready.clear()

    def _post(self, message: m.ToCore) -> bool:
        assert isinstance(message, m.Add | m.Abort), f"{type(message).__name__} is for the first front to send"
        self._link.send(message)
        return True


class FurtherServing:
    """A run of a further front, until the first drains it or ends."""

    def __init__(self, settings: FrontSettings, connection: socket.socket, listener: socket.socket) -> None:
        self._settings, self._listener = settings, listener
        self._asked_to_end, self._hurry = asyncio.Event(), asyncio.Event()
        self._link = FrontLink(connection, links.decode_to_further, self._take, self._first_gone)
        self._backend = LinkedBackend(self._link)
        engine, config = settings.engine, settings.server
        tracing = open_tracing(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
        # Requests without a seed draw theirs from a sequence of this front.
        seed = mix(engine.base_seed, settings.number)
        self._llm = AsyncLLM(self._backend, open_assets(*settings.located), seed=seed, config=engine)
        self._app = App(self._llm, config, engine.model, tracing, first=settings.first)
        self._sent_open = 0
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)  # the first front drains this one
        config, state = self._settings.server, self._app.state
        front = UvicornServer(uvicorn_config(self._app, config))
        serving = asyncio.create_task(front.serve(descriptors(self._listener)))
        working = asyncio.create_task(self._work(front))
        try:
            failed = await ended_unasked(self._asked_to_end, serving, working)
            if not failed:
                await drained(state, config.drain_seconds, self._hurry)
        finally:
            working.cancel()
            front.should_exit = True
            await asyncio.gather(working, serving, return_exceptions=True)
            await self._llm.close()
            if state.tracing is not None:
                await state.tracing.close()
            self._report()
            self._link.close()
        return int(failed)

    async def _work(self, front: UvicornServer) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start(front))
            await self._count()

    async def _start(self, front: UvicornServer) -> None:
        await self._llm.start()
        await front.up.wait()
        settle_memory()
        self._link.send(links.Listening())

    async def _count(self) -> None:
        for number in itertools.count():
            self._report(anyway=number % SENT_ANYWAY == 0)
            await asyncio.sleep(COUNT_SECONDS)

    def _report(self, anyway: bool = False) -> None:
        """Send new counts, if there are any, or all the same."""
        state = self._app.state
        counts = state.metrics.take()
        if anyway or state.open != self._sent_open or _any(counts):
            self._sent_open = state.open
            self._link.send(links.Counted(counts, state.open, round(self._llm.detok_seconds * 1e9)))

    def _take(self, messages: Sequence[Any]) -> None:
        of_engine: list[m.FromCore] = []
        for message in messages:
            if isinstance(message, links.FromEngine):
                of_engine.append(message)
                continue
            of_engine = self._deliver(of_engine)
            self._obey(message)
        self._deliver(of_engine)

    def _deliver(self, messages: list[m.FromCore]) -> list[m.FromCore]:
        if messages:
            self._backend.receive(messages)
        return []

    def _obey(self, message: object) -> None:
        match message:
            case links.EngineDown(text, last):
                self._link.send(links.DownNoted())
                if last:
                    self._backend.died(EngineDeadError(text))
                elif self._backend.ready():
                    self._backend.broke(EngineDeadError(text))
            case links.WeightsNamed(version):
                self._app.state.weight_version = version
            case links.AbortOpen(number, ids):
                task = asyncio.create_task(self._abort(number, ids))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            case links.ShowRequests(number, limit):
                self._link.send(links.RequestList(number, tuple(self._llm.latest_requests(limit))))
            case links.Drain():
                (self._hurry if self._asked_to_end.is_set() else self._asked_to_end).set()

    async def _abort(self, number: int, ids: tuple[str, ...]) -> None:
        state = self._app.state
        self._link.send(links.Aborted(number, await (state.abort_named(ids) if ids else state.llm.abort_all())))

    def _first_gone(self) -> None:
        self._asked_to_end.set()
        self._hurry.set()


async def ended_unasked(asked_to_end: asyncio.Event, *parts: asyncio.Task[None]) -> bool:
    """Return whether one of these ends before the order to end comes: it is logged."""
    asked = asyncio.create_task(asked_to_end.wait())
    ended, _ = await asyncio.wait((asked, *parts), return_when=asyncio.FIRST_COMPLETED)
    if asked in ended:
        return False
    asked.cancel()
    for part in ended:
        log.critical("this front ends unasked", exc_info=part.exception())
    return True


def _any(counts: MovedCounts) -> bool:
    return bool(counts.http) or any(counts.counters) or any([any(numbers) for numbers, _ in counts.histograms])


async def _serve(settings: FrontSettings, link: int, listener: int) -> int:
    return await FurtherServing(settings, socket.socket(fileno=link), socket.socket(fileno=listener)).run()


def main() -> int:
    link, listener = map(int, sys.argv[1:])
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontSettings)
    with logging_to_stderr(settings.server), asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, link, listener))


if __name__ == "__main__":
    sys.exit(main())
