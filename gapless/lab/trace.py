"""Recordings of an engine as files: JSON lines of raw records, or Chrome trace JSON; either is read back.

A raw file has one JSON object a line: a head, then `group` lines (the keys of a set of decode rows, numbered from 0),
`step` lines (the columns of a step, the number of its group, its chunks) and `request` lines. Both forms name their
columns, and are read by these names.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from gapless.base.errors import ConfigError
from gapless.engine.trace import (
    COLUMNS,
    FORMAT,
    ChunkRecord,
    Recording,
    RequestRecord,
    StepRecord,
    StepTable,
    chrome_trace,
)

RAW_FORMAT = "gapless steps 3"
T = TypeVar("T")


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    step: list[_Int64]
    group: Annotated[int, msgspec.Meta(ge=0)]
    chunks: list[tuple[_Int64, _Int64, _Int64]] = []


class _GroupLine(msgspec.Struct, forbid_unknown_fields=True):
    group: list[_Int64]


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    request: RequestRecord


class _Head(msgspec.Struct):
    format: str = ""
    columns: list[str] = []
    groups: list[list[_Int64]] = []


class _Chrome(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    otherData: _Head = msgspec.field(default_factory=_Head)


def is_raw(path: Path) -> bool:
    """Return whether a file of this name holds raw records; all others hold Chrome trace JSON."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def write(path: Path, recording: Recording) -> None:
    """Write a recording in the form that the name asks for: .jsonl or anything else, and .gz after it."""
    data = raw_lines(recording) if is_raw(path) else chrome_trace(recording)
    try:
        path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> Recording:
    """Read either form. Raises ConfigError naming the file, and the line where there is one."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return read_raw(data, str(path)) if is_raw(path) else read_chrome(data, str(path))


def raw_lines(recording: Recording) -> bytes:
    """The raw form."""
    lines: list[Any] = [{"format": RAW_FORMAT, "columns": COLUMNS}]
    known: dict[tuple[int, ...], int] = {}
    steps = recording.steps
    for numbers, decode, chunks in zip(steps.rows.tolist(), steps.decode, steps.chunks, strict=True):
        keys = tuple(decode.tolist())
        if keys not in known:
            known[keys] = len(known)
            lines.append(_GroupLine(list(keys)))
        lines.append(_Step(list(numbers), known[keys], [(chunk.key, chunk.start, chunk.size) for chunk in chunks]))
    lines += [_Request(request) for request in recording.requests]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def read_raw(data: bytes, where: str) -> Recording:
    """What `raw_lines` wrote."""
    first, _, rest = data.partition(b"\n")
    head = _decode(first, _Head, f"{where}:1")
    if head.format != RAW_FORMAT:
        raise ConfigError(f"{where}:1: not a recording of this version ({RAW_FORMAT})")
    steps, requests = [], []
    for number, line in enumerate(rest.splitlines(), 2):
        place = f"{where}:{number}"
        if line.startswith(b'{"group"'):
            head.groups.append(_decode(line, _GroupLine, place).group)
        elif line.startswith(b'{"request"'):
            requests.append(_decode(line, _Request, place).request)
        elif line.strip():
            steps.append(_record(_decode(line, _Step, place), head, place))
    return Recording(StepTable.of(steps), requests)


def read_chrome(data: bytes, where: str) -> Recording:
    """What `chrome_trace` wrote, from the arguments of its events. Raises ConfigError for another program's file."""
    whole = _decode(data, _Chrome, where)
    if whole.otherData.format != FORMAT:
        raise ConfigError(f"{where}: a Chrome trace, but not one that this version of gapless wrote ({FORMAT})")
    steps, requests = [], []
    for event in whole.traceEvents:
        args = event.get("args")
        if isinstance(args, dict) and "record" in args:
            step = {"step": args["record"], "group": args.get("group"), "chunks": args.get("chunks")}
            steps.append(_record(_decode(step, _Step, where), whole.otherData, where))
        elif isinstance(args, dict) and "arrival" in args:
            requests.append(_decode([args.get(name) for name in RequestRecord._fields], RequestRecord, where))
    return Recording(StepTable.of(steps), requests)


def _record(found: _Step, head: _Head, where: str) -> StepRecord:
    """The record of a step, whose numbers go by the names that its file gives them."""
    if len(found.step) != len(head.columns) or set(head.columns) != set(COLUMNS):
        raise ConfigError(f"{where}: a step needs a number for each of {', '.join(COLUMNS)}")
    if found.group >= len(head.groups):
        raise ConfigError(f"{where}: a step needs a group that is known")
    numbers: dict[str, Any] = dict(zip(head.columns, found.step, strict=True))
    decode = np.array(head.groups[found.group], np.int64)
    return StepRecord(**numbers, decode=decode, chunks=tuple(ChunkRecord(*chunk) for chunk in found.chunks))


def _decode(data: Any, kind: type[T], where: str) -> T:
    """The value that bytes of JSON, or plain objects, stand for. Raises ConfigError."""
    try:
        return msgspec.json.decode(data, type=kind) if isinstance(data, bytes) else msgspec.convert(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a recording: {error}") from error


def lines_of(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        yield "  " + "  ".join([first.ljust(widths[0]), *cells])
