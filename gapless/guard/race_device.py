"""Observes what devices report through a hook: launches, fences, and programs as they run, on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .race_agents import Agent, Launched, VectorClock
from .race_buffers import Checksum
from .race_checker import RaceChecker
from .race_mode import mode
from .race_report import READ, TAKE, WRITE

StreamWork = Callable[..., None]


class FencePoint(NamedTuple):
    """The clock that a host thread merges when it sees the fence passed."""

    checker: RaceChecker
    clock: VectorClock

    def passed(self) -> None:
        if self.checker.active:
            self.checker.agents.learn(self.clock)
            self.checker.raise_pending()


@dataclass(frozen=True, eq=False, slots=True)
class Scheduled:
    """Replaces a program on its stream, and runs it as that stream."""

    checker: RaceChecker
    program: StreamWork
    launched: Launched
    checksums: tuple[Checksum, ...]
    reads: Sequence[Any]
    """Held until the program has run: the checksums read their memory."""

    def __call__(self, *args: Any) -> None:
        if not self.checker.active:
            self.program(*args)
            return
        self._verify()
        self.launched.clock.join(self.launched.agent.met)
        with self.checker.agents.acting_as(self.launched), mode(self.checker):
            self.program(*args)
        self._verify()

    def _verify(self) -> None:
        program, site = self.launched.label
        for checksum in self.checksums:
            if checksum.changed():
                self.checker.overwritten(checksum, self.launched.agent, program, -1, site)


class DeviceWatch:
    """Observes the hooks for a checker. A stream is any object with a `name`; its identity is the stream's."""

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._agents = checker.agents

    def launched(self, stream: Any, program: StreamWork, args: Sequence[Any], reads: Sequence[Any]) -> StreamWork:
        """A program is enqueued; the returned one is to run in its place."""
        checker = self._checker
        checker.raise_pending()
        agent = self._agent(stream)
        if checker.device is not None and hasattr(stream, "raw"):
            return program  # it runs here and now, and enqueues operators that are seen one by one
        launched = self._launch(agent, _name_of(program))
        checksums = tuple(checksum for what in (*args, *reads) for checksum in checker.checksums(what))
        return Scheduled(checker, program, launched, checksums, reads)

    def replayed(self, stream: Any, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """A graph is enqueued whose operators cannot be seen: it touches its declared memory."""
        self._checker.raise_pending()
        with self._agents.acting_as(self._launch(self._agent(stream), name)):
            self._checker.declared((*((tensor, READ) for tensor in reads), *((tensor, WRITE) for tensor in writes)))
        self._checker.raise_pending()

    def recorded(self, stream: Any) -> FencePoint:
        """A fence is recorded on the stream. It keeps the point and calls its `passed()` when a host sees it done."""
        self._checker.raise_pending()
        return FencePoint(self._checker, self._agents.record(self._agent(stream), self._checker.sites.here()))

    def waits(self, stream: Any, mark: Any) -> None:
        """Later work of the stream comes after the fence that keeps this mark."""
        if isinstance(mark, FencePoint) and mark.checker is self._checker:
            self._agents.wait(self._agent(stream), mark.clock)

    def touched(self, tensor: Any) -> None:
        """The calling thread takes the memory of this host tensor, to write it or to read it."""
        self._checker.reach(tensor, TAKE)

    def closed(self, streams: Sequence[Any]) -> None:
        """Nothing runs on these streams any more, as the calling thread has waited for."""
        for stream in streams:
            self._agents.learn(self._agent(stream).clock)

    def gives(self, part: Any) -> None:
        """The running program gives its part of an operation that several devices do together."""
        self._agents.release(part)

    def takes(self, part: Any, read: Any) -> None:
        """The running program takes a part that another one gave: so does all that comes later on its stream."""
        self._agents.acquire(part)
        actor = self._agents.here()
        if isinstance(actor, Launched):
            actor.agent.met.join(actor.clock)
        self._checker.reach(read, READ)

    def reached(self, stream: Any, mark: Any, waits: bool) -> None:
        """The stream, which met others, passes a fence with this mark; or it continues behind that, if it `waits`."""
        if isinstance(mark, FencePoint) and mark.checker is self._checker:
            met = self._agent(stream).met
            if waits:
                met.join(mark.clock)
            else:
                mark.clock.join(met)

    def _agent(self, stream: Any) -> Agent:
        """The agent of a stream; a GPU's is known by its handle."""
        if self._checker.device is not None and hasattr(stream, "raw"):
            return self._checker.device.agent_of(stream.raw, stream.name)
        return self._agents.stream(id(stream), stream.name, stream)

    def _launch(self, agent: Agent, name: str) -> Launched:
        with self._checker.lock:
            self._agents.enqueue(agent)
            return Launched(agent, name, self._checker.sites.here())


def _name_of(program: StreamWork) -> str:
    named = getattr(program, "func", program)
    return str(getattr(named, "__qualname__", type(named).__name__))
