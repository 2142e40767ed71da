"""Wire: frames over one stream socket between two processes. Nothing here waits.

A frame is its length, four bytes little-endian, and its bytes. A socket of our own instead of a message library: its
read and its write are the only two calls to the system that a message costs, and no other thread wakes up for it.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

RECEIVE_BYTES = 1 << 16
MAX_FRAME_BYTES = 1 << 30
"""Far above any message. What says that it is longer is no frame, and gathers no memory here."""
_HEAD = struct.Struct("<I")


class Wire:
    """One end of a connection. `socket` is connected; the wire owns it."""

    def __init__(self, socket: socket.socket) -> None:
        socket.setblocking(False)
        self._socket = socket
        self.unsent: deque[memoryview] = deque()
        """Rest of the frames that the system has not taken yet, oldest first."""
        self._received = bytearray()
        self.open = True
        """False once the other end has hung up."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def clear(self) -> bool:
        """Return whether everything has gone out."""
        return not self.unsent

    def send(self, frame: bytes) -> None:
        """Send a frame, or keep of it what the system does not take now, for `flush`."""
        assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame):,} bytes"
        self.unsent.append(memoryview(_HEAD.pack(len(frame)) + frame))
        self.flush()

    def flush(self) -> None:
        """Go on with what was kept."""
        unsent = self.unsent
        try:
            while unsent:
                data = unsent[0]
                sent = self._socket.send(data)
                if sent < len(data):
                    unsent[0] = data[sent:]  # a view: what is long and goes in many pieces is not copied for each
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._hang_up()

    def receive(self) -> list[bytes]:
        """The frames that have come in whole since the last call. Raises ValueError for what is no frame."""
        buffer, size = self._received, RECEIVE_BYTES
        try:
            while size == RECEIVE_BYTES:  # less: nothing is left to read
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
