"""Progress on standard error: a bar on a terminal, an occasional line in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

REDRAW_SECONDS = 0.5
PRINT_SECONDS = 10.0
Advance = Callable[[int], None]
"""Called with the number done so far."""


@contextmanager
def progress(what: str, total: int, wanted: bool = True, stream: IO[str] | None = None) -> Iterator[Advance]:
    """Yield a function to call with the number done so far. It draws at most twice a second."""
    stream = stream or sys.stderr
    if not wanted or not total:
        yield lambda done: None
    elif stream.isatty() and find_spec("rich"):
        with _bar(what, total, stream) as draw:
            yield _now_and_then(draw, REDRAW_SECONDS)
    else:
        yield _now_and_then(lambda done: print(f"{what}: {done} of {total}", file=stream, flush=True), PRINT_SECONDS)


@contextmanager
def _bar(what: str, total: int, stream: IO[str]) -> Iterator[Advance]:
    from rich.console import Console  # only for a terminal
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn by hand: a redrawing thread would take the interpreter lock from the readings.
    with Progress(*columns, console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done, refresh=True)


def _now_and_then(draw: Advance, seconds: float) -> Advance:
    """Call `draw` at most once in `seconds`."""
    drawn = time.monotonic()

    def advance(done: int) -> None:
        nonlocal drawn
        if time.monotonic() - drawn > seconds:
            draw(done)
            drawn = time.monotonic()

    return advance
