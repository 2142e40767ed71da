"""The hook between engines and checkers: devices report their operations here, and engines their steps.

While `watcher` and `steps` are None, which is the rule, a report costs one check of that name and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from gapless.base.errors import CaptureError

Program = Callable[..., None]
CaptureCheck = Callable[[str], AbstractContextManager[object]]
"""Returns the context around the recording of the program of this name. The context raises CaptureError if the program
would make the host wait for the device."""


class Mark(Protocol):
    """The moment of a fence's recording, kept by the fence."""

    def passed(self) -> None:
        """The calling host thread has learnt that the fence was passed."""
        ...


class Watcher(Protocol):
    """A checker of devices. `stream` is any object with a `name`; its identity is the stream's."""

    def launched(self, stream: Any, program: Program, args: Sequence[Any], reads: Sequence[Any]) -> Program:
        """A program is enqueued; the returned one is to run in its place."""
        ...

    def replayed(self, stream: Any, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """A graph is enqueued whose operators cannot be seen: it touches what it declares."""
        ...

    def recorded(self, stream: Any) -> Mark:
        """A fence is recorded on the stream."""
        ...

    def waits(self, stream: Any, mark: Mark | None) -> None:
        """Later work of the stream comes after the fence that keeps this mark."""
        ...

    def touched(self, tensor: Any) -> None:
        """The calling thread takes the memory of this host tensor, to write it or to read it."""
        ...

    def closed(self, streams: Sequence[Any]) -> None:
        """Nothing runs on these streams any more, as the calling thread has waited for."""
        ...

    def gives(self, part: Any) -> None:
        """The running program gives its part of an operation that several devices do together."""
        ...

    def takes(self, part: Any, read: Any) -> None:
        """The running program takes a part that another one gave, by reading this tensor."""
        ...

    def reached(self, stream: Any, mark: Mark, waits: bool) -> None:
        """The stream, which met others, passes a fence with this mark; or it continues behind that, if it `waits`."""
        ...


class LaunchWatcher(Protocol):
    """Reports of the steps of all engines."""

    def launches(self, launcher: Any) -> AbstractContextManager[object]:
        """Give the context for the host's half of a step: plan, pack, enqueue, or obey an order."""
        ...

    def runs(self, executor: Any, key: Any, program: Program) -> Program:
        """A program of a step is enqueued, or a copy of tokens (key None); the returned one is to run in its place."""
        ...

    def moves(self, program: Program) -> AbstractContextManager[object]:
        """Give the context for a program of a simulated device, on a thread of the host."""
        ...


def unchecked(name: str) -> AbstractContextManager[object]:
    raise CaptureError(
        f"{name} cannot be captured: nothing checks that it does not wait for the device; "
        "call gapless.engine.checkers.connect() first"
    )


watcher: Watcher | None = None
capture_check: CaptureCheck = unchecked
steps: LaunchWatcher | None = None
listeners: tuple[Callable[[Any], None], ...] = ()
"""Called with each loop, executor, tape and transfers that is made."""


def add(observer: Watcher, /) -> None:
    """Report to `observer` from now on. There is one at a time: regions inside one another share their checker."""
    global watcher
    assert watcher is None, "devices report to one checker"
    watcher = observer


def remove(observer: Watcher, /) -> None:
    """Stop reporting to `observer`."""
    global watcher
    assert watcher is observer
    watcher = None


def check_captures(check: CaptureCheck) -> None:
    """Record programs inside `check(name)` from now on; until this is called, every capture is refused."""
    global capture_check
    capture_check = check


def watch_steps(observer: LaunchWatcher | None, /) -> LaunchWatcher | None:
    """Report steps to `observer` from now on; return the previous observer."""
    global steps
    before, steps = steps, observer
    return before


def built(part: Any) -> None:
    """Report a part of an engine that was made."""
    for listener in listeners:
        listener(part)


@contextmanager
def listening(*more: Callable[[Any], None]) -> Iterator[None]:
    """Report new parts to these listeners too."""
    global listeners
    before, listeners = listeners, (*listeners, *more)
    try:
        yield
    finally:
        listeners = before
