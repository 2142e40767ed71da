"""A client of Redis and of what speaks like it: commands go out together, answers come in their order."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

PORT = 6379
LONG = 16_384
"""Words from this length on are sent as they are, without a copy; no answer but a page is longer."""

Word = bytes | memoryview
Reply = bytes | int | None


class RespError(OSError):
    """The server has answered with an error, or not as the protocol says."""


class RespRefusal(RespError):
    """The server has answered with an error, in its own words."""


class RespClient:
    """One connection, made when it is needed. Whatever goes wrong closes it, and for a while calls fail at once."""

    def __init__(self, url: str, seconds: float, back_off: float) -> None:
        """Nothing waits longer than `seconds` for the server; after a failure it is left alone for `back_off`."""
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or PORT
        words = [unquote(word).encode() for word in (parts.username, parts.password) if word]
        self._hello: list[list[Word]] = [[b"AUTH", *words]] if words else []
        self._hello.append([b"SELECT", (parts.path.strip("/") or "0").encode()])
        self._seconds, self._back_off = seconds, back_off
        self._socket: socket.socket | None = None
        self._reader: BinaryIO
        self._next_try = 0.0

    def send(self, commands: Sequence[Sequence[Word]]) -> None:
        """Send commands whose answers are read one by one. Raises OSError."""
        try:
            if self._socket is None:
                self._connect()
            self._write(commands)
        except OSError:
            self.close()
            raise

    def read(self, memory: Sequence[memoryview] = ()) -> Reply:
        """Return the next answer: a number, a value, or None. A value as long as `memory` goes there, and is b"".

        Raises RespRefusal for an error of the server, and OSError when the connection is gone.
        """
        try:
            line = self._reader.readline(LONG)
            if not line.endswith(b"\r\n"):
                raise ConnectionError("the server has closed the connection")
            kind, rest = line[:1], line[1:-2]
            if kind == b"$":
                return self._value(int(rest), memory)
            if kind == b":":
                return int(rest)
            if kind not in (b"+", b"-"):
                raise ValueError("an answer of an unknown kind")
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, OSError):
                raise
            raise RespError("what answers does not speak its protocol") from None  # it may repeat the password
        if kind == b"-":
            raise RespRefusal(rest.decode(errors="replace"))
        return rest

    def close(self) -> None:
        if self._socket is not None:
            self._reader.close()
            self._socket.close()
        self._socket = None
        if (now := time.monotonic()) >= self._next_try:  # calls that were refused meanwhile make it no later
            self._next_try = now + self._back_off

    def _connect(self) -> None:
        if time.monotonic() < self._next_try:
            raise ConnectionError("the server has failed a moment ago")
        self._socket = socket.create_connection(self._address, self._seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")
        self._write(self._hello)
        for words in self._hello:
            try:
                self.read()
            except RespRefusal as error:  # only its code: some servers repeat the command, and so the password
                raise RespError(f"it answers {str(error).partition(' ')[0]} to {bytes(words[0]).decode()}") from None

    def _write(self, commands: Sequence[Sequence[Word]]) -> None:
        assert self._socket is not None
        gathered = bytearray()
        for words in commands:
            gathered += b"*%d\r\n" % len(words)
            for word in words:
                gathered += b"$%d\r\n" % len(word)
                if len(word) < LONG:
                    gathered += word
                else:
                    self._socket.sendall(gathered)
                    self._socket.sendall(word)
                    gathered.clear()
                gathered += b"\r\n"
        self._socket.sendall(gathered)

    def _value(self, length: int, memory: Sequence[memoryview]) -> Reply:
        if length < 0:
            return None
        fits = length == sum(map(len, memory))
        if not fits and length > LONG:
            raise RespError(f"a value of {length} bytes, which is no page")
        value = b"" if fits else self._reader.read(length)
        for part in memory if fits else ():
            if self._reader.readinto(part) < len(part):  # type: ignore[attr-defined]
                raise ConnectionError("the server has closed the connection in the middle of a value")
        if len(value) != length * (not fits) or self._reader.read(2) != b"\r\n":
            raise RespError("a value that does not end where it should")
        return value
