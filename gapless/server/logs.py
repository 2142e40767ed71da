"""Logging of the server process: to stderr, from a thread of its own, so that a stuck pipe stops nobody."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener

import msgspec

from gapless.server.config import ServerConfig

MAX_WAITING = 10_000
_QUIET = ("/health", "/ready", "/ping", "/metrics")


class DroppingHandler(QueueHandler):
    """Counts the lines that a full queue could not take, and goes on."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return msgspec.json.encode(line).decode()


def text_formatter() -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")


def not_a_probe(record: logging.LogRecord) -> bool:
    """False for an access line of a health or metrics probe: they come every second and say nothing."""
    arguments = record.args
    path = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else ""
    return str(path).partition("?")[0] not in _QUIET


@contextmanager
def logging_to_stderr(config: ServerConfig) -> Iterator[None]:
    """Set up the root logger for the time of the block."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter() if config.log_format == "json" else text_formatter())
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    handler = DroppingHandler(waiting)
    listener = QueueListener(waiting, lines)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(root.level, logging.WARNING))
    access = logging.getLogger("uvicorn.access")
    access.addFilter(not_a_probe)
    listener.start()
    try:
        yield
    finally:
        access.removeFilter(not_a_probe)
        root.removeHandler(handler)
        root.setLevel(before)
        listener.stop()
