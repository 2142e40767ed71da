"""Calls of an LMCache server: one request and one answer each, many under way at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

MAX_ANSWER = 1 << 20
"""Bytes of the longest answer; one that is longer costs the server the connection."""

T = TypeVar("T")


class Operation(IntEnum):
    """The server's numbers of its operations."""

    LOOKUP = 8
    QUERY = 9
    FREE = 12
    END = 13
    REGISTER = 14
    PREPARE_STORE = 16
    COMMIT_STORE = 17
    PREPARE_RETRIEVE = 18
    COMMIT_RETRIEVE = 19
    CHUNK_SIZE = 21


class PoolSlot(msgspec.Struct):
    offset: int
    length: int


class PoolSlots(msgspec.Struct):
    slots: list[PoolSlot] = []


class ChunkPlace(msgspec.Struct):
    """The server's answer to a reader or writer."""

    context: PoolSlots
    success: bool = True


class Registered(msgspec.Struct):
    shm_name: str
    pool_size: int


class LMCacheClient:
    """One connection, made when it is needed. After a failure the server is left alone for a while."""

    def __init__(self, address: str, seconds: float, back_off: float, ready: Callable[[], None]) -> None:
        """`ready` is called when there is a connection, to introduce us. Raises ImportError without ZeroMQ."""
        import zmq

        self._zmq = zmq
        self._address, self._seconds, self._back_off, self._ready = address, seconds, back_off, ready
        self._socket: Any = None
        self._number = 0
        self._next_try = 0.0

    def open(self) -> None:
        """Connect, unless connected. Raises OSError."""
        if self._socket is not None:
            return
        if time.monotonic() < self._next_try:
            raise ConnectionError("the server has failed a moment ago")
        zmq = self._zmq
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_ANSWER), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.IMMEDIATE, 1),
            (zmq.SNDTIMEO, int(self._seconds * 1e3)), (zmq.RCVTIMEO, int(self._seconds * 1e3)),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.connect(self._address)
        try:
            self._ready()
        except OSError:
            self.close()
            raise

    def call(self, operation: Operation, calls: Sequence[Sequence[Any]], answer: type[T] | None) -> list[T | None]:
        """Return the answers to these calls, in their order; None is an answer too. Raises OSError.

        The server is silent about calls that it cannot do.
        """
        first = self.send(operation, calls)
        answers: dict[int, T | None] = {}
        until = time.monotonic() + self._seconds
        try:
            while len(answers) < len(calls):
                if time.monotonic() > until:
                    raise TimeoutError(f"the server does not answer to {operation.name}")
                head, _, *rest = self._socket.recv_multipart()
                number = msgspec.msgpack.decode(head, type=int)
                if first <= number < self._number:  # else an answer to a call that was given up
                    answers[number] = msgspec.msgpack.decode(rest[0], type=answer) if rest and answer else None
        except self._zmq.Again as error:
            raise TimeoutError(f"the server does not answer to {operation.name}") from error
        except (ValueError, self._zmq.ZMQError) as error:  # too few frames, or none of that type
            raise ConnectionError(str(error)) from error
        return [answers[number] for number in range(first, self._number)]

    def send(self, operation: Operation, calls: Sequence[Sequence[Any]]) -> int:
        """Make calls, and wait for no answer; return the number of the first. Raises OSError."""
        self.open()
        first, self._number = self._number, self._number + len(calls)
        try:
            for number, words in enumerate(calls, first):
                frames = [number, int(operation), *words]
                self._socket.send_multipart([msgspec.msgpack.encode(frame) for frame in frames])
        except self._zmq.ZMQError as error:
            raise ConnectionError(f"no server takes {operation.name}: {error}") from error
        return first

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        if (now := time.monotonic()) >= self._next_try:  # calls that were refused meanwhile make it no later
            self._next_try = now + self._back_off
