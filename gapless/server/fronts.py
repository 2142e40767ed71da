"""Further fronts of a server (--api-server-count): more processes that speak HTTP, for one engine.

The first front has the engine's process. It passes a further front's requests on to it, and its tokens back; keys of
requests are made distinct here. A further front answers what generates by itself, and asks the first for all else.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gapless.base.config import EngineConfig
from gapless.base.errors import GaplessError, ServerError
from gapless.base.records import StepLogprobs, StepTokens
from gapless.engine import messages as m
from gapless.engine.child import child_environment
from gapless.engine.frontdoor import Located
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.seam import EngineInfo
from gapless.engine.trace import RequestRecord
from gapless.server import links
from gapless.server.config import ServerConfig
from gapless.server.errors import log
from gapless.server.links import FrontLink
from gapless.server.metrics import Metrics
from gapless.server.state import OtherFronts, ServerState

FURTHER = "gapless.server.further"
"""Module of a further front's process"""
KEY_BITS = 40
"""Bits of a request's own key; the bits above number its front, 0 for the first. Keys are exact in JSON too."""
FRONT_SECONDS = 5.0
"""A further front that does not answer for so long is left out of an answer."""
MAX_SILENT = 10
"""Seconds of this front's time that a further one, which reports every second, may be silent"""


class FrontSettings(NamedTuple):
    """All that a further front has from the first, as JSON on its standard input."""

    number: int
    engine: EngineConfig
    located: Located
    server: ServerConfig
    first: str
    """Path of the unix socket where the first front answers"""


class FurtherFront:
    """A further front, as the first holds it."""

    def __init__(self, number: int, process: Process | None) -> None:
        self.base = number << KEY_BITS
        self.number, self.process = number, process
        self.link: FrontLink
        self.listening, self.ended = asyncio.Event(), False
        self.silent: int | None = None
        """Seconds since its last message, from the first one on: imports take their time"""
        self.open = self.detok_ns = 0
        self.unaware = 0
        """Deaths of engines that the front has not heard of: it sends the requests again that it sends before"""

    def own(self, key: int) -> int:
        """Return the front's key of a request, from the engine's."""
        return key - self.base

    def shown(self, record: RequestRecord) -> RequestRecord:
        """Return a record with the engine's keys."""
        return record._replace(keys=tuple([key + self.base for key in record.keys]))


class Fronts(OtherFronts):
    """The further fronts of a server; `lost` is called when one ends that was not asked to, and its connections."""

    def __init__(self, lost: Callable[[GaplessError], None]) -> None:
        self._lost = lost
        self.fronts: dict[int, FurtherFront] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        """Awaited answers by front and number"""
        self._draining = False
        self.all_ended = asyncio.Event()
        self.all_ended.set()
        self.backend: SharedBackend
        self.metrics: Metrics

    def join(self, state: ServerState) -> None:
        """Become the other fronts of the first front with this state."""
        self.metrics, state.others, state.llm.abort_others = state.metrics, self, self.abort

    # Their processes

    async def start(self, settings: FrontSettings, listener: socket.socket) -> None:
        """Start a further front that accepts connections of this listening socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), listener.fileno()
            command = [sys.executable, "-P", "-m", FURTHER, *map(str, fds)]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=DEVNULL, pass_fds=fds, env=child_environment(), start_new_session=True
            )
        front = self.add(ours, settings.number, process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        self._inform(front)

    def add(self, connection: socket.socket, number: int, process: Process | None = None) -> FurtherFront:
        """Take a front at the other end of a connection."""
        front = self.fronts[number] = FurtherFront(number, process)
        self.all_ended.clear()
        front.link = FrontLink(
            connection, links.decode_to_first, partial(self._take, front), partial(self._gone, front)
        )
        front.link.begin()
        return front

    async def listening(self) -> None:
        """Return when all take requests."""
        await asyncio.gather(*[front.listening.wait() for front in self.fronts.values()])

    async def watch(self) -> None:
        """Kill a front that hangs. Seconds are counted singly, so a pause of this process is no silence of another."""
        while True:
            await asyncio.sleep(1)
            self.second()

    def second(self) -> None:
        """Count a second of silence of each, and kill the ones that have been silent too long."""
        for front in self.fronts.values():
            if front.silent is None or front.ended or self._draining:
                continue
            front.silent += 1
            if front.silent == MAX_SILENT and front.process is not None:
                log.critical("front %d of --api-server-count hangs and is killed", front.number)
                front.process.kill()

    def drain(self) -> None:
        """Let the running finish; called again, end them."""
        self._draining = True
        self._send(links.Drain())

    async def close(self) -> None:
        """Kill the ones that have not ended."""
        self._draining = True
        for front in self.fronts.values():
            front.link.close()
            if front.process is not None:
                if not front.ended:
                    front.process.kill()
                await front.process.wait()

    def _gone(self, front: FurtherFront) -> None:
        front.ended, front.open = True, 0
        if all([front.ended for front in self.fronts.values()]):
            self.all_ended.set()
        for (number, _), answer in self._asked.items():
            if number == front.number and not answer.done():
                answer.set_result(None)
        if not self._draining:
            self._lost(ServerError(f"front {front.number} of --api-server-count has ended: its log tells why"))

    # Orders of the server to them

    @property
    def open(self) -> int:  # type: ignore[override]
        return sum([front.open for front in self.fronts.values()])

    @property
    def detok_ns(self) -> int:  # type: ignore[override]
        return sum([front.detok_ns for front in self.fronts.values()])

    @property
    def pids(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple([front.process.pid for front in self.fronts.values() if front.process is not None])

    async def abort(self, ids: Sequence[str] = ()) -> int:
        answers = await self._ask(lambda number: links.AbortOpen(number, tuple(ids)))
        return sum([answer.count for _, answer in answers])

    async def latest(self, limit: int) -> list[RequestRecord]:
        answers = await self._ask(lambda number: links.ShowRequests(number, limit))
        return [front.shown(record) for front, answer in answers for record in answer.records]

    def name_weights(self, version: str) -> None:
        self._send(links.WeightsNamed(version))

    async def _ask(self, question: Callable[[int], m.Message]) -> list[tuple[FurtherFront, Any]]:
        """Return the answers of the fronts that give one."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        asked = {front: loop.create_future() for front in self.fronts.values() if not front.ended}
        self._asked |= {(front.number, number): answer for front, answer in asked.items()}
        try:
            self._send(question(number))
            if asked:
                await asyncio.wait(asked.values(), timeout=FRONT_SECONDS)
            return [(front, answer.result()) for front, answer in asked.items() if answer.done() and answer.result()]
        finally:
            for front in asked:
                del self._asked[front.number, number]

    def _send(self, *messages: m.Message) -> None:
        for front in self.fronts.values():
            front.link.send(*messages)

    # Requests and tokens

    def _take(self, front: FurtherFront, messages: Sequence[Any]) -> None:
        front.silent = 0
        for message in messages:
            match message:
                case m.Add() if front.unaware:
                    continue
                case m.Add(key):
                    error = self.backend.offer(msgspec.structs.replace(message, key=front.base + key))
                    if error is not None:
                        front.link.send(m.Refused(key, error))
                case m.Abort(key):
                    self.backend.abort(front.base + key)
                case links.DownNoted():
                    front.unaware -= 1
                case links.Listening():
                    front.listening.set()
                case links.Aborted(number) | links.RequestList(number):
                    answer = self._asked.get((front.number, number))
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case links.Counted(counts, open, detok_ns):
                    self.metrics.add(counts)
                    front.open, front.detok_ns = open, detok_ns

    def passed_on(self, messages: Sequence[m.FromCore]) -> list[m.FromCore]:
        """Send the fronts their part of an engine's messages, a frame for each, and return the rest."""
        own: list[m.FromCore] = []
        theirs: dict[int, list[m.Message]] = {}
        for message in messages:
            match message:
                case m.Tokens(settled):
                    for number, part in by_front(settled).items():
                        if number:
                            theirs.setdefault(number, []).append(m.Tokens(part))
                        else:
                            own.append(m.Tokens(part))
                case m.Admitted(key) | m.Refused(key) if number := key >> KEY_BITS:
                    mine = msgspec.structs.replace(message, key=key - (number << KEY_BITS))
                    theirs.setdefault(number, []).append(mine)
                case _:
                    own.append(message)
        for number, parts in theirs.items():
            if front := self.fronts.get(number):
                front.link.send(*parts)
        return own

    def engine_changed(self) -> None:
        """Send the engine's present state."""
        for front in self.fronts.values():
            self._inform(front)

    def _inform(self, front: FurtherFront) -> None:
        if self.backend.ready():
            front.link.send(m.Ready(self.backend.info))
        elif (death := self.backend.last_death) is not None:
            front.unaware += 1
            front.link.send(links.EngineDown(f"the engine died: {death}", self.backend.given_up))


class SharedBackend(ProcessBackend):
    """A ProcessBackend whose engine also serves further fronts."""

    def __init__(self, *args: Any, fronts: Fronts, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fronts = fronts
        fronts.backend = self
        self._sent: EngineInfo | None = None
        """The state that the fronts have: the info of a ready engine"""

    def receive(self, messages: Sequence[m.FromCore]) -> None:
        super().receive(self._fronts.passed_on(messages))
        if self.ready() and self.info is not self._sent:
            self._sent = self.info
            self._fronts.engine_changed()

    def died(self, error: Exception) -> None:
        super().died(error)
        self._fronts.engine_changed()

    def broke(self, error: Exception) -> None:
        super().broke(error)
        self._sent = None
        self._fronts.engine_changed()


def by_front(step: StepTokens) -> dict[int, StepTokens]:
    """Return the lines of each front, with its own keys, by its number; 0 is the first front."""
    keys, scored = step.keys >> KEY_BITS, step.logprobs
    if scored is None and not keys.any():
        return {0: step}
    scored_by = keys[:0] if scored is None else scored.keys >> KEY_BITS
    parts = {}
    for number in np.union1d(keys, scored_by).tolist():
        lines, base = keys == number, number << KEY_BITS
        part = StepTokens(step.step, step.keys[lines] - base, step.tokens[lines], step.flags[lines])
        if scored is not None and (rows := scored_by == number).any():
            columns = [column[rows] for column in scored]
            part = part._replace(logprobs=StepLogprobs(columns[0] - base, *columns[1:]))
        parts[number] = part
    return parts
