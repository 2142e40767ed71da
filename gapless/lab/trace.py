"""Recordings of an engine: as files, which are read back, and in a screenful of text.

A file holds raw records as JSON lines, or Chrome trace JSON. The raw form begins with a head; then come `group` lines
(the keys of a set of decode rows, numbered from 0), `step` lines (the columns of a step, the number of its group, its
chunks, further ranks' waits) and `request` lines. Both forms name their columns, and are read by these names.
"""

from __future__ import annotations

import gzip
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from gapless.base.errors import ConfigError
from gapless.engine.trace import (
    COLUMNS,
    TRACE_FORMAT,
    ChunkRecord,
    Gap,
    Recording,
    RequestRecord,
    StepRecord,
    StepTable,
    all_gaps,
    chrome_trace,
    gaps_within,
    kind_of,
)

RAW_FORMAT = "gapless steps 6"
TRACE_PHASES = {
    "plan": ("planning_at", "planned_at"),
    "pack": ("planned_at", "packed_at"),
    "launch": ("packed_at", "launched_at"),
    "observe": ("observing_at", "observed_at"),
    "commit": ("observed_at", "committed_at"),
    "on the device": ("device_start", "device_end"),
}
"""Columns of the beginning and end of each phase of a step."""
T = TypeVar("T")
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    step: list[_Int64]
    group: Annotated[int, msgspec.Meta(ge=0)]
    chunks: list[tuple[_Int64, _Int64, _Int64]] = []
    waits: list[_Int64] = []


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
    for numbers, step in zip(steps.rows.tolist(), steps, strict=True):
        keys = tuple(step.decode.tolist())
        if keys not in known:
            known[keys] = len(known)
            lines.append({"group": keys})
        chunks = [(chunk.key, chunk.start, chunk.size) for chunk in step.chunks]
        lines.append(_Step(list(numbers), known[keys], chunks, [*step.waits]))
    lines += [{"request": request} for request in recording.requests]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def read_raw(data: bytes, where: str) -> Recording:
    """Read the text of `raw_lines`."""
    first, _, rest = data.partition(b"\n")
    head = _decode(first, _Head, f"{where}:1")
    if head.format != RAW_FORMAT:
        raise ConfigError(f"{where}:1: not a recording of this version ({RAW_FORMAT})")
    steps, requests = list[StepRecord](), list[RequestRecord]()
    for number, line in enumerate(rest.splitlines(), 2):
        place = f"{where}:{number}"
        if line.startswith(b'{"group"'):
            head.groups += _decode(line, dict[Literal["group"], list[_Int64]], place).values()
        elif line.startswith(b'{"request"'):
            requests += _decode(line, dict[Literal["request"], RequestRecord], place).values()
        elif line.strip():
            steps.append(_record(_decode(line, _Step, place), head, place))
    return Recording(StepTable.of(steps), requests)


def read_chrome(data: bytes, where: str) -> Recording:
    """Read the text of `chrome_trace`, from its events' arguments. Raises ConfigError for another program's file."""
    whole = _decode(data, _Chrome, where)
    if whole.otherData.format != TRACE_FORMAT:
        raise ConfigError(f"{where}: a Chrome trace, but not one that this version of gapless wrote ({TRACE_FORMAT})")
    steps, requests, known = [], [], RequestRecord._field_defaults
    for event in whole.traceEvents:
        args = event.get("args")
        if isinstance(args, dict) and "record" in args:
            step = {"step": args["record"]} | {name: args.get(name) for name in ("group", "chunks", "waits")}
            steps.append(_record(_decode(step, _Step, where), whole.otherData, where))
        elif isinstance(args, dict) and "arrival" in args:
            requests.append(
                _decode([args.get(name, known.get(name)) for name in RequestRecord._fields], RequestRecord, where)
            )
    return Recording(StepTable.of(steps), requests)


def _record(found: _Step, head: _Head, where: str) -> StepRecord:
    """The record of a step, whose numbers go by the names that its file gives them."""
    if len(found.step) != len(head.columns) or set(head.columns) != set(COLUMNS):
        raise ConfigError(f"{where}: a step needs a number for each of {', '.join(COLUMNS)}")
    if found.group >= len(head.groups):
        raise ConfigError(f"{where}: a step needs a group that is known")
    numbers: dict[str, Any] = dict(zip(head.columns, found.step, strict=True))
    decode = np.array(head.groups[found.group], np.int64)
    chunks = tuple(ChunkRecord(*chunk) for chunk in found.chunks)
    return StepRecord(**numbers, decode=decode, chunks=chunks, waits=tuple(found.waits))


def _decode(data: Any, kind: type[T], where: str) -> T:
    """The value that bytes of JSON, or plain objects, stand for. Raises ConfigError."""
    try:
        return msgspec.json.decode(data, type=kind) if isinstance(data, bytes) else msgspec.convert(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a recording: {error}") from error


class TraceSummary:
    """The summary that `gapless trace summary` shows of a recording, with its `worst` longest bubbles. Times are ns."""

    def __init__(self, recording: Recording, worst: int = 5) -> None:
        steps = recording.steps
        rows, gaps = steps.rows, all_gaps(steps)
        self.steps = len(steps)
        self.kinds = Counter(kind_of(step) for step in steps)
        self.missing = steps[-1].step - steps[0].step + 1 - len(steps) if steps else 0
        """Steps that the recording lacks in its middle; the time around them is left out of everything here."""
        within = gaps_within(steps)
        self.busy = int((rows["device_end"] - rows["device_start"]).sum()) - sum(gap.end - gap.start for gap in within)
        gaps += within
        self.span = self.busy + sum(gap.end - gap.start for gap in gaps)
        """Time covered by the steps and the gaps between them."""
        enqueueing = np.minimum(rows["launched_at"], rows["device_end"]) - rows["device_start"]
        self.enqueueing = int(enqueueing.clip(min=0).sum())
        """The part of `busy` during which the host was still enqueueing that very step."""
        self.idle = _idle(gaps)
        """(cause, idle time, number of gaps, the longest), the worst cause first."""
        bubbles = [gap for gap in gaps if gap.cause != "no_work"]
        self.worst = sorted(bubbles, key=lambda gap: gap.start - gap.end)[:worst]
        self.start = steps[0].planning_at if steps else 0
        phases = TRACE_PHASES.items() if steps else ()
        self.phases = {name: _spread((rows[end] - rows[begin]).tolist()) for name, (begin, end) in phases}
        """Median and 99th percentile of a step."""
        self.requests = len(recording.requests)

    def __str__(self) -> str:
        """Write the summary for a terminal."""
        return "\n".join(_lines(self))


def _idle(gaps: Sequence[Gap]) -> list[tuple[str, int, int, int]]:
    lengths: dict[str, list[int]] = {}
    for gap in gaps:
        lengths.setdefault(gap.cause, []).append(gap.end - gap.start)
    found = [(cause, sum(each), len(each), max(each)) for cause, each in lengths.items()]
    return sorted(found, key=lambda idle: -idle[1])


def _spread(values: Sequence[int]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def _lines(found: TraceSummary) -> Iterator[str]:
    if not found.steps:
        yield "no steps in this recording"
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.kinds.items()))
    yield f"{found.steps:,} steps ({kinds}) in {found.span / 1e9:.3f} s, {found.requests:,} requests"
    if found.missing:
        yield f"{found.missing:,} steps are missing in between; the time around them is not counted"
    yield f"device busy {_share(found.busy, found.span)}"
    yield f"  {_share(found.enqueueing, found.busy)} of it while the host was still enqueueing that very step,"
    yield "  where the device may have waited inside of it"
    if found.idle:
        rows: list[tuple[str, ...]] = [("idle by cause", "ms", "of the time", "gaps", "longest us")]
        for cause, total, gaps, longest in found.idle:
            name = f"{cause} (nothing to do)" if cause == "no_work" else cause
            rows.append((name, f"{total / 1e6:.3f}", _share(total, found.span), f"{gaps:,}", f"{longest / 1e3:.1f}"))
        yield from _table(rows)
    if found.worst:
        rows = [("worst bubbles", "at s", "us", "step")]
        for gap in found.worst:
            at = (gap.start - found.start) / 1e9
            rows.append((gap.cause, f"{at:.6f}", f"{(gap.end - gap.start) / 1e3:.1f}", str(gap.step)))
        yield from _table(rows)
    rows = [("time of a step", "median us", "p99 us")]
    rows += [(name, f"{median / 1e3:.1f}", f"{p99 / 1e3:.1f}") for name, (median, p99) in found.phases.items()]
    yield from _table(rows)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0 %"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        yield "  " + "  ".join([first.ljust(widths[0]), *cells])
