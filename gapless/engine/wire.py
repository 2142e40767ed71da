"""Wire: frames over one stream socket between two processes. Nothing here waits.

A frame is its length, four bytes little-endian, and its bytes. Our own socket instead of a message library: its read
and its write are the only system calls of a message, and no other thread wakes up.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

RECEIVE_BYTES = 1 << 16
MAX_FRAME_BYTES = 1 << 30
"""Far above any message. A longer frame is refused before it takes memory."""
_HEAD = struct.Struct("<I")


class Wire:
    """One end of a connection. `socket` is connected; the wire owns it."""

    def __init__(self, socket: socket.socket) -> None:
        socket.setblocking(False)
        self._socket = socket
        self.unsent: deque[memoryview] = deque()
        """Unsent rest of the frames, oldest first."""
        self._received = bytearray()
        self.open = True
        """Whether the other end is connected."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def clear(self) -> bool:
        """Return whether everything is sent."""
        return not self.unsent

    def send(self, frame: bytes) -> None:
        """Send a frame, and keep its unsent rest for `flush`."""
        assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame):,} bytes"
        self.unsent.append(memoryview(_HEAD.pack(len(frame)) + frame))
        self.flush()

    def flush(self) -> None:
        """Send the kept rest."""
        unsent = self.unsent
        try:
            while unsent:
                data = unsent[0]
                sent = self._socket.send(data)
                if sent < len(data):
                    unsent[0] = data[sent:]  # a view: a long frame is not copied for each piece
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._hang_up()

    def receive(self) -> list[bytes]:
        """Return the frames completed since the last call. Raises ValueError for a malformed frame."""
        buffer, size = self._received, RECEIVE_BYTES
        try:
            while size == RECEIVE_BYTES:  # less means nothing is left to read
                data = self._socket.recv(RECEIVE_BYTES)
                size = len(data)
                buffer += data
            if not size:
                self._hang_up()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._hang_up()
        return self._frames() if buffer else []

    def _frames(self) -> list[bytes]:
        buffer, frames, start = self._received, [], 0
        while len(buffer) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length:,} bytes is announced, the most are {MAX_FRAME_BYTES:,}")
            end = start + _HEAD.size + length
            if end > len(buffer):
                break
            frames.append(bytes(buffer[start + _HEAD.size : end]))
            start = end
        del buffer[:start]
        return frames

    def _hang_up(self) -> None:
        self.open = False
        self.unsent.clear()

    def close(self) -> None:
        self._hang_up()
        self._socket.close()
