"""SimDevice: no threads; a seeded adversary decides when each stream moves, as late or as early as fences allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import DeviceError
from gapless.device.common import HostMemoryDevice
from gapless.device.fault import Fault
from gapless.device.record import TapeGraph, record_on
from gapless.device.ring import Fence, check_upload
from gapless.device.seam import ATTENDANT, STREAMS, Caps, Program
from gapless.testing.adversary import Adversary

SIM_MEMORY_BYTES = 1 << 30
TICK_NS = 1000
"""Host time of one touch."""

TRACE_OPS = 10_000


@dataclass(slots=True, eq=False)
class _Op:
    """One entry of a stream: a program, a fence to pass, or a fence to wait for."""

    index: int
    what: str
    enqueued: int
    program: Program | None = None
    args: tuple[Any, ...] = ()
    fence: SimFence | None = None
    awaited: SimFence | None = None


@dataclass(slots=True, eq=False, repr=False)
class SimFence:
    """A fence that is passed once the adversary has moved the stream, and the host's virtual time, this far."""

    device: SimDevice
    stream: SimStream
    timed: bool
    at: int | None = None
    """Virtual time of passing; None before."""
    mark: observe.Mark | None = None
    seen: bool = False
    """Whether the host has found it passed."""

    def done(self) -> bool:
        self.device.touch()
        if self.at is None:
            self.device.fault.check()
            return False
        self.seen = self.seen or self.device.approach(self.at)
        if self.seen and self.mark is not None:
            self.mark.passed()
        return self.seen

    def wait(self, bell: Bell | None = None) -> bool:
        self.device.touch()
        if not self.device.run_until(self, bell):
            return False
        self.seen = True
        if self.mark is not None:
            self.mark.passed()
        return True

    def time(self) -> int:
        # As strict as CUDA: a fence has a time only after it was seen as done.
        assert self.timed and self.seen and self.at is not None, (
            "time() needs record(timed=True) and a fence seen as done"
        )
        return self.at


class SimStream:
    """A queue of operations; only the device moves it."""

    def __init__(self, name: str, device: SimDevice) -> None:
        self.name = name
        self.now = 0
        """Virtual time of the end of the last executed operation."""
        self.passed_over = 0
        """Host touches that passed over a ready head."""
        self.device = device
        self.queue: deque[_Op] = deque()
        self._count = 0

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        self.device.fault.check()
        what = getattr(program, "__qualname__", type(program).__name__)
        if observe.watcher is not None:
            program = observe.watcher.launched(self, program, args, reads)
        self.push(what, program=program, args=args)

    def upload(self, dst: Tensor, src: Tensor) -> None:
        check_upload(dst, src)
        self.launch(self.device.upload, dst, src, reads=(src,), writes=(dst,))

    def record(self, timed: bool = False) -> SimFence:
        fence = SimFence(self.device, self, timed)
        if observe.watcher is not None:
            fence.mark = observe.watcher.recorded(self)
        self.push("record", fence=fence)
        return fence

    def after(self, fence: Fence) -> None:
        assert isinstance(fence, SimFence), "a fence of another kind of device"
        if observe.watcher is not None:
            observe.watcher.waits(self, fence.mark)
        self.push(f"after {fence.stream.name}", awaited=fence)

    def ring(self, bell: Bell) -> None:
        self.launch(bell.ring)

    def awaited(self) -> SimFence | None:
        """Return the fence that holds the head back, if one does."""
        fence = self.queue[0].awaited if self.queue else None
        return fence if fence is not None and fence.at is None else None

    def head(self) -> str:
        """Describe the head, for messages."""
        if not self.queue:
            return f"{self.name}: empty"
        return f"{self.name}: {self.queue[0].what} (op {self.queue[0].index})"

    def push(self, what: str, **fields: Any) -> None:
        self.queue.append(_Op(self._count, what, self.device.host_now, **fields))
        self._count += 1
        self.device.touch()


class SimBell(Bell):
    """A bell rung by programs, or by the host itself: a wait for it lets the streams move."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self.device = device
        self.at = 0
        """Virtual time of the program that rang it; 0: none since it was cleared"""

    def clear(self) -> None:
        super().clear()
        self.at = 0

    def wait(self, seconds: float) -> bool:
        self.device.touch()
        return self.device.run_until_rung(seconds)


class SimDevice(HostMemoryDevice):
    """Runs the same programs on the calling thread, at moments that `seed` decides.

    At every touch (launch, record, after, done, wait, clock) the adversary may run operations of any stream.
    `mood` fixes its mood for the whole life; "manual" moves nothing but by `advance` and waits.
    The same seed and the same host calls give the same `trace`: (stream, index of the operation, what it was).
    """

    kind = "sim"
    caps = Caps(captures=True, real_time=False)

    def __init__(self, seed: int = 0, mood: str | None = None, maps_host: bool = False) -> None:
        self.caps = self.caps._replace(maps_host=maps_host)
        self.fault = Fault()
        self.bell = SimBell(self)
        self.host_now = 0
        self.trace: deque[tuple[str, int, str]] = deque(maxlen=TRACE_OPS)
        self.streams = tuple(SimStream(name, self) for name in (*STREAMS, ATTENDANT))
        self.compute, self.token_out, self.bulk_out, self.bulk_in, self.attendant = self.streams
        self._random = random.Random(seed)
        self.adversary = Adversary(self._random, mood)
        self._inside = False

    def clock(self) -> int:
        self.touch()
        return self.host_now

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> TapeGraph:
        return TapeGraph(key, record_on(self, key, program, buffers))

    def memory(self) -> tuple[int, int]:
        return SIM_MEMORY_BYTES, SIM_MEMORY_BYTES

    def drain(self) -> None:
        self.fault.check()
        for fence in [stream.record() for stream in self.streams]:
            fence.wait()

    def close(self) -> None:
        self.fault.set(DeviceError("it was closed"), "the device is gone")
        if observe.watcher is not None:
            observe.watcher.closed(self.streams)

    def advance(self, ops: int) -> int:
        """Run up to `ops` ready operations, in an order the seed decides; returns how many ran."""
        for count in range(ops):
            if not (ready := self.ready()):
                return count
            self.execute(self._random.choice(ready))
        return ops

    def touch(self) -> None:
        """Let the host's time pass at a call of its own; the adversary may move streams."""
        assert not self._inside, "a program may not launch, record, wait or ask the time"
        self.host_now += TICK_NS
        for stream in self.adversary.moves(self.ready):
            if self.fault.error is None:
                self.execute(stream)

    def approach(self, at: int) -> bool:
        """Return whether host time has reached `at`; if not, advance it by a part, so that polling ends."""
        if at > self.host_now:
            self.host_now += max(TICK_NS, (at - self.host_now) // 4)
        return at <= self.host_now

    def run_until(self, fence: SimFence, bell: Bell | None = None) -> bool:
        """Run ready operations, in the adversary's order, until `fence` has passed or `bell` is rung.

        Returns whether the fence has passed; host time then goes there.
        """
        while fence.at is None:
            self.fault.check()
            if bell is not None and bell.rung:
                self.host_now = max(self.host_now, self.bell.at)
                return False
            assert self.force(fence) is not None, self.deadlock(fence)
        self.host_now = max(self.host_now, fence.at)
        return True

    def force(self, fence: SimFence | None = None) -> SimStream | None:
        """Run one ready operation while the host waits, for `fence` if there is one; return its stream."""
        if not (ready := self.ready()):
            return None
        stream = self.adversary.forced(ready, self._needed(fence, ready) if fence else self._random.choice(ready))
        self.execute(stream)
        return stream

    def run_until_rung(self, seconds: float) -> bool:
        """Run ready operations, in the adversary's order, until the bell is rung or `seconds` of host time are over.

        Returns whether it is rung; host time then goes there.
        """
        end = self.host_now + round(seconds * 1e9)
        while not self.bell.rung and self.host_now < end:
            moved = self.force()
            self.host_now = max(self.host_now, moved.now if moved else end)
        self.host_now = max(self.host_now, self.bell.at)
        self.fault.check()
        return self.bell.rung

    def ready(self) -> list[SimStream]:
        """Return the streams that can move."""
        if self.fault.error is not None:
            return []
        return [stream for stream in self.streams if stream.queue and stream.awaited() is None]

    def _needed(self, fence: SimFence, ready: list[SimStream]) -> SimStream:
        """Return the stream that must move first for `fence` to pass."""
        stream = fence.stream
        while (awaited := stream.awaited()) is not None:
            stream = awaited.stream
        return stream if stream in ready else ready[0]

    def execute(self, stream: SimStream) -> None:
        op = stream.queue.popleft()
        stream.passed_over = 0
        self.trace.append((stream.name, op.index, op.what))
        start, rung = max(stream.now, op.enqueued, (op.awaited.at or 0) if op.awaited else 0), self.bell.rung
        if op.program is not None:
            start += self.cost(stream, op.args)
            self.call(op.program, op.args, stream.name)
        # The host may have asked just now and heard "not done": the end cannot be before that.
        stream.now = max(start, self.host_now)
        if self.bell.rung and not rung:
            self.bell.at = stream.now
        if op.fence is not None and self.fault.error is None:
            op.fence.at = stream.now

    def cost(self, stream: SimStream, args: tuple[Any, ...]) -> int:
        """Return what a program takes that is given `args`, ns; any time from 1 us to 1 ms."""
        return int(10 ** self._random.uniform(3, 6))

    def call(self, program: Program, args: tuple[Any, ...], name: str) -> None:
        self._inside = True
        try:
            watched = nullcontext() if observe.steps is None else observe.steps.moves(program)
            with torch.inference_mode(), watched:
                program(*args)
        except Exception as error:
            self.fault.set(error, f"a program on stream {name!r} raised")
        finally:
            self._inside = False

    def deadlock(self, fence: SimFence) -> str:
        """Describe a wait that cannot end."""
        heads = "; ".join(stream.head() for stream in self.streams)
        return f"deadlock: a fence of {fence.stream.name} is waited for and no stream can move. Heads: {heads}"
