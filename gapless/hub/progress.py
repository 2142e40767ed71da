"""Progress of a fetch: lines in the log, and a bar of bytes on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gapless.base.progress import LINE_SECONDS, Count, in_bytes

log = logging.getLogger("gapless.hub")


def say(level: int, text: str, **fields: object) -> None:
    """Write to the log where one is set up, as in `gapless serve`; else to standard error."""
    if log.hasHandlers():
        log.log(level, "%s", text, extra={"fields": fields})
    else:
        print(f"gapless: {text}", file=sys.stderr, flush=True)


@contextmanager
def showing(what: str, total: int) -> Iterator[Count]:
    """A bar on a terminal, elsewhere a line every ten seconds; `total` is in bytes."""
    if not sys.stderr.isatty():
        yield _lines(what, total)
        return
    from rich.console import Console  # only where a person looks
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _lines(what: str, total: int) -> Count:
    done, shown = 0, time.monotonic()

    def count(new: int) -> None:
        nonlocal done, shown
        done += new
        if time.monotonic() - shown >= LINE_SECONDS:
            say(logging.INFO, f"{what}: {in_bytes(done)} of {in_bytes(total)}")
            shown = time.monotonic()

    return count
