"""A recording of steps and requests, and its form as Chrome trace JSON, for Perfetto and chrome://tracing.

The file is the "JSON object" form of the trace event format: complete events ("X") on named lanes, counters ("C"), and
one flow ("s", "t", "f") a request, from its lane to its steps. Times are microseconds from the first event. Other data
is in `args` and `otherData`, so that the recording can be read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gapless.base.records import CAUSES

# Re-exported for rooms that read recordings and do not import the loop.
from gapless.loop.records import COLUMNS as COLUMNS
from gapless.loop.records import ChunkRecord as ChunkRecord
from gapless.loop.records import StepRecord as StepRecord
from gapless.loop.records import StepTable as StepTable
from gapless.loop.timeline import Gap as Gap
from gapless.loop.timeline import all_gaps as all_gaps
from gapless.loop.timeline import gaps_within as gaps_within
from gapless.loop.timeline import idle_parts

TraceEvent = dict[str, Any]

ENGINE, REQUESTS = 1, 2
HOST_LANE, COMPUTE, IDLE, COPY_OUT, LOADS, STORES = 1, 2, 3, 4, 5, 6
TRACKS = {HOST_LANE: "host", COMPUTE: "compute", IDLE: "idle, by cause", COPY_OUT: "copy out"}
TRACKS |= {LOADS: "pages from the host tier", STORES: "pages to the host tier"}
RANK_LANES = 10
"""Lane of rank 0, if there are several; the others follow."""
MAX_ARROWS = 20_000
"""Most arrows of a request. With more steps, they lead to its prompt chunks, first and last step, and some in
between."""
RATE_WINDOW_NS = 100_000_000
KEPT_REQUESTS = 500
"""Ended requests kept."""
TRACE_FORMAT = "gapless 6"
"""Version of a file's arguments, checked when it is read back."""


class RequestRecord(NamedTuple):
    """A request seen by the front, for the debug endpoints: counts and times, no text and no tokens.

    Times are monotonic ns, 0 for events still ahead.
    """

    id: str
    keys: tuple[int, ...]
    """The engine's keys of its completions."""
    arrival: int
    started: int
    first_token: int
    last_token: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    state: str
    """waiting, running or done"""
    finish_reason: str | None
    """Finish reason of its first completion; "error" if the whole request failed."""
    request_id: str = ""
    """The client's name for it; empty for none"""


class Recording(NamedTuple):
    """A period of an engine: its steps in order, and its requests."""

    steps: StepTable
    requests: Sequence[RequestRecord]


def chrome_trace(recording: Recording) -> bytes:
    steps = recording.steps
    groups = _groups(steps)
    events = [*_host(steps), *_device(steps, groups), *_ranks(steps), *_counters(steps), *_requests(recording)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    base = events[0]["ts"] if events else 0
    for event in events:
        event["ts"] = (event["ts"] - base) / 1e3
        if "dur" in event:
            event["dur"] /= 1e3
    members = [list(keys) for keys in groups]
    other = {"format": TRACE_FORMAT, "base_ns": base, "columns": COLUMNS, "groups": members}
    whole = {"displayTimeUnit": "ns", "otherData": other, "traceEvents": [*_names(recording), *events]}
    return msgspec.json.encode(whole)


def _groups(steps: StepTable) -> dict[tuple[int, ...], int]:
    """Return the occurring sets of decode rows, numbered."""
    groups: dict[tuple[int, ...], int] = {}
    before = None
    for decode in steps.decode:
        if decode is not before:
            before = decode
            groups.setdefault(tuple(decode.tolist()), len(groups))
    return groups


def _names(recording: Recording) -> Iterator[TraceEvent]:
    yield _name("process_name", ENGINE, 0, "engine")
    ranks = {RANK_LANES + rank: f"waits of rank {rank}" for rank in range(_world(recording.steps))}
    for tid, lane in (TRACKS | ranks).items():
        yield _name("thread_name", ENGINE, tid, lane)
        yield {**_name("thread_sort_index", ENGINE, tid, ""), "args": {"sort_index": tid}}
    yield _name("process_name", REQUESTS, 0, "requests")
    for tid, request in enumerate(recording.requests, 1):
        yield _name("thread_name", REQUESTS, tid, request.id)


def _name(what: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(tid: int, name: str, start: int, end: int, args: dict[str, Any], pid: int = ENGINE) -> TraceEvent:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": max(0, end - start), "args": args}


def _host(steps: StepTable) -> Iterator[TraceEvent]:
    for step in steps:
        args = {"step": step.step}
        if step.capture_until:
            yield _span(HOST_LANE, "capture", step.capture_from, step.capture_until, args)
        yield _span(HOST_LANE, "plan", step.planning_at, step.planned_at, args)
        yield _span(HOST_LANE, "pack", step.planned_at, step.packed_at, args)
        yield _span(HOST_LANE, "launch", step.packed_at, step.launched_at, args)
        yield _span(HOST_LANE, "observe", step.observing_at, step.observed_at, {**args, "waited": step.waited})
        yield _span(HOST_LANE, "commit", step.observed_at, step.committed_at, args)


def kind_of(step: StepRecord) -> str:
    if not step.chunk_tokens:
        return "decode"
    return "mixed" if step.decode_rows else "prefill"


def _device(steps: StepTable, groups: dict[tuple[int, ...], int]) -> Iterator[TraceEvent]:
    ended = copied = 0
    for step, numbers in zip(steps, steps.rows.tolist(), strict=True):
        args = {
            "decode_rows": step.decode_rows,
            "chunk_tokens": step.chunk_tokens,
            "in_flight": step.in_flight,
            "record": numbers,
            "group": groups[tuple(step.decode.tolist())],
            "chunks": [list(chunk) for chunk in step.chunks],
            "waits": step.waits,
        }
        # The two clocks of a GPU agree to a microsecond or so; lanes must not overlap for that.
        start = max(step.device_start, ended)
        ended = max(step.device_end, start)
        yield _span(COMPUTE, f"{kind_of(step)} {step.step}", start, ended, args)
        if step.home_at > step.device_end:
            begin = max(step.device_end, copied)
            copied = max(step.home_at, begin)
            yield _span(COPY_OUT, "tokens", begin, copied, {"step": step.step})
        if step.loads_until:
            yield _span(LOADS, "loads", step.loads_from, step.loads_until, {"before": step.step})
        if step.stores_until:
            yield _span(STORES, "stores", step.stores_from, step.stores_until, {"before": step.step})
    for gap in all_gaps(steps) + gaps_within(steps):
        yield _span(IDLE, gap.cause, gap.start, gap.end, {"step": gap.step})


def _world(steps: StepTable) -> int:
    """Return the number of ranks; 0 for one alone."""
    return max([len(waits) + 1 for waits in steps.waits if waits], default=0)


def _ranks(steps: StepTable) -> Iterator[TraceEvent]:
    """Yield what each rank waited for the others, at the end of each step."""
    for step in steps if _world(steps) else ():
        for rank, wait in enumerate((step.ranks_ns, *step.waits)):
            yield _span(RANK_LANES + rank, "waits", step.device_end - wait, step.device_end, {"step": step.step})


def _counters(steps: StepTable) -> Iterator[TraceEvent]:
    tokens, since = 0, steps[0].device_start if steps else 0
    for step in steps:
        rows = {"decode": step.decode_rows, "prefill": len(step.chunks)}
        yield _counter("running", step.device_start, rows)
        yield _counter("in flight", step.launched_at, {"steps": step.in_flight})
        tokens += step.decode_rows
        if step.device_end - since >= RATE_WINDOW_NS:
            yield _counter("decode tokens/s", since, {"tokens": round(tokens * 1e9 / (step.device_end - since), 1)})
            tokens, since = 0, step.device_end


def _counter(name: str, at: int, values: dict[str, Any]) -> TraceEvent:
    return {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": at, "args": values}


def _requests(recording: Recording) -> Iterator[TraceEvent]:
    taken = steps_of(recording)
    total = sum(len(steps) for steps in taken)
    keep = max(4, MAX_ARROWS // max(1, len(taken))) if total > MAX_ARROWS else total
    end = max([step.committed_at for step in recording.steps[-1:]], default=0)
    for tid, (request, steps) in enumerate(zip(recording.requests, taken, strict=True), 1):
        yield from _request_spans(tid, request, end)
        yield from _flow(tid, request, _thinned(steps, keep))


def _request_spans(tid: int, request: RequestRecord, end: int) -> Iterator[TraceEvent]:
    done = request.state == "done"
    until = max(request.last_token, request.arrival) if done else max(end, request.last_token, request.arrival)
    yield _span(tid, request.id, request.arrival, until, request._asdict(), REQUESTS)
    moments = (request.arrival, request.started, request.first_token, request.last_token if done else until)
    for name, (start, stop) in zip(("queue", "prefill", "decode"), pairwise(moments), strict=True):
        if start and (stop or not done):
            yield _span(tid, name, start, min(stop, until) if stop else until, {}, REQUESTS)
        if not stop:
            return


def steps_of(recording: Recording) -> list[list[StepRecord]]:
    """Return the steps of each request."""
    place = {key: at for at, request in enumerate(recording.requests) for key in request.keys}
    found: list[list[StepRecord]] = [[] for _ in recording.requests]
    for step in recording.steps:
        keys = dict.fromkeys([*(chunk.key for chunk in step.chunks), *step.decode.tolist()])
        for at in dict.fromkeys(place[key] for key in keys if key in place):
            found[at].append(step)
    return found


def _thinned(steps: list[StepRecord], keep: int) -> list[StepRecord]:
    if len(steps) <= keep:
        return steps
    every = -(-len(steps) // keep)
    last = len(steps) - 1
    return [step for at, step in enumerate(steps) if at % every == 0 or at == last or step.chunks]


def _flow(tid: int, request: RequestRecord, steps: list[StepRecord]) -> Iterator[TraceEvent]:
    if not steps or steps[0].device_start < request.arrival:
        return
    flow = {"cat": "request", "name": "request", "id": tid}
    yield {"ph": "s", "pid": REQUESTS, "tid": tid, "ts": request.arrival, **flow}
    for step in steps[:-1]:
        yield {"ph": "t", "pid": ENGINE, "tid": COMPUTE, "ts": step.device_start, **flow}
    yield {"ph": "f", "bp": "e", "pid": ENGINE, "tid": COMPUTE, "ts": steps[-1].device_start, **flow}


STEP_COLUMNS = (*COLUMNS, "waits", "idle_ns", "cause")
"""Columns of `step_rows`: a step's, further ranks' waits, the idle time before it, and the main cause of that."""


def step_rows(steps: StepTable) -> tuple[list[list[Any]], list[Gap]]:
    """Return a row of STEP_COLUMNS for each step but the first, which only marks the start of idle time, and the
    gaps, in order of time."""
    rows, before = steps.rows[1:], steps.rows[:-1]
    parts = idle_parts(rows, before["device_end"])
    follows = rows["step"] == before["step"] + 1
    lengths = np.diff(parts.edges, axis=0) * follows
    idle = lengths.sum(axis=0).tolist()
    causes = parts.causes()[lengths.argmax(axis=0), np.arange(len(rows))].tolist() if len(rows) else []
    named = [CAUSES[cause] if ns else None for cause, ns in zip(causes, idle, strict=True)]
    found = zip(rows.tolist(), steps.waits[1:], idle, named, strict=True)
    gaps = sorted(all_gaps(steps) + gaps_within(steps[1:]), key=lambda gap: gap.start)
    return [[*row, *more] for row, *more in found], gaps
