"""New threads run inside what the detectors need: the one place where `Thread.start` is wrapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .patches import SharedPatches
from .watched import TALLY

Around = Callable[[threading.Thread], AbstractContextManager[Any]]
"""A function that the starting thread calls; the new thread runs inside the context that it returns."""

_around: list[Around] = []


@contextmanager
def starting_inside(around: Around) -> Iterator[None]:
    """Run new threads inside `around`, within the contexts that exist already. Threads that outlive this keep it."""
    with _patches.held():
        _around.append(around)
        try:
            yield
        finally:
            _around.remove(around)


def _start(original: Any, thread: threading.Thread) -> None:
    contexts = [around(thread) for around in (*_around,)]
    run = thread.run
    TALLY.add("threads")

    def inside() -> None:
        del thread.run
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            run()

    thread.run = inside  # type: ignore[method-assign]
    original(thread)


_patches = SharedPatches(lambda patches: patches.wrap(threading.Thread, "start", _start))
