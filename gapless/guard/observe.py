"""Where a device tells checkers what its host does. Nothing is called while `watcher` is None, which is the rule.

A device that wants its streams checked makes these calls; this module imports no torch, so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Program = Callable[..., None]


class Mark(Protocol):
    """What a fence keeps of the moment at which it was recorded."""

    def passed(self) -> None:
        """The calling host thread has learnt that the fence was passed."""
        ...


class Watcher(Protocol):
    """What a checker is told. `stream` is any object with a `name`; it stands for itself."""

    def launched(self, stream: Any, program: Program, args: Sequence[Any], reads: Sequence[Any]) -> Program:
        """A program is enqueued; the returned one is to run in its place."""
        ...

    def replayed(self, stream: Any, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """A graph is enqueued whose operators are not seen: what it reads and writes is what it declares."""
        ...

    def recorded(self, stream: Any) -> Mark:
        """A fence is recorded on the stream."""
        ...

    def waits(self, stream: Any, mark: Mark | None) -> None:
        """Later work of the stream comes after the fence that keeps this mark."""
        ...

    def touched(self, tensor: Any) -> None:
        """The caller takes the memory of this host tensor into its hands, to write it or to read it."""
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


watcher: Watcher | None = None
_watchers: list[Watcher] = []


def add(one: Watcher) -> None:
    """Tell `one` as well, from now on."""
    _watchers.append(one)
    _refresh()


def remove(one: Watcher) -> None:
    """Tell it no more."""
    _watchers.remove(one)
    _refresh()


def _refresh() -> None:
    global watcher
    watcher = _Several(tuple(_watchers)) if len(_watchers) > 1 else next(iter(_watchers), None)
