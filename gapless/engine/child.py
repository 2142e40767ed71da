"""An engine process seen by its parent: a socket for messages, a control pipe for life signs, its stderr for our
log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gapless.base import progress
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, GaplessError
from gapless.engine import messages as m
from gapless.engine.wire import Wire

log = logging.getLogger("gapless.engine.process")

WORKER = ("gapless.engine.worker",)
"""Module of the engine's process, and its arguments."""
SILENCE_SECONDS = 10.0
"""A process silent for this long is taken for stopped or wedged, and killed. Heartbeats come each second."""
MAX_UNSENT = 4_096
MAX_TOGETHER = 64
"""Most messages of a frame: prompts may be long, and frames are bounded."""
_TAIL_BYTES = 4_096
_on_control = msgspec.json.Decoder(m.OnControl).decode


class Child:
    """Starts one engine process, carries its messages, and reports its end."""

    def __init__(self, receive: Callable[[Sequence[m.FromCore]], None], prefix: str = "") -> None:
        """`prefix` begins each line of the process in our log."""
        self._receive = receive
        self._prefix = prefix
        self._wire: Wire | None = None
        self._unsent: deque[m.ToCore] = deque()
        self._flush_planned = False
        self._tail = b""
        self._died: GaplessError | None = None
        self._heard = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._starting = True
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before start()."""
        return self._process.pid if self._process else None

    async def start(self, config: EngineConfig, worker: Sequence[str] = WORKER) -> None:
        """Launch the process. Its Ready message arrives through `receive`, or ended() returns."""
        module, *arguments = worker
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        self._loop.add_reader(self._wire, self._drain)
        pipe = asyncio.subprocess.PIPE
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                module,
                str(theirs.fileno()),
                *arguments,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is for the parent
            )
        progress.announce(f"{self._prefix}starting the engine's process")
        assert process.stdin and process.stdout and process.stderr
        readers = (self._read_control(process.stdout), self._read_stderr(process.stderr))
        self._tasks = [asyncio.create_task(reader) for reader in readers]
        with contextlib.suppress(ConnectionError):  # already dead: ended() has the reason
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            await process.stdin.drain()

    def watch_silence(self) -> None:
        """Start killing the process on silence; before it is ready, imports may block it."""
        self._heard = time.monotonic()
        self._starting = False
        self._tasks.append(asyncio.create_task(self._kill_when_silent()))

    def send(self, message: m.ToCore) -> bool:
        """Queue a message for this turn of the event loop; False if the child is dead, or its queue is full."""
        full = isinstance(message, m.Add) and message.output is None and len(self._unsent) >= MAX_UNSENT
        if self._closed or full:
            return False
        self._unsent.append(message)
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)
        return True

    async def ended(self) -> GaplessError:
        """Wait for the end of the process; returns the root cause, in its own words if it left any."""
        assert self._process is not None
        control, logs = self._tasks[:2]
        await asyncio.wait([control])
        code = await self._process.wait()
        await asyncio.wait([logs], timeout=0.5)
        self._drain()  # tokens sent before its death are still good
        return self._died or EngineDeadError(exit_text("the engine process", code, self._tail))

    async def stop(self, grace: float = 5.0) -> None:
        """Ask the process to close and exit; kill it after `grace` seconds."""
        self.send(m.Stop())
        self._flush()
        try:
            if self._process is not None:
                await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            pass
        await self.close()

    def kill(self) -> None:
        """Kill the process with its group, which its ranks are in: a stopped one does not see that its leader ends."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process if it still runs, and hang up. May be called twice."""
        self.kill()
        if not self._closed:
            # Hang up first, so that a caller cancelled below leaves nothing open.
            self._closed = True
            self._hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    def _flush(self) -> None:
        """Send the messages queued in this turn as one frame, unless an earlier frame is still unsent."""
        self._flush_planned = False
        wire = self._wire
        if wire is None or not wire.open:
            return
        while wire.open and wire.clear and self._unsent:
            count = min(len(self._unsent), MAX_TOGETHER)
            wire.send(m.encode([self._unsent.popleft() for _ in range(count)]))
        if not wire.clear:
            self._loop.add_writer(wire, self._write_on, wire)

    def _write_on(self, wire: Wire) -> None:
        """Send the rest: the child reads again."""
        wire.flush()
        if wire.clear:
            self._loop.remove_writer(wire)
            self._flush()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._loop.remove_reader(self._wire)
            self._loop.remove_writer(self._wire)
            self._wire.close()
            self._wire = None

    def _drain(self) -> None:
        """Take all received messages."""
        wire = self._wire
        if wire is None:
            return
        try:
            frames = wire.receive()
        except ValueError as error:
            self._hang_up()
            self.condemn(f"the engine process broke the protocol: {error}")
            return
        if not wire.open:
            self._hang_up()
        messages: list[m.FromCore] = []
        try:
            try:
                for frame in frames:
                    messages += m.decode_from_core(frame)
            finally:  # messages before a bad frame are still good
                self._receive(messages)
        except ValueError as error:  # msgspec's errors are ValueErrors too
            self.condemn(f"the engine process sent a message that breaks the protocol: {error}")
        except Exception as error:
            # A fault of this side. Undelivered messages are lost, and their readers would wait for ever.
            log.critical("a message of the engine process could not be delivered", exc_info=error)
            self.condemn(f"its messages could not be delivered: {type(error).__name__}: {error}")

    async def _read_control(self, pipe: asyncio.StreamReader) -> None:
        try:
            async for line in pipe:
                self._heard = time.monotonic()
                if line.strip():
                    self.take_control(_on_control(line))
        except ValueError as error:  # also for an endless line
            self.condemn(f"the engine process wrote other data than life signs to its control pipe: {error}")

    def take_control(self, message: m.OnControl) -> None:
        """Take a message of the control pipe."""
        match message:
            case m.Died(kind, text):
                self._died = m.revive(kind, text)
            case m.Doing(phase) if self._starting:  # the last ones may arrive after the socket's Ready
                progress.show(phase._replace(what=self._prefix + phase.what))

    async def _read_stderr(self, pipe: asyncio.StreamReader) -> None:
        """Copy the process's stderr to our log, line by line, so that a stuck stderr of ours does not stop it."""
        open_line = b""
        while chunk := await pipe.read(_TAIL_BYTES):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            *lines, open_line = (open_line + chunk).split(b"\n")
            if len(open_line) > _TAIL_BYTES:
                lines, open_line = [*lines, open_line], b""
            for line in lines:
                log.warning("%s%s", self._prefix, line.decode(errors="replace"))
        if open_line:
            log.warning("%s%s", self._prefix, open_line.decode(errors="replace"))

    async def _kill_when_silent(self) -> None:
        strikes = 0
        while strikes < 2:  # two in a row: if this loop was asleep, one round of reading settles it
            await asyncio.sleep(min(1.0, SILENCE_SECONDS / 4))
            strikes = strikes + 1 if time.monotonic() - self._heard > SILENCE_SECONDS else 0
        self.condemn(f"the engine process gave no sign of life for {SILENCE_SECONDS:g} s and was killed")

    def condemn(self, reason: str) -> None:
        """Kill the process, for this reason."""
        self._died = EngineDeadError(reason)
        self.kill()


def child_environment() -> dict[str, str]:
    """Return our environment, with this package importable from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def exit_text(who: str, code: int, tail: bytes) -> str:
    """Say how a process ended, with the end of its log."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    lines = tail.decode(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]  # stacks and modules follow it
    said = f"; last line of its log: {(fatal or lines)[-1][:500]}" if lines else ""
    return f"{who} {how}{said}"
