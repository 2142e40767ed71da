"""The connection of a server's first front, which has the engine, with one of its further fronts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from gapless.engine import messages as m
from gapless.engine.trace import RequestRecord
from gapless.engine.wire import Wire
from gapless.server.errors import log
from gapless.server.metrics import MovedCounts


class EngineDown(m.Message, frozen=True):
    """Message to a further front: the engine is dead, to be answered with a DownNoted. A Ready follows if another
    starts; none does after the `last` one."""

    text: str
    last: bool


class WeightsNamed(m.Message, frozen=True):
    """Message to a further front: the weights' name in answers."""

    version: str


class AbortOpen(m.Message, frozen=True):
    """Message to a further front: end the open requests with these ids, or all, and answer with an Aborted."""

    number: int
    ids: tuple[str, ...]


class ShowRequests(m.Message, frozen=True):
    """Message to a further front: answer with a RequestList of the newest requests."""

    number: int
    limit: int


class Drain(m.Message, frozen=True):
    """Message to a further front: take no new work, let the running finish, and end; a second ends the running too."""


class Listening(m.Message, frozen=True):
    """Message to the first front: requests are taken."""


class DownNoted(m.Message, frozen=True):
    """Message to the first front: the answer to an EngineDown. Requests sent before were open when the engine died."""


class Aborted(m.Message, frozen=True):
    """Message to the first front: the answer to the AbortOpen with this number."""

    number: int
    count: int


class RequestList(m.Message, frozen=True):
    """Message to the first front: the answer to the ShowRequests with this number."""

    number: int
    records: tuple[RequestRecord, ...]


class Counted(m.Message, frozen=True):
    """Message to the first front: counts since the last one, the open generation requests, and the time of turning
    all tokens into text."""

    counts: MovedCounts
    open: int
    detok_ns: int


FromEngine = m.Ready | m.Admitted | m.Tokens | m.Refused
"""Messages of an engine that a further front gets"""
ToFurther = FromEngine | EngineDown | WeightsNamed | AbortOpen | ShowRequests | Drain
ToFirst = m.Add | m.Abort | Listening | DownNoted | Aborted | RequestList | Counted
decode_to_further = m.decoder(ToFurther)
decode_to_first = m.decoder(ToFirst)


class FrontLink:
    """One end of the connection. Messages are taken as they come; `lost` is called once, when the other end closes."""

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], list[Any]],
        take: Callable[[Sequence[Any]], None],
        lost: Callable[[], None],
    ) -> None:
        self._wire = Wire(connection)
        self._decode, self._take, self._lost = decode, take, lost
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Begin to take messages."""
        self._loop.add_reader(self._wire, self._read)

    def send(self, *messages: m.Message) -> None:
        """Send messages as one frame. Their number is bounded by that of open requests, for an end that is slow."""
        if not self._wire.open:
            return
        self._wire.send(m.encode(messages))
        if not self._wire.clear:
            self._loop.add_writer(self._wire, self._write_on)

    def close(self) -> None:
        """Hang up; `lost` is not called any more."""
        if self._wire.fileno() >= 0:
            self._loop.remove_reader(self._wire)
            self._loop.remove_writer(self._wire)
            self._wire.close()

    def _write_on(self) -> None:
        self._wire.flush()
        if self._wire.clear:
            self._loop.remove_writer(self._wire)

    def _read(self) -> None:
        try:
            messages = [message for frame in self._wire.receive() for message in self._decode(frame)]
            if messages:
                self._take(messages)
        except Exception as error:  # undelivered messages are lost, and their readers would wait for ever
            log.critical("messages between two fronts could not be delivered", exc_info=error)
            self._hang_up()
            return
        if not self._wire.open:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close()
        self._lost()
