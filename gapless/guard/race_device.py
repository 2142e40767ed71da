"""Observes what devices report through a hook: launches, fences, and programs as they run, on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .clocks import VectorClock
from .race_agents import Agents, Launched
from .race_buffers import Checksum
from .race_checker import RaceChecker
from .race_mode import is_on, mode
from .race_report import READ, TAKE, WRITE

Program = Callable[..., None]


class FencePoint(NamedTuple):
    """The clock that a host thread learns when it sees the fence passed."""

    checker: RaceChecker
    clock: VectorClock

    def passed(self) -> None:
        if self.checker.active:
            self.checker.agents.learn(self.clock)
            self.checker.raise_pending()


@dataclass(frozen=True, eq=False, slots=True)
class Scheduled:
    """Replaces a program on its stream."""

    watch: DeviceWatch
    program: Program
    launched: Launched
    checksums: tuple[Checksum, ...]
    reads: Sequence[Any]
    """Held until the program has run: the checksums read their memory."""

    def __call__(self, *args: Any) -> None:
        self.watch.run(self, args)


class DeviceWatch:
    """Observes the hooks for a checker. A stream is any object with a `name`; its identity is the stream's."""

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._agents: Agents = checker.agents

    def launched(self, stream: Any, program: Program, args: Sequence[Any], reads: Sequence[Any]) -> Program:
        """A program is enqueued; the returned one is to run in its place."""
        checker, agents = self._checker, self._agents
        checker.raise_pending()
        if checker.cuda is not None and hasattr(stream, "raw"):
            # A GPU's stream: the program runs here and now, and enqueues operators that are seen one by one.
            checker.cuda.agent_of(stream.raw, stream.name)
            return program
        with checker.lock:
            agent = agents.stream(id(stream), stream.name, stream)
            agents.enqueue(agent)
            launched = Launched(agent, _name_of(program), checker.sites, checker.sites.here())
        checksums = tuple(checksum for what in (*args, *reads) for checksum in checker.checksums(what))
        return Scheduled(self, program, launched, checksums, reads)

    def replayed(self, stream: Any, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """A graph is enqueued whose operators cannot be seen: it touches what it declares."""
        checker, agents = self._checker, self._agents
        checker.raise_pending()
        with checker.lock:
            if checker.cuda is not None and hasattr(stream, "raw"):
                agent = checker.cuda.agent_of(stream.raw, stream.name)
            else:
                agent = agents.stream(id(stream), stream.name, stream)
            agents.enqueue(agent)
            launched = Launched(agent, name, checker.sites, checker.sites.here())
        before = agents.act_as(launched)
        try:
            checker.declared((*((tensor, READ) for tensor in reads), *((tensor, WRITE) for tensor in writes)))
        finally:
            agents.act_as(before)
        checker.raise_pending()

    def recorded(self, stream: Any) -> FencePoint:
        """A fence is recorded on the stream. It keeps the point and calls its `passed()` when a host sees it done."""
        self._checker.raise_pending()
        agent = self._agents.stream(id(stream), stream.name, stream)
        return FencePoint(self._checker, self._agents.record(agent, self._checker.sites.here()))

    def waits(self, stream: Any, mark: Any) -> None:
        """Later work of the stream comes after the fence that keeps this mark."""
        if isinstance(mark, FencePoint) and mark.checker is self._checker:
            with self._checker.lock:
                agent = self._agents.stream(id(stream), stream.name, stream)
                self._agents.enqueue(agent)
                agent.acquire(mark.clock)

    def touched(self, tensor: Any) -> None:
        """The calling thread takes the memory of this host tensor, to write it or to read it."""
        self._checker.reach(tensor, TAKE)

    def closed(self, streams: Sequence[Any]) -> None:
        """Nothing runs on these streams any more, and the calling thread knows it."""
        for stream in streams:
            self._agents.learn(self._agents.stream(id(stream), stream.name, stream).clock)

    def run(self, scheduled: Scheduled, args: tuple[Any, ...]) -> None:
        """Run the program as its stream."""
        checker, launched = self._checker, scheduled.launched
        if not checker.active:
            scheduled.program(*args)
            return
        self._verify(scheduled)
        before = self._agents.act_as(launched)
        try:
            if is_on(checker):
                scheduled.program(*args)
            else:
                with mode(checker):
                    scheduled.program(*args)
        finally:
            self._agents.act_as(before)
        self._verify(scheduled)

    def _verify(self, scheduled: Scheduled) -> None:
        launched = scheduled.launched
        for checksum in scheduled.checksums:
            if checksum.changed():
                self._checker.overwritten(checksum, launched.agent, launched.name, -1, launched.site)


def _name_of(program: Program) -> str:
    named = getattr(program, "func", program)
    return str(getattr(named, "__qualname__", type(named).__name__))
