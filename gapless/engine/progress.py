"""Progress on standard error: a bar for a person, a plain line now and then for a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

REDRAW_SECONDS = 0.5
LINE_SECONDS = 10.0
Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int, wanted: bool = True, stream: IO[str] | None = None) -> Iterator[Advance]:
    """Yields a function that is called with the number done so far. It draws at most twice a second."""
    stream = stream or sys.stderr
    if not wanted or not total:
        yield lambda done: None
    elif stream.isatty() and find_spec("rich"):
        with _bar(what, total, stream) as advance:
            yield advance
    else:
        yield _lines(what, total, stream)


@contextmanager
def _bar(what: str, total: int, stream: IO[str]) -> Iterator[Advance]:
    from rich.console import Console  # only where a person looks
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn by hand: a thread that redraws would take the interpreter lock from the readings.
    with Progress(*columns, console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task(what, total=total), 0.0

        def advance(done: int) -> None:
            nonlocal drawn
            if time.monotonic() - drawn > REDRAW_SECONDS:
                bar.update(task, completed=done, refresh=True)
                drawn = time.monotonic()

        yield advance


def _lines(what: str, total: int, stream: IO[str]) -> Advance:
    shown = time.monotonic()

    def advance(done: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > LINE_SECONDS:
            print(f"{what}: {done} of {total}", file=stream, flush=True)
            shown = time.monotonic()

    return advance
