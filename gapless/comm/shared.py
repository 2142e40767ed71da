"""The ranks of one host share one memory: a group for CPU tensors, a ring of orders, a board. `native/` has the C++."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gapless.base.errors import ConfigError, EngineError
from gapless.base.share import Share
from gapless.device import build

COMM_NAME = "gapless_comm"
_HERE = Path(__file__).parent / "native"
_KERNELS = _HERE.parent.parent / "kernels" / "native"
COMM_SOURCES = (*sorted(_HERE.glob("*.[ch]*")), *(_KERNELS / name for name in ("norm.h", "variant.h", "vec.h")))
"""Sources of the group, and of the kernels' norm, so that both norms have the same bits."""
MOST_FRAME = 2 << 20
"""Bytes of the longest order"""
MOST_RANKS = 64
_LINE_WORDS = 16
STOP_AT, LINE_BYTES, WAITED_AT = 64, 8 * _LINE_WORDS, 8 * 8
"""Offsets for devices that reach this memory: of the stop word, of one line to the next, of `waited` in a line"""
_NOTHING, _BROKEN = -1, -3


class BoardLine(NamedTuple):
    """A rank's line of the board: times are of CLOCK_MONOTONIC, in ns."""

    pulse: int
    """When its process was last alive, within 50 ms"""
    taken: int
    """Orders taken"""
    launched: int
    """Steps launched"""
    ended: int
    """Steps ended"""
    state: int
    """The phase of its start, as its host numbers them"""
    waited: int
    """Time that its programs have waited for other ranks"""
    waiting_since: int
    """When the wait began that one is in; 0 if none waits"""
    calls: int
    """Calls of the group that it has begun"""


_WORDS = (0, 1, 2, 3, 4, 8, 9, 10)
"""The words of a line that have the fields of BoardLine"""
_WAITED = _WORDS[BoardLine._fields.index("waited")]


class Board:
    """A line for each rank, written by it alone and read by all. The pulse needs no call: a thread of C++ writes it."""

    def __init__(self, memory: mmap.mmap, at: int, share: Share) -> None:
        """`at` is its first byte."""
        self._memory = memory
        with memoryview(memory) as whole:
            self._words = whole[at : at + share.world * _LINE_WORDS * 8].cast("Q")
        self._own = self._words[share.rank * _LINE_WORDS :][:_LINE_WORDS]

    def line(self, rank: int) -> BoardLine:
        at = rank * _LINE_WORDS
        return BoardLine(*[self._words[at + word] for word in _WORDS])

    def waited(self) -> list[int]:
        """Return `waited` of all lines: for each step, so no more is read."""
        return self._words[_WAITED::_LINE_WORDS].tolist()

    def taken(self, orders: int) -> None:
        self._own[1] = orders

    def launched(self, steps: int) -> None:
        self._own[2] = steps

    def ended(self, steps: int) -> None:
        self._own[3] = steps

    def enter(self, state: int) -> None:
        """Note the phase of this rank's start."""
        self._own[4] = state

    def close(self) -> None:
        """Let go of the memory, whose map keeps its file open."""
        self._own.release()
        self._words.release()
        self._memory.close()


class OrderRing:
    """Frames of bytes from the leader to every other rank, in order. Not even a dead reader blocks the writer."""

    def __init__(self, native: Any, number: int) -> None:
        self._native = native
        self._number = number
        self._frame = ctypes.create_string_buffer(MOST_FRAME)
        self._bytes = memoryview(self._frame)

    def room(self, nbytes: int) -> bool:
        """Return whether the slowest reader leaves room for a frame of this length."""
        return bool(_checked(self._native.room(self._number, nbytes)))

    def put(self, frame: bytes) -> None:
        """Append a frame; there is room."""
        assert _checked(self._native.put(self._number, frame, len(frame))) != _NOTHING, "the ring has no room"

    def take(self) -> bytes | None:
        """Return this rank's next frame, or None if there is none yet."""
        length = _checked(self._native.take(self._number, self._frame))
        return None if length == _NOTHING else self._bytes[:length].tobytes()

    def wait(self, seconds: float) -> bool:
        """Wait for this rank's next frame; return whether there is one. Ends early, without, once the ranks stop."""
        return bool(_checked(self._native.wait(self._number, int(seconds * 1e9))))


class SharedGroup:
    """Implements `Group` for CPU tensors. All its calls are operators of torch, so recorded steps have them too.

    A group belongs to the stream whose thread calls it first. A program that waits raises RuntimeError at `stop`.
    """

    def __init__(self, native: Any, number: int, share: Share) -> None:
        self.share = share
        self._native = native
        self._number = number
        ops = torch.ops.gapless_comm
        self._add, self._add_norm = ops.add.default, ops.add_norm.default
        self._gather, self._tell = ops.gather.default, ops.tell.default

    def add(self, y: Tensor) -> Tensor:
        self._add(y, self._number)
        return y

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: Tensor = self._add_norm(x, y, weight, eps, self._number)
        return found

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        self._gather(part, out, self._number)
        return out

    def tell(self, x: Tensor) -> Tensor:
        self._tell(x, self._number)
        return x

    @contextmanager
    def muted(self) -> Iterator[None]:
        _checked(self._native.mute(self._number, 1))
        try:
            yield
        finally:
            _checked(self._native.mute(self._number, -1))

    def stop(self) -> None:
        self._native.stop(self._number)

    def close(self) -> None:
        """Do nothing: the memory is that of `Commons`."""


class Commons:
    """One rank's view of the memory that the ranks of a host share. `fd` is its file, which other ranks attach to."""

    def __init__(self, fd: int, share: Share) -> None:
        """Take over the file. Raises ConfigError without the C++, EngineError where the memory cannot be mapped."""
        self.fd = fd
        self.share = share
        self._native = native = library()
        error = ctypes.create_string_buffer(200)
        self._number = number = native.open(fd, share.rank, share.world, error, len(error))
        if not number:
            raise EngineError(error.value.decode())
        self.group = SharedGroup(native, number, share)
        self.ring = OrderRing(native, number)
        self.board_at: int = native.board_at()
        """The offset of the board in the memory"""
        self.board = Board(mmap.mmap(fd, 0), self.board_at, share)

    @classmethod
    def create(cls, world: int) -> Self:
        """Make the memory, as the leader of `world` ranks. Raises ConfigError where the system cannot."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError("tensor_parallel_size: ranks share memory by memfd_create, which Linux has")
        assert 1 <= world <= MOST_RANKS, f"{world} ranks"
        nbytes = library().nbytes(world)
        fd = os.memfd_create("gapless-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, Share(0, world))

    @classmethod
    def attach(cls, fd: int, share: Share) -> Self:
        """Map the leader's memory from its file, as rank `share.rank`."""
        os.set_inheritable(fd, False)
        return cls(fd, share)

    @property
    def stopped(self) -> bool:
        """Whether a rank has stopped the group: for good."""
        return bool(self._native.stopped(self._number))

    def close(self) -> None:
        """Let go of the memory and the file; calls of the group raise from then on. May be called twice."""
        if self.fd >= 0:
            self._native.close(self._number)
            self.board.close()
            os.close(self.fd)
        self.fd = -1


class _Native(NamedTuple):
    """The library's functions. All but `wait` are short and keep the interpreter's lock."""

    nbytes: Any
    board_at: Any
    open: Any
    close: Any
    mute: Any
    stop: Any
    stopped: Any
    room: Any
    put: Any
    take: Any
    wait: Any


def load() -> build.Outcome:
    """Load the C++, built at the first call on this machine."""
    return build.operators(COMM_NAME, COMM_SOURCES)


def library() -> _Native:
    """Return the functions of the C++. Raises ConfigError where it cannot be built."""
    outcome = load()
    if outcome.library is None:
        raise ConfigError(
            f"tensor_parallel_size: ranks need C++ that is not there ({outcome.reason}): install g++ or clang++ if "
            "there is none"
        )
    short, long = ctypes.PyDLL(str(outcome.library)), ctypes.CDLL(str(outcome.library))
    i32, i64, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

    def named(name: str, *takes: Any, by: Any = short) -> Any:
        found = getattr(by, f"{COMM_NAME}_{name}")
        found.argtypes, found.restype = takes, i64
        return found

    return _Native(
        named("bytes", i32), named("board_at"), named("open", i32, i32, i32, address, i64), named("close", i64),
        named("mute", i64, i32), named("stop", i64), named("stopped", i64), named("room", i64, i64),
        named("put", i64, ctypes.c_char_p, i64), named("take", i64, address), named("wait", i64, i64, by=long),
    )  # fmt: skip


def _checked(result: int) -> int:
    """Return a call's result. Raises EngineError for a result that only a broken or closed group gives."""
    if result >= _NOTHING:
        return result
    raise EngineError("the ring of orders is broken" if result == _BROKEN else "the memory of the ranks is closed")
