"""The native half of the CPU device: streams whose thread needs the interpreter's lock for Python programs alone.

A chain of uploads, replays and fences runs without it, so the host plans while the stream computes. The C++ is in
`native/`: graph.cpp replays a tape's operators through torch's dispatcher, stream.cpp is the queue and its fences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.device import build
from gapless.device.fault import Fault
from gapless.device.record import Place, Tape, TapeGraph
from gapless.device.ring import Fence, check_upload, copy
from gapless.device.seam import Program, Stream
from gapless.device.worker import Worker, attempt

STREAM_NAME = "gapless_stream"
STREAM_SOURCES = sorted((Path(__file__).parent / "native").glob("*.[ch]*"))


def load() -> ModuleType | None:
    """Return the extension, built at the first call on this machine; None where it cannot be, see `reason`."""
    return build.module(STREAM_NAME, STREAM_SOURCES)


def reason() -> str:
    """Return why there is no extension; empty when there is one."""
    load()
    return build.outcomes[STREAM_NAME].reason


def extension() -> Any:
    """Return the extension, which must be there."""
    found = load()
    assert found is not None, reason()
    return found


class NativeStream:
    def __init__(self, name: str, hub: Any, fault: Fault, threads: int) -> None:
        """`hub` is what the streams of a device share, which fails with `fault`."""
        self.name = name
        self._fault = fault
        self._queue = queue = extension().Stream(hub, partial(attempt, fault, name), partial(_report, fault, name))
        self.worker = Worker(name, queue, threads)

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        self._ready()
        if observe.watcher is not None:
            program = observe.watcher.launched(self, program, args, reads)
        self._queue.put(program, args)

    def upload(self, dst: Tensor, src: Tensor) -> None:
        check_upload(dst, src)
        if observe.watcher is not None:
            self.launch(copy, dst, src, reads=(src,), writes=(dst,))
            return
        self._ready()
        self._queue.copy(dst, src)

    def replay(self, graph: Any) -> None:
        self._ready()
        self._queue.replay(graph)

    def record(self, timed: bool = False) -> Fence:
        self._start()
        fence = self._queue.record(timed)
        if observe.watcher is not None:
            fence.mark = observe.watcher.recorded(self)
        return cast(Fence, fence)

    def after(self, fence: Fence) -> None:
        if observe.watcher is not None:
            observe.watcher.waits(self, fence.mark)  # type: ignore[attr-defined]
        self._start()
        self._queue.after(fence)

    def ring(self, bell: Bell) -> None:
        self.launch(bell.ring)

    def _ready(self) -> None:
        if self._fault.error is not None:
            self._fault.check()
        self._start()

    def _start(self) -> None:
        if not self.worker.started:
            self.worker.start()


class NativeGraph(TapeGraph):
    """A tape, replayed natively, or operator by operator in Python while a checker watches."""

    def __init__(self, key: Hashable, tape: Tape) -> None:
        super().__init__(key, tape)
        self._graph = extension().Graph(tape.name, tape.places)
        for call in tape.calls:
            schema = call.op._schema
            self._graph.add(schema.name, schema.overload_name, call.args, call.results, call.drops, Place)

    def run_here(self) -> None:
        """Replay on the calling thread, without the interpreter's lock; for measuring."""
        self._graph.run()

    def launch(self, stream: Stream, parts: Sequence[Tensor] = ()) -> None:
        assert isinstance(stream, NativeStream), "a stream of another kind of device"
        if observe.watcher is not None:
            super().launch(stream)
        else:
            stream.replay(self._graph)


def _report(fault: Fault, name: str, text: str) -> None:
    fault.set(RuntimeError(text), f"a graph on stream {name!r} failed")
