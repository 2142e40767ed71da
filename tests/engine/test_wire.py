"""Frames over a stream socket: whole, in order, and without waiting, however the bytes are cut."""

import random
import socket
from contextlib import closing

import pytest

from gapless.engine.wire import Wire


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    wires = Wire(left), Wire(right)
    yield wires
    for wire in wires:
        wire.close()


def until(wire, count, other=None):
    """Receive `count` frames; `other` goes on with what it kept."""
    frames = []
    while len(frames) < count:
        if other is not None:
            other.flush()
        frames += wire.receive()
    return frames


def test_frames_arrive_whole_and_in_order(ends):
    here, there = ends
    assert there.receive() == []
    frames = [b"", b"one", bytes(range(256)) * 300, b"last"]
    for frame in frames:
        here.send(frame)
    assert until(there, 4) == frames
    there.send(b"back")
    assert until(here, 1) == [b"back"]
    assert here.clear and here.open and there.open


@pytest.mark.parametrize("seed", range(5))
def test_bytes_may_be_cut_anywhere(seed):
    """The other end writes what it likes, in pieces of any size."""
    rng = random.Random(seed)
    left, right = socket.socketpair()
    frames = [rng.randbytes(rng.choice((0, 1, 3, 4, 5, 70_000))) for _ in range(12)]
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    wire, found = Wire(right), []
    while data:
        cut = rng.choice((1, 2, 7, 4096, 65536, 65540))
        left.sendall(data[:cut])
        data = data[cut:]
        found += wire.receive()
    assert found == frames
    left.close()
    wire.close()


def test_bytes_that_the_system_does_not_take_are_sent_later(ends):
    here, there = ends
    frames = [bytes([i]) * 300_000 for i in range(20)]
    for frame in frames:
        here.send(frame)  # no end reads, and this returns
    assert not here.clear
    assert until(there, 20, here) == frames
    assert here.clear


def test_a_frame_in_many_pieces_is_not_copied_for_each(ends):
    """Once, to put its length in front: a copy of the rest for each piece would be hundreds of times as much."""
    here, there = ends
    frame = bytes(16 << 20)
    here.send(frame)
    (kept,) = here.unsent
    assert isinstance(kept, memoryview) and len(kept.obj) == len(frame) + 4
    assert until(there, 1, here) == [frame]


def test_a_length_beyond_all_bounds_is_refused():
    left, right = socket.socketpair()
    with left, closing(Wire(right)) as wire:
        left.send(b"\xff\xff\xff\xff and so on")
        with pytest.raises(ValueError, match=r"a frame of 4,294,967,295 bytes is announced"):
            wire.receive()


def test_an_end_that_hangs_up_is_noticed_and_its_last_frames_are_read(ends):
    here, there = ends
    here.send(b"last words")
    here.close()
    assert there.receive() == [b"last words"]
    assert there.receive() == [] and not there.open
    there.send(b"into the void")  # harmless
    assert there.clear


def test_sending_to_an_end_that_is_gone_raises_nothing(ends):
    here, there = ends
    there.close()
    here.send(b"x")
    assert not here.open and here.clear
