"""The hook between devices and checkers: devices report here what they enqueue, and a checker registers to hear it.

While `watcher` is None, which is the rule, a report costs one check of that name and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gapless.base.errors import CaptureError

Program = Callable[..., None]
CaptureCheck = Callable[[str], AbstractContextManager[object]]
"""Gives the context in which the program of this name is recorded. The context raises CaptureError when the program
would make the host wait for the device."""


class Mark(Protocol):
    """What a fence keeps of the moment at which it was recorded."""

    def passed(self) -> None:
        """The calling host thread has learnt that the fence was passed."""
        ...


class Watcher(Protocol):
    """What a checker hears of a device. `stream` is any object with a `name`; its identity is the stream's."""

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
        """Nothing runs on these streams any more, and the calling thread knows it."""
        ...


class _Marks(tuple[Mark, ...]):
    """The marks of several watchers on one fence."""

    __slots__ = ()

    def passed(self) -> None:
        for mark in self:
            mark.passed()


class _Several:
    """Several watchers as one."""

    def __init__(self, watchers: tuple[Watcher, ...]) -> None:
        self._watchers = watchers

    def launched(self, stream: Any, program: Program, args: Sequence[Any], reads: Sequence[Any]) -> Program:
        for one in self._watchers:
            program = one.launched(stream, program, args, reads)
        return program

    def replayed(self, stream: Any, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        for one in self._watchers:
            one.replayed(stream, name, reads, writes)

    def recorded(self, stream: Any) -> Mark:
        return _Marks(one.recorded(stream) for one in self._watchers)

    def waits(self, stream: Any, mark: Mark | None) -> None:
        for one, own in zip(self._watchers, mark if isinstance(mark, _Marks) else (), strict=False):
            one.waits(stream, own)

    def touched(self, tensor: Any) -> None:
        for one in self._watchers:
            one.touched(tensor)

    def closed(self, streams: Sequence[Any]) -> None:
        for one in self._watchers:
            one.closed(streams)


def unchecked(name: str) -> AbstractContextManager[object]:
    raise CaptureError(
        f"{name} cannot be captured: nothing checks that it does not wait for the device; "
        "call gapless.engine.checkers.connect() first"
    )


watcher: Watcher | None = None
capture_check: CaptureCheck = unchecked
_watchers: list[Watcher] = []


def add(observer: Watcher, /) -> None:
    """Report to `observer` as well, from now on."""
    _watchers.append(observer)
    _refresh()


def remove(observer: Watcher, /) -> None:
    """Stop reporting to `observer`."""
    _watchers.remove(observer)
    _refresh()


def check_captures(check: CaptureCheck) -> None:
    """Record programs inside `check(name)` from now on; until this is called, every capture is refused."""
    global capture_check
    capture_check = check


def _refresh() -> None:
    global watcher
    watcher = _Several(tuple(_watchers)) if len(_watchers) > 1 else next(iter(_watchers), None)
