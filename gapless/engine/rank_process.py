"""The process of a following rank, seen by its leader: a socket for messages, its stderr for our log.

Imports no torch, so that the processes of an engine import it at the same time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, GaplessError, UserError
from gapless.engine import messages as m
from gapless.engine.child import child_environment, exit_text
from gapless.engine.wire import Wire

FOLLOWER = "gapless.engine.follower"
"""Module of a following rank's process"""
RANK_END_SECONDS = 1.0
"""[s] A process that has hung up, or whose parent has, is killed if it does not end by itself in this time."""
MEMORY_TAG = b"m"
"""Byte that travels with the files of the ranks' memory, and of the host tier's"""
_TAIL_BYTES = 4_096
_MOST_READS = 64
"""Reads of a log after the end of its process, whose children may still write"""


class RankProcess:
    """Starts one following rank, and reads its messages and its log. The process ends with its parent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.died: GaplessError | None = None
        """The error that ends it, in its own words"""
        self._tail = b""
        self._line = b""
        self._socket, theirs = socket.socketpair()
        self.wire = Wire(self._socket)
        with theirs:
            numbers = map(str, (rank, world, theirs.fileno()))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", FOLLOWER, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )
        assert self._process.stdin is not None and self._process.stderr is not None
        self._life, self.stderr = self._process.stdin, self._process.stderr
        os.set_blocking(self.stderr.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def share(self, *memory: int) -> None:
        """Give it these files, before any message."""
        with contextlib.suppress(OSError):  # it is dead: its last words come
            socket.send_fds(self._socket, [MEMORY_TAG], memory)

    def send(self, message: m.Message) -> None:
        self.wire.send(m.encode([message]))

    def read_log(self) -> bool:
        """Copy some new lines of its stderr to ours; False at its end."""
        try:
            chunk = os.read(self.stderr.fileno(), _TAIL_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        *lines, self._line = (self._line + chunk).split(b"\n")
        with contextlib.suppress(OSError):  # ours has no reader
            for line in lines:
                print(f"rank {self.rank}: {line.decode(errors='replace')}", file=sys.stderr)
        return bool(chunk)

    def read_end(self) -> None:
        """Copy the rest of its stderr: it has ended."""
        for _ in range(_MOST_READS):
            if not self.read_log():
                break

    def take_words(self, kind: str, text: str) -> None:
        """Note an error that ends it."""
        error = m.revive(kind, f"rank {self.rank}: {text}")
        self.died = error if isinstance(error, UserError) else EngineDeadError(str(error))

    def ended(self) -> GaplessError:
        """Return why a process that has hung up ends, in its own words if it left any."""
        try:
            code = self._process.wait(RANK_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.read_end()
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
            self._process.wait(RANK_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.read_end()
        self.stderr.close()
        self.wire.close()


def start_ranks(config: EngineConfig) -> list[RankProcess]:
    """Start the processes of the ranks that follow."""
    world = config.tensor_parallel_size
    return [RankProcess(rank, world) for rank in range(1, world)]
