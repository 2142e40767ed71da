"""What gapless devices tell the checker: launches, fences, and the programs as they run, on whatever thread."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gapless.guard.clocks import Clock
from gapless.guard.observe import Mark, Program
from gapless.guard.race_agents import Agents, Launched
from gapless.guard.race_buffers import Buffer
from gapless.guard.race_checker import RaceChecker
from gapless.guard.race_mode import RaceMode, is_on
from gapless.guard.race_report import TAKE, Race, Side


class Checksum(NamedTuple):
    """What a host buffer held when a program that uses it was launched, and how many writes had been seen."""

    buffer: Buffer
    memory: memoryview
    value: int
    writes: int


class FencePoint(NamedTuple):
    """What a host thread learns when it sees the fence passed."""

    checker: RaceChecker
    clock: Clock

    def passed(self) -> None:
        if self.checker.active:
            self.checker.agents.learn(self.clock)
            self.checker.raise_pending()


class Scheduled:
    """Stands in for a program on its stream."""

    __slots__ = ("checksums", "launched", "reads", "watch")

    def __init__(
        self, watch: DeviceWatch, launched: Launched, checksums: tuple[Checksum, ...], reads: Sequence[Any]
    ) -> None:
        self.watch = watch
        self.launched = launched
        self.checksums = checksums
        self.reads = reads  # held until it has run: the checksums look at their memory

    def __call__(self, *args: Any) -> None:
        self.watch.run(self, args)


class DeviceWatch:
    """Implements `Watcher` for a checker."""

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._agents: Agents = checker.agents

    def launched(self, stream: Any, program: Program, args: Sequence[Any], reads: Sequence[Any]) -> Program:
        checker, agents = self._checker, self._agents
        checker.raise_pending()
        if hasattr(stream, "raw"):
            # A real GPU stream: the program runs here and now, and enqueues operators that are seen one by one.
            return program
        with checker.lock:
            agent = agents.stream(id(stream), stream.name, stream)
            agents.enqueue(agent)
            launched = Launched(agent, program, checker.sites.here())
        return Scheduled(self, launched, tuple(self._checksums((*args, *reads))), reads)

    def recorded(self, stream: Any) -> Mark:
        self._checker.raise_pending()
        agent = self._agents.stream(id(stream), stream.name, stream)
        return FencePoint(self._checker, self._agents.record(agent, self._checker.sites.here()))

    def waits(self, stream: Any, mark: Mark | None) -> None:
        if isinstance(mark, FencePoint) and mark.checker is self._checker:
            with self._checker.lock:
                agent = self._agents.stream(id(stream), stream.name, stream)
                self._agents.enqueue(agent)
                agent.acquire(mark.clock)

    def touched(self, tensor: Any) -> None:
        self._checker.reach(tensor, TAKE)

    def closed(self, streams: Sequence[Any]) -> None:
        for stream in streams:
            self._agents.learn(self._agents.stream(id(stream), stream.name, stream).clock)

    def run(self, scheduled: Scheduled, args: tuple[Any, ...]) -> None:
        """Run the program as its stream."""
        checker, launched = self._checker, scheduled.launched
        if not checker.active:
            launched.program(*args)
            return
        self._verify(scheduled)
        before = self._agents.act_as(launched)
        try:
            if is_on(checker):
                launched.program(*args)
            else:
                with RaceMode(checker):
                    launched.program(*args)
        finally:
            self._agents.act_as(before)
        self._verify(scheduled)

    # Checksums of host memory, for writes that torch does not see.

    def _checksums(self, used: tuple[Any, ...]) -> Iterator[Checksum]:
        held = {buffer: memory for what in used for buffer, memory in self._checker.host_memory(what)}
        for buffer, memory in held.items():
            yield Checksum(buffer, memory, zlib.crc32(memory), buffer.writes)

    def _verify(self, scheduled: Scheduled) -> None:
        for buffer, memory, value, writes in scheduled.checksums:
            # Writes that were seen are ordered or reported by their clocks.
            if buffer.writes == writes and zlib.crc32(memory) != value:
                self._checker.add(buffer, self._overwritten(scheduled.launched, buffer))

    def _overwritten(self, launched: Launched, buffer: Buffer) -> Race:
        title = launched.agent.title()
        text = (
            f"its bytes changed after program {launched.name} was launched on {title} and before it had run: "
            f"somebody wrote it, unseen by torch, without waiting for a fence of {title} behind that program"
        )
        frames = self._checker.sites.frames(launched.site)
        reader = Side(title, launched.name, "uses", (), frames)
        writer = Side("a host thread", "", "writes (unseen)", ())
        mend = f"wait for the fence that {launched.agent.name} records behind the program, or write another slot"
        return Race(
            self._checker.name(buffer),
            f"bytes 0..{buffer.end - buffer.start}",
            text,
            mend,
            reader,
            writer,
            "overwritten",
        )
