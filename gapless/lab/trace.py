"""Recordings of an engine as files: JSON lines of raw records, or Chrome trace JSON; either is read back.

A raw file has one JSON object a line: a head, then `group` lines (the keys of a set of decode rows, numbered from 0),
`step` lines (the columns of a step, the number of its group, its chunks) and `request` lines. Both forms name their
columns, and are read by these names.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gapless.base.errors import ConfigError
from gapless.base.records import Int64s
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

RAW_FORMAT = "gapless steps 2"


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    step: list[int]
    group: int
    chunks: list[tuple[int, int, int]] = []


class _GroupLine(msgspec.Struct, forbid_unknown_fields=True):
    group: list[int]


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    request: RequestRecord


class _Head(msgspec.Struct):
    format: str
    columns: list[str] = []


class _StepArgs(msgspec.Struct):
    record: list[int]
    group: int
    chunks: list[tuple[int, int, int]]


class _Other(msgspec.Struct):
    format: str = ""
    columns: list[str] = []
    groups: list[list[int]] = []


class _Chrome(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    otherData: _Other = msgspec.field(default_factory=_Other)


def is_raw(path: Path) -> bool:
    """Return whether a file of this name holds raw records; all others hold Chrome trace JSON."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def write(path: Path, recording: Recording) -> None:
    """Write a recording in the form that the name asks for: .jsonl or anything else, and .gz after it."""
    write_bytes(path, raw_lines(recording) if is_raw(path) else chrome_trace(recording))


def write_bytes(path: Path, data: bytes) -> None:
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
    lines: list[Any] = [_Head(RAW_FORMAT, list(COLUMNS))]
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
    head, _, rest = data.partition(b"\n")
    form = _decode(head, _Head, f"{where}:1")
    if form.format != RAW_FORMAT:
        raise ConfigError(f"{where}:1: not a recording of this version ({RAW_FORMAT})")
    groups: list[Any] = []
    steps: list[StepRecord] = []
    requests = []
    for number, line in enumerate(rest.splitlines(), 2):
        place = f"{where}:{number}"
        if line.startswith(b'{"group"'):
            groups.append(_keys(_decode(line, _GroupLine, place).group, place))
        elif line.startswith(b'{"request"'):
            requests.append(_decode(line, _Request, place).request)
        elif line.strip():
            found = _decode(line, _Step, place)
            numbers = _named(found.step, form.columns, place)
            steps.append(_record(numbers, found.group, found.chunks, groups, place))
    return Recording(StepTable.of(steps), requests)


def read_chrome(data: bytes, where: str) -> Recording:
    """What `chrome_trace` wrote, from the arguments of its events. Raises ConfigError for another program's file."""
    whole = _decode(data, _Chrome, where)
    if whole.otherData.format != FORMAT:
        raise ConfigError(f"{where}: a Chrome trace, but not one that this version of gapless wrote ({FORMAT})")
    groups = [_keys(keys, where) for keys in whole.otherData.groups]
    steps: list[StepRecord] = []
    requests = []
    for event in whole.traceEvents:
        args = event.get("args")
        if isinstance(args, dict) and "record" in args:
            found = _convert(args, _StepArgs, where)
            numbers = _named(found.record, whole.otherData.columns, where)
            steps.append(_record(numbers, found.group, found.chunks, groups, where))
        elif isinstance(args, dict) and "arrival" in args:
            requests.append(_convert([args.get(name) for name in RequestRecord._fields], RequestRecord, where))
    return Recording(StepTable.of(steps), requests)


def _keys(keys: list[int], where: str) -> Int64s:
    if any(abs(key) >= 1 << 63 for key in keys):
        raise ConfigError(f"{where}: keys are 64-bit integers")
    return np.array(keys, np.int64)


def _named(numbers: list[int], columns: list[str], where: str) -> dict[str, int]:
    """The numbers of a step by the names that its file gives them."""
    fits = len(numbers) == len(columns) and set(columns) == set(COLUMNS)
    if not fits or any(abs(number) >= 1 << 63 for number in numbers):
        raise ConfigError(f"{where}: a step needs a 64-bit integer for each of {', '.join(COLUMNS)}")
    return dict(zip(columns, numbers, strict=True))


def _record(numbers: dict[str, int], group: int, chunks: Sequence[Any], groups: list[Any], where: str) -> StepRecord:
    if not 0 <= group < len(groups):
        raise ConfigError(f"{where}: a step needs a group that is known")
    record: dict[str, Any] = {**numbers, "decode": groups[group]}
    return StepRecord(**record, chunks=tuple(ChunkRecord(*chunk) for chunk in chunks))


def _decode(data: bytes, kind: type[Any], where: str) -> Any:
    return _checked(lambda: msgspec.json.decode(data, type=kind), where)


def _convert(value: Any, kind: type[Any], where: str) -> Any:
    return _checked(lambda: msgspec.convert(value, kind), where)


def _checked(decode: Callable[[], Any], where: str) -> Any:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a recording: {error}") from error


def lines_of(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        yield "  " + "  ".join([first.ljust(widths[0]), *cells])
