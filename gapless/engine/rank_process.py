"""The process of a following rank, seen by its leader: a socket for messages, its stderr for our log."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gapless.base.errors import EngineDeadError, GaplessError, UserError
from gapless.engine import messages as m
from gapless.engine import rank_messages as rm
from gapless.engine.child import child_environment, exit_text
from gapless.engine.wire import Wire

FOLLOWER = "gapless.engine.follower"
"""Module of a following rank's process"""
END_SECONDS = 1.0
"""[s] Time between the end of a process's socket and its own; and the time in which it ends by itself"""
_TAIL_BYTES = 4_096


class RankProcess:
    """Starts one following rank, and reads what it says. The process ends with its parent."""

    def __init__(self, rank: int, world: int, memory: int) -> None:
        self.rank = rank
        self.died: GaplessError | None = None
        """Its last words"""
        self._tail = b""
        self._line = b""
        ours, theirs = socket.socketpair()
        self.wire = Wire(ours)
        with theirs:
            numbers = map(str, (rank, world, theirs.fileno(), memory))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", FOLLOWER, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), memory),
                env=child_environment(),
            )
        assert self._process.stdin is not None and self._process.stderr is not None
        self._life, self.stderr = self._process.stdin, self._process.stderr
        os.set_blocking(self.stderr.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: rm.ToRank) -> None:
        self.wire.send(m.encode([message]))

    def receive(self) -> Sequence[Any]:
        """Return its new messages. Raises ValueError for bytes that are none."""
        return [message for frame in self.wire.receive() for message in rm.decode_from_rank(frame)]

    def read_log(self) -> bool:
        """Copy new lines of its stderr to ours; False at its end."""
        try:
            while chunk := os.read(self.stderr.fileno(), _TAIL_BYTES):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                *lines, self._line = (self._line + chunk).split(b"\n")
                for line in lines:
                    print(f"rank {self.rank}: {line.decode(errors='replace')}", file=sys.stderr)
        except BlockingIOError:
            return True
        return False

    def take_words(self, words: rm.Failed) -> None:
        error = m.revive(words.kind, f"rank {self.rank}: {words.text}")
        self.died = error if isinstance(error, UserError) else EngineDeadError(str(error))

    def ended(self) -> GaplessError:
        """Return why a process that has hung up ends, in its own words if it left any."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.read_log()
        return self.died or EngineDeadError(exit_text(f"rank {self.rank}", code, self._tail))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process, and wait for that. May be called twice."""
        if self.stderr.closed:
            return
        with contextlib.suppress(OSError):
            self._life.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.read_log()
        self.stderr.close()
        self.wire.close()
