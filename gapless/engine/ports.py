"""The two ports of an EngineDriver: a queue for a core on a thread, a wire for a core in a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable, Sequence

from gapless.engine import messages as m
from gapless.engine.wire import Wire

MOST_UNREAD = 64
"""Untaken deliveries above which the asyncio loop counts as not reading."""


class QueuePort:
    """Passes objects to and from the asyncio loop of the same process; `deliver` runs on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[m.FromCore]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[m.ToCore | None] = queue.SimpleQueue()
        self._ring: Callable[[], None] | None = None
        self.open = True
        self._sent = self._taken = 0

    @property
    def clear(self) -> bool:
        return self._sent - self._taken < MOST_UNREAD

    def post(self, message: m.ToCore) -> None:
        """Leave a message for the core; from any thread."""
        self._inbox.put(message)
        if self._ring is not None:
            self._ring()

    def ring_with(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    def receive(self, seconds: float) -> list[m.ToCore]:
        inbox = self._inbox
        found: list[m.ToCore | None] = []
        if seconds:
            with contextlib.suppress(queue.Empty):
                found.append(inbox.get(timeout=seconds))
        while not inbox.empty():
            found.append(inbox.get_nowait())
        return [message for message in found if message is not None]

    def wake(self) -> None:
        self._inbox.put(None)

    def send(self, messages: Sequence[m.FromCore]) -> None:
        if messages:
            self._sent += 1
            self.call(self._hand_over, messages)

    def _hand_over(self, messages: Sequence[m.FromCore]) -> None:
        self._taken += 1
        self._deliver(messages)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run something on the asyncio loop. If that loop is closed, the port closes too."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self.open = False


class WirePort:
    """Frames of msgpack over the socket of this process."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._rung = self._woken = False
        self._read = threading.Event()
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)

    @property
    def open(self) -> bool:
        return self._wire.open

    @property
    def clear(self) -> bool:
        return self._wire.clear

    def ring_with(self, ring: Callable[[], None]) -> None:
        """Watch the socket from a thread that never reads, since the core's thread may wait for the device."""
        threading.Thread(target=self._look, args=(ring,), name="wire-look", daemon=True).start()

    def _look(self, ring: Callable[[], None]) -> None:
        while self._wire.open:
            self._read.clear()
            try:
                select.select((self._wire,), (), ())
            except (OSError, ValueError):  # closed meanwhile
                return
            self._rung = True  # before it rings: a `receive` in between restarts this watch
            ring()
            self._read.wait()

    def receive(self, seconds: float) -> list[m.ToCore]:
        wire = self._wire
        if seconds:
            readable: list[Wire | int] = [wire, self._pipe[0]]
            select.select(readable, () if wire.clear else (wire,), (), seconds)
        if self._woken:
            self._woken = False
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
        found = [message for frame in wire.receive() for message in m.decode_to_core(frame)]
        if self._rung:
            self._rung = False
            self._read.set()
        return found

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full: woken already
            os.write(self._pipe[1], b"w")
        self._woken = True  # after the write: the byte is then readable

    def send(self, messages: list[m.FromCore]) -> None:
        if messages:
            self._wire.send(m.encode(messages))
        elif not self._wire.clear:
            self._wire.flush()

    def close(self) -> None:
        """Hang up; the watching thread ends too."""
        self._wire.close()
        self._read.set()
        for end in self._pipe:
            os.close(end)
