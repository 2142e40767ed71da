"""Logging of the server process: to stderr, from a thread of its own, so that a stuck pipe does not stop the server."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from typing import Any

import msgspec

from gapless.base import progress
from gapless.engine.seam import EngineInfo
from gapless.engine.stats import Stats
from gapless.server.config import ServerConfig
from gapless.server.errors import log
from gapless.server.settings import changed
from gapless.server.state import ServerState
from gapless.server.tracing import Generated

MAX_WAITING = 10_000
STATS_SECONDS = 10.0
_QUIET = frozenset(("/health", "/ready", "/ping", "/metrics"))
_ACCESS = ("client", "method", "path", "http_version", "status")
_TEXT = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")


class DroppingHandler(QueueHandler):
    """Drops the lines that a full queue cannot take."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy that will not change any more, with its exception as text."""
        record = copy.copy(record)
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            record.fields = dict(zip(_ACCESS, record.args, strict=True))
        try:
            record.msg = record.getMessage()
        except Exception:  # a line whose arguments do not fit is still worth reading
            record.msg = f"{record.msg!r} {record.args!r}"
        record.args = None
        if record.exc_info:
            record.exc_text = record.exc_text or _TEXT.formatException(record.exc_info)
            record.exc_info = None
        return record


class JsonFormatter(logging.Formatter):
    """Formats what a DroppingHandler prepared as a line with one JSON object.

    `extra={"fields": {...}}` of a logging call adds to it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        fields = getattr(record, "fields", {})
        return to_json({**line, **{name: value for name, value in fields.items() if name not in line}})


def to_json(line: Mapping[str, Any]) -> str:
    """JSON on one line, whatever the values are."""
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except (UnicodeEncodeError, TypeError, ValueError):  # bytes of a client that are no text, a foreign key
        plain = {str(name): str(value).encode("utf-8", "backslashreplace").decode() for name, value in line.items()}
        return msgspec.json.encode(plain).decode()


def is_shown(record: logging.LogRecord, quiet: Collection[str] = ()) -> bool:
    """Return whether an access line is written: probes and watching pages would add one every second, and lines of
    `quiet` paths are unwanted."""
    arguments = record.args
    path = str(arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else "").partition("?")[0]
    return path not in _QUIET and not path.startswith("/debug/") and path not in quiet


@contextmanager
def logging_to_stderr(config: ServerConfig) -> Iterator[None]:
    """Set up the root logger for the time of the block."""
    one_line = config.log_format == "text" and wants(config, logging.INFO) and sys.stderr.isatty()
    lines = progress.TerminalHandler(sys.stderr) if one_line else logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter() if config.log_format == "json" else _TEXT)
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    handler = DroppingHandler(waiting)
    listener = QueueListener(waiting, lines)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    progress.log.setLevel(progress.PROGRESS if one_line else logging.NOTSET)
    for name in ("uvicorn.error", "httpx", "httpx2"):  # a hub's addresses may be signed
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    access = logging.getLogger("uvicorn.access")
    quiet = ",".join(config.disable_access_log_for_endpoints).split(",")
    shown = partial(is_shown, quiet=frozenset(map(str.strip, quiet)))
    access.addFilter(shown)
    logging.captureWarnings(True)
    listener.start()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        access.removeFilter(shown)
        root.removeHandler(handler)
        root.setLevel(before)
        progress.log.setLevel(logging.NOTSET)
        listener.stop()
        lines.close()


def wants(config: ServerConfig, level: int) -> bool:
    """Return whether lines of this level are asked for."""
    return level >= logging.getLevelNamesMapping()[config.log_level.upper()]


def say(config: ServerConfig, level: int, text: str) -> None:
    """A line on stderr from before or after the time of logging."""
    if not wants(config, level):
        return
    if config.log_format == "json":
        text = JsonFormatter().format(logging.LogRecord(log.name, level, "", 0, text, None, None))
    else:
        text = f"gapless: {text}"
    print(text, file=sys.stderr, flush=True)


def log_settings(*configs: Any) -> None:
    """Log the settings that differ from the defaults, without secrets."""
    differing = {name: value for config in configs for name, value in changed(config).items()}
    text = ", ".join(f"{name}={value}" for name, value in differing.items()) or "all defaults"
    log.info("settings: %s", text, extra={"fields": {"settings": differing}})


def log_start(info: EngineInfo, seconds: float) -> None:
    """Log how long each part of the start took, and how much fits into the KV cache."""
    tokens = info.pages * info.page_size
    log.info(
        "%s size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx (at most %d run at once)",
        _cache_name(info),
        f"{tokens:,}",
        f"{info.max_model_len:,}",
        tokens / info.max_model_len,
        info.max_num_seqs,
        extra={"fields": {"kv_cache_tokens": tokens, "max_model_len": info.max_model_len}},
    )
    rest = max(0.0, seconds - sum(spent for _, spent in info.startup_seconds))
    phases = [("process and imports", rest), *info.startup_seconds, ("ready", seconds)]
    table = " | ".join(f"{what} {spent:.2f}" for what, spent in phases)
    log.info(
        "start-up, seconds: %s",
        table,
        extra={"fields": {"startup_seconds": {what: round(spent, 3) for what, spent in phases}}},
    )


def _cache_name(info: EngineInfo) -> str:
    """Return what vLLM calls the KV cache, so that parsers of its lines find it."""
    return "GPU KV cache" if info.own_memory else "KV cache"


def log_request(what: Generated, seconds: float, trace_id: str) -> None:
    """The line of an ended generation request."""
    first = what.slowest.time_to_first_token
    known = {
        "request_id": what.label,
        "response_id": what.identity,
        "trace_id": trace_id,
        "model": what.model,
        "prompt_tokens": what.prompt_tokens,
        "cached_tokens": what.cached_tokens,
        "generation_tokens": what.generation_tokens,
        "queue_seconds": what.slowest.queue_seconds,
        "time_to_first_token_seconds": first,
        "duration_seconds": seconds,
        "finish_reasons": list(what.reasons),
    }
    fields = [(name, value) for name, value in known.items() if value not in (None, "")]
    log.info(
        "request %s: %d prompt tokens (%d cached), %d generated, %sin %.3f s, %s%s",
        f"{what.label} ({what.identity})" if what.label else what.identity,
        what.prompt_tokens,
        what.cached_tokens,
        what.generation_tokens,
        f"the first after {first:.3f} s, " if first is not None else "",
        seconds,
        ",".join(what.reasons),
        f", trace {trace_id}" if trace_id else "",
        extra={"fields": {name: round(value, 6) if isinstance(value, float) else value for name, value in fields}},
    )


async def log_stats(state: ServerState, every: float = STATS_SECONDS) -> None:
    """Write lines until cancelled. Idle seconds get no line."""
    before, since = state.llm.stats(), time.monotonic()
    while True:
        await asyncio.sleep(every)
        now, at = state.llm.stats(), time.monotonic()
        numbers = rates(before, now, at - since)
        if numbers:
            log.info(stats_line(numbers, _cache_name(state.llm.info)), extra={"fields": numbers})
        before, since = now, at


def rates(before: Stats, now: Stats, seconds: float) -> dict[str, float]:
    """Return what happened between two looks; empty when nothing did. Idle times are shares of all time."""
    old, new, queue = before.steps, now.steps, now.queue
    prompt, generated = new.prompt_tokens - old.prompt_tokens, new.generation_tokens - old.generation_tokens
    if not (prompt or generated or queue.running or queue.waiting):
        return {}
    queries, hits = new.prefix_queries - old.prefix_queries, new.prefix_hits - old.prefix_hits
    numbers: dict[str, float] = {
        "prompt_tokens_per_second": prompt / seconds,
        "generation_tokens_per_second": generated / seconds,
        "running": queue.running,
        "waiting": queue.waiting,
        "kv_cache_usage_percent": 100 * now.pages.usage,
        "prefix_cache_hit_percent": 100 * hits / max(1, queries),
    }
    wall = now.device.wall_ns - before.device.wall_ns
    if wall > 0:
        for cause, ns in now.device.idle_ns.items():
            numbers[f"device_idle_{cause}_percent"] = 100 * (ns - before.device.idle_ns[cause]) / wall
    return {name: round(value, 3) for name, value in numbers.items()}


def stats_line(numbers: dict[str, float], cache: str = "KV cache") -> str:
    """Return the numbers as text; `cache` is what the KV cache is called. Idle time is shown only if there was work."""
    line = (
        f"Avg prompt throughput: {numbers['prompt_tokens_per_second']:.1f} tokens/s, "
        f"Avg generation throughput: {numbers['generation_tokens_per_second']:.1f} tokens/s, "
        f"Running: {numbers['running']} reqs, Waiting: {numbers['waiting']} reqs, "
        f"{cache} usage: {numbers['kv_cache_usage_percent']:.1f}%, "
        f"Prefix cache hit rate: {numbers['prefix_cache_hit_percent']:.1f}%"
    )
    start, end = "device_idle_", "_percent"
    causes = {name[len(start) : -len(end)]: share for name, share in numbers.items() if name.startswith(start)}
    if not causes:
        return line
    del causes["no_work"]
    listed = ", ".join(f"{cause} {share:.1f}%" for cause, share in causes.items() if share >= 0.05)
    return f"{line}, Device idle with work: {sum(causes.values()):.1f}%" + (f" ({listed})" if listed else "")
