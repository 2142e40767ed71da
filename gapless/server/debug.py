"""Debug endpoints, for the live page and `gapless trace`: steps as they happen, traces, requests, pages."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import gapless
from gapless.base import host
from gapless.base.errors import RequestError
from gapless.engine.series import SERIES
from gapless.engine.stats import Stats
from gapless.engine.trace import (
    KEPT_REQUESTS,
    STEP_COLUMNS,
    Recording,
    RequestRecord,
    StepTable,
    chrome_trace,
    step_rows,
)
from gapless.engine.watch import LOG_STEPS, StepWatcher
from gapless.server.answer import head_of, stream_headers, write
from gapless.server.endpoint import HttpCall, json_response
from gapless.server.errors import ApiError
from gapless.server.samples import SAMPLE_COLUMNS as SAMPLE_COLUMNS
from gapless.server.settings import changed, place, settings
from gapless.server.state import ServerState

MAX_WATCHERS = 8
MAX_TRACE_SECONDS = 60
MAX_TRACE_STEPS = 30_000
EVENT_SECONDS = 0.1
QUIET_SECONDS = 1.0
"""An event at least so often, also when nothing happens."""
MAX_STEPS = 200
"""Steps in one event; older ones are left out and counted."""
RATE_SECONDS = 1.0
TIER_COLUMNS = (
    *("used", "size", "hits", "missed", "loading", "storing", "stored", "loaded"),
    *("read_bytes", "written_bytes", "refused", "late"),
)


async def steps(call: HttpCall) -> ASGIApp:
    """Stream the steps as they complete, as server-sent events. The engine sends none while no client listens."""
    call.state.check_open()
    llm, engine = call.state.llm, _engine(call)
    watch = llm.watches[engine]
    if watch.watchers >= MAX_WATCHERS:
        raise ApiError(429, f"{MAX_WATCHERS} watch already", "rate_limit_error", code="too_many_watchers")
    if call.request.method == "HEAD":  # an answer without an end would never end
        return Response(headers=stream_headers())

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        with watch.open():
            await send(head_of())
            try:
                await call.while_wanted(_pump(watch, llm.backend.engines[engine].stats, send), None)
            except ApiError:  # the server closes
                await write(send, b"", more=False)

    return stream


async def trace(call: HttpCall) -> ASGIApp:
    """Answer with Chrome trace JSON of the last seconds that the engine keeps, or with ahead=1 of the next."""
    seconds = _number(call, "seconds", 5, 1, MAX_TRACE_SECONDS)
    call.state.check_open()
    llm, debug, engine = call.state.llm, call.state.debug, _engine(call)
    watch = llm.watches[engine]
    ahead = _number(call, "ahead", 0, 0, 1)
    since = time.monotonic_ns() - (0 if ahead else seconds * 10**9)
    if debug.traces.locked():
        raise ApiError(429, "traces are being made already", "rate_limit_error", code="too_many_traces")
    async with debug.traces:
        if ahead:
            seen = await call.while_wanted(_next_steps(watch, seconds), None)
        else:
            seen = (await watch.look(since)).steps
        latest = await _latest(call.state, KEPT_REQUESTS)
        requests = [r for r in latest if r.state != "done" or r.last_token >= since]
        async with debug.writing:
            data = await llm.in_pool(lambda: chrome_trace(Recording(seen, requests)))
    of = f"-engine-{engine}" if len(llm.watches) > 1 else ""
    headers = {"content-disposition": f'attachment; filename="gapless-trace{of}.json"'}
    return Response(data, media_type="application/json", headers=headers)


async def _latest(state: ServerState, limit: int) -> list[RequestRecord]:
    """Return the newest requests of all fronts, newest last."""
    found = [*state.llm.latest_requests(limit), *await state.others.latest(limit)]
    return sorted(found, key=lambda record: record.arrival)[-limit:]


async def _next_steps(watch: StepWatcher, seconds: int) -> StepTable:
    """Return the steps of the next seconds; the newest MAX_TRACE_STEPS of them."""
    seen = StepTable.of()
    with watch.open():
        place, end = watch.log.ended, time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, EVENT_SECONDS))
            seen = (seen + watch.after(place, LOG_STEPS)[0])[-MAX_TRACE_STEPS:]
            place = watch.log.ended
    return seen


async def kv(call: HttpCall) -> ASGIApp:
    """Answer with the KV pages by state, one letter for each page, and what the tiers hold and do."""
    call.state.check_open()
    llm, engine = call.state.llm, _engine(call)
    view = await call.state.debug.pages(llm, engine)
    stats = llm.backend.engines[engine].stats()
    counts = asdict(stats.pages)
    if view.pages:
        counts = {state: view.pages.count(letter) for state, letter in zip(counts, b"fcox", strict=True)}
    sizes = {"pages": stats.pages.total, "page_size": llm.info.page_size}
    tiers = tier_rows(stats, llm.info.tiers)
    return json_response({**sizes, "counts": counts, "map": view.pages.decode(), "tiers": tiers})


async def history(call: HttpCall) -> ASGIApp:
    """Answer with the samples from number `after` on, the latencies of the last minute, and memory."""
    state, llm = call.state, call.state.llm
    first, samples = state.samples.after(_number(call, "after", 0, 0, 10**9 - 1))
    free, total = host.memory()
    pids = [pid for one in llm.backend.engines if (pid := getattr(one, "pid", None))]
    kv_bytes = sum([one.info.kv_bytes for one in llm.backend.engines]) if llm.started else 0
    server = host.resident("self") + sum(map(host.resident, state.others.pids))
    memory = {"free": free, "total": total, "server": server, "kv": kv_bytes}
    memory |= {"engine": sum([host.resident(one) for pid in pids for one in host.with_children(pid)])}
    seen = {"columns": SAMPLE_COLUMNS, "first": first, "next": state.samples.ended, "samples": samples}
    return json_response({**seen, "latency": state.samples.latency(), "memory": memory})


async def requests(call: HttpCall) -> ASGIApp:
    """Answer with the latest requests: counts and times, no text. Chunks are there while a client watches."""
    limit = _number(call, "limit", 100, 1, KEPT_REQUESTS)
    llm = call.state.llm
    chunks: dict[int, list[list[int]]] = {}
    for step in llm.watches[_engine(call)].log.table(0):
        for chunk in step.chunks:
            chunks.setdefault(chunk.key, []).append([step.device_start, step.device_end, chunk.size, step.step])
    rows = [
        {**record._asdict(), "chunks": [chunk for key in record.keys for chunk in chunks.get(key, ())]}
        for record in await _latest(call.state, limit)
    ]
    return json_response({"requests": rows})


async def server_info(call: HttpCall) -> ASGIApp:
    """Answer with version, settings, tiers and peers, without secrets and directories."""
    state = call.state
    engine = settings(state.llm.config) if state.llm.config is not None else {}
    server = settings(state.config)
    differing = changed(state.config) | (changed(state.llm.config) if state.llm.config is not None else {})
    info = state.llm.info._asdict() if state.llm.started else {}
    if info:
        info |= {
            "model": state.model_names[0],
            "commit": state.llm.front.commit,
            "weight_version": state.weight_version,
        } | state.replies.names()
    tiers = {"tiers": tier_rows(state.llm.stats(), state.llm.info.tiers) if info else [], "peers": _peers(state)}
    return json_response(
        {"version": gapless.__version__, "engine": engine, "server": server, "changed": differing, "info": info} | tiers
    )


def _peers(state: ServerState) -> dict[str, Any]:
    """Return where this engine gives pages, whom it takes them from, and whether that is over TLS."""
    plan = state.peers
    peers = [place(str(peer)) for peer in plan.peers]
    return {"listen": plan.listen and place(str(plan.listen)), "peers": peers, "tls": plan.tls is not None}


def tier_rows(stats: Stats, lower: Sequence[str]) -> list[dict[str, Any]]:
    """Return each tier's content, activity and counts. Sizes of the host tier are pages, of others bytes."""
    host = stats.tier
    if not host.slots:  # there is none, or the engine has not reported yet
        return []
    rows = [_tier_row("host", asdict(host) | {"hits": host.hit, "size": host.slots})]
    for tier, one in zip(lower, stats.lower, strict=False):
        rows.append(_tier_row(tier, asdict(one) | {"used": one.used_bytes, "size": one.size_bytes}))
    return rows


def _tier_row(tier: str, numbers: dict[str, int]) -> dict[str, Any]:
    dropped = {name.removeprefix("dropped_"): count for name, count in numbers.items() if name.startswith("dropped_")}
    return {"tier": tier, "dropped": dropped, **{name: numbers[name] for name in TIER_COLUMNS}}


async def _pump(watch: StepWatcher, stats: Callable[[], Stats], send: Send) -> None:
    """Send the events of one watcher. A slow reader misses steps; nothing gathers for it."""
    place, last, rate = watch.log.ended, StepTable.of(), deque[tuple[float, int]]()
    said, columns = 0.0, {"columns": STEP_COLUMNS}
    while True:
        new, skipped = watch.after(place, MAX_STEPS)
        place = watch.log.ended
        now = time.monotonic()
        if new or columns or now - said >= QUIET_SECONDS:
            rows, gaps = step_rows((last or new[:1]) + new)
            last = new[-1:] or last
            event = {"steps": rows, "skipped": skipped, "gaps": gaps, **_numbers(stats(), rate), **columns}
            said, columns = now, {}
            await write(send, b"data: %b\n\n" % msgspec.json.encode(event))
        await asyncio.sleep(EVENT_SECONDS)


def _numbers(stats: Stats, rate: deque[tuple[float, int]]) -> dict[str, Any]:
    """Return an event's fields beside its steps; `rate` has the generated tokens by time of the latest events."""
    return {
        "now": time.monotonic_ns(),
        "stats": stats,
        "counts": {row.title: row.sum(stats) for row in SERIES if row.title},
        "tokens_per_second": _tokens_per_second(stats.steps.generation_tokens, rate),
    }


def _tokens_per_second(tokens: int, rate: deque[tuple[float, int]]) -> float:
    now = time.monotonic()
    rate.append((now, tokens))
    while len(rate) > 2 and now - rate[1][0] >= RATE_SECONDS:
        rate.popleft()
    seconds, more = now - rate[0][0], tokens - rate[0][1]
    return round(more / seconds, 1) if seconds > 0 and more > 0 else 0.0


def _engine(call: HttpCall) -> int:
    """Return the number of the engine that is asked about; the first by default."""
    return _number(call, "engine", 0, 0, len(call.state.llm.watches) - 1)


def _number(call: HttpCall, name: str, default: int, low: int, high: int) -> int:
    text = call.request.query_params.get(name, str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not low <= number <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}", name)
    return number
