"""Progress of a start: log records, and one line that is rewritten on a terminal.

Any room reports its work with `announce`. In a program that uses the library these are INFO records of the logger
`gapless.start`, which print nothing unless logging is set up. Commands show them with `starting`, the server with its
own log; the engine's process passes them to its parent.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

log = logging.getLogger("gapless.start")

REWRITE_SECONDS = 0.1
LINE_SECONDS = 10.0
PROGRESS = 5
"""Level of the records between two lines, which a terminal alone shows: below DEBUG."""
CLEAR_LINE = "\r\x1b[K"
"""Erases the line of a terminal."""
Count = Callable[[int], None]
"""Called with the amount done since the last call."""


class Phase(NamedTuple):
    """The part of a start that is under way."""

    what: str
    done: int = 0
    total: int = 0
    """0: nothing is counted"""
    unit: str = ""
    """bytes, files, or nothing for pieces"""
    seconds: float = 0.0
    """Since it began"""
    line: bool = True
    """Whether it is worth a line: it begins, or the last line was ten seconds ago."""

    def __str__(self) -> str:
        if not self.total:
            return self.what
        if self.unit == "files":
            return f"{self.what}: {self.done} of {self.total} files, {self.seconds:.0f} s"
        done, total = map(in_bytes if self.unit == "bytes" else str, (self.done, self.total))
        if not self.done:
            return f"{self.what} ({total})"
        rate = f", {in_bytes(self.done / max(self.seconds, 1e-3))}/s" if self.unit == "bytes" else ""
        return f"{self.what}: {done} of {total}{rate}"


def announce(what: str, total: int = 0, unit: str = "") -> Count:
    """Say that `what` begins; the returned function is called with the amounts done of `total`."""
    began = told = lined = time.monotonic()
    done = 0

    def count(new: int) -> None:
        nonlocal done, told, lined
        done += new
        now = time.monotonic()
        if now - told >= REWRITE_SECONDS:
            told, line = now, now - lined >= LINE_SECONDS
            lined = now if line else lined
            show(Phase(what, done, total, unit, now - began, line))

    show(Phase(what, 0, total, unit))
    return count


def warn(text: str, **fields: object) -> None:
    """Say at a start what its user should know, once; `fields` are for logs in JSON."""
    log.warning("%s", text, extra={"fields": fields})


def log_phase(phase: Phase) -> None:
    counted = {"done": phase.done, "total": phase.total} if phase.total else {}
    extra = {"phase": phase, "fields": {"phase": phase.what, **counted}}
    log.log(logging.INFO if phase.line else PROGRESS, "%s", phase, extra=extra)


show: Callable[[Phase], None] = log_phase
"""Receiver of a phase's progress in this process; the engine's process sets its own."""


def in_bytes(count: float) -> str:
    """`1.50 GB`, `312 MB`, `4 kB`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Shows all phases on one line of a terminal; every other record erases that line and takes one of its own."""

    _drawn = False

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "phase"):
            self._erase()
            super().emit(record)
            return
        # The cursor goes back to the start of the line: whatever else is printed there begins there.
        text = f"gapless: {record.getMessage()}"[: self._columns() - 1]
        self._write(f"{CLEAR_LINE}{text}\r")
        self._drawn = True

    def close(self) -> None:
        self._erase()
        super().close()

    def _erase(self) -> None:
        if self._drawn:
            self._write(CLEAR_LINE)
            self._drawn = False

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal was closed
            self.stream.write(text)
            self.stream.flush()

    def _columns(self) -> int:
        with suppress(OSError):
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        return 80


@contextmanager
def starting(wanted: bool = True) -> Iterator[None]:
    """Show the start inside on standard error, for commands that set up no logging."""
    if not wanted:
        yield
        return
    terminal = sys.stderr.isatty()
    handler = TerminalHandler(sys.stderr) if terminal else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("gapless: %(message)s"))
    log.setLevel(PROGRESS if terminal else logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        handler.close()
