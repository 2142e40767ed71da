"""The Chrome trace of a recording, held to what its viewers ask of such a file."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from harness import checksum_loop, script, sizes
from sharpest import sharpest

from gapless.device import CpuDevice
from gapless.engine import trace
from gapless.engine.trace import Recording, RequestRecord, StepTable, chrome_trace, step_rows, steps_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice


def record(device, depth, seed=0, page=None):
    """A recording of a whole run: the loop's records, and requests as a front on the same clock sees them."""
    loop = checksum_loop(device, sizes(seed), depth)
    jobs = script(seed, 48)
    by_key = {job.request.key: job for job in jobs}
    times = {job.request.key: {} for job in jobs}
    for job in jobs:
        times[job.request.key]["arrival"] = device.clock()
        loop.submit(job.request)
    while loop.has_work():
        turn = loop.turn()
        now = device.clock()
        for key, _ in turn.started:
            times[key].setdefault("started", now)
        for settled in turn.tokens:
            for key in settled.keys.tolist():
                times[key].setdefault("first_token", now)
                times[key]["last_token"] = now
            deliver(settled, by_key)
    requests = [
        RequestRecord(
            f"request-{key}", (key,), prompt_tokens=len(by_key[key].request.tokens), cached_tokens=0,
            generation_tokens=len(by_key[key].tokens), state="done", finish_reason="stop", **moments,
        )
        for key, moments in times.items()
    ]  # fmt: skip
    return Recording(loop.records.after(0), requests)


def check(data: bytes):
    """Everything that a viewer relies on; returns the events."""
    whole = json.loads(data)
    events = whole["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = defaultdict(list)
    flows = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in named
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            assert event["ph"] in ("s", "t", "f") and event["cat"] == "request"
            assert (event["ph"] == "f") == (event.get("bp") == "e"), "the last arrow binds to the slice that holds it"
            flows[event["id"]].append(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times) and times[0] == 0
    for (pid, _), spans in slices.items():
        check_lane(spans, nested=pid == trace.REQUESTS)
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        for event in flow:
            near = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in near), "an arrow that ends in the air"
    return events, flows


def check_lane(spans, nested):
    """Spans of one lane follow each other, or lie in each other where that is allowed."""
    open_until = []
    for start, end in spans:
        while open_until and open_until[-1] <= start + 1e-9:
            open_until.pop()
        assert nested or not open_until, f"{start} begins before {open_until} is over"
        assert not open_until or end <= open_until[-1] + 1e-9
        open_until.append(end)


@pytest.mark.parametrize("depth", sharpest([4, 1]))
@pytest.mark.parametrize("kind", sharpest(["sim", "cpu", "sim mapped"], keep=2))
def test_the_file_keeps_the_rules_of_its_viewers(kind, depth):
    device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(5, maps_host="mapped" in kind)
    recording = record(device, depth, seed=5)
    events, flows = check(chrome_trace(recording))
    by_lane = defaultdict(list)
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            by_lane[lanes[event["pid"], event["tid"]]].append(event)
    steps = len(recording.steps)
    assert [len(by_lane["compute"]), len(by_lane["host"])] == [steps, 5 * steps]
    assert {e["name"] for e in by_lane["host"]} == {"plan", "pack", "launch", "observe", "commit"}
    assert len(by_lane["copy out"]) == (steps if kind == "sim" else 0)
    busy = sum(e["dur"] for e in by_lane["compute"]) + sum(e["dur"] for e in by_lane["idle, by cause"])
    first, last = recording.steps[0], recording.steps[-1]
    assert busy == pytest.approx((last.device_end - first.device_start) / 1e3)
    # One flow a request, to each step that it took part in.
    assert len(flows) == len(recording.requests)
    for flow, taken in zip(flows.values(), steps_of(recording), strict=True):
        assert len(flow) == len(taken) + 1
        base = json.loads(chrome_trace(recording))["otherData"]["base_ns"]
        assert [e["ts"] for e in flow[1:]] == [(step.device_start - base) / 1e3 for step in taken]
    for request in recording.requests:
        names = [e["name"] for e in by_lane[request.id]]
        assert sorted(names[1:]) == ["decode", "prefill", "queue"] and names[0] == request.id
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert {"running", "in flight"} <= counters
    assert max(e["args"]["steps"] for e in events if e["name"] == "in flight") <= depth
    device.close()


def test_many_arrows_are_thinned_and_keep_their_ends(monkeypatch):
    recording = record(SimDevice(2), 4, seed=2)
    taken = steps_of(recording)
    monkeypatch.setattr(trace, "MAX_ARROWS", 4 * len(taken))
    _, flows = check(chrome_trace(recording))
    whole = sum(map(len, taken))
    assert sum(len(flow) - 1 for flow in flows.values()) < whole
    base = json.loads(chrome_trace(recording))["otherData"]["base_ns"]
    for flow, steps in zip(flows.values(), taken, strict=True):
        shown = {e["ts"] for e in flow[1:]}
        kept = [steps[0], steps[-1], *(step for step in steps if step.chunks)]
        assert {(step.device_start - base) / 1e3 for step in kept} <= shown


def test_requests_are_drawn_in_all_their_states():
    whole = record(SimDevice(1), 2, seed=1)
    done, *_ = whole.requests
    end = whole.steps[-1].committed_at
    requests = [
        done,
        done._replace(id="waits", keys=(900,), started=0, first_token=0, last_token=0, state="waiting"),
        done._replace(id="prefill", keys=(901,), first_token=0, last_token=0, state="running"),
        done._replace(id="decode", keys=(902,), last_token=done.first_token, state="running"),
        done._replace(id="refused", keys=(903,), started=0, first_token=0, last_token=0, finish_reason="error"),
        done._replace(id="late", keys=(904,), arrival=end + 5, started=0, first_token=0, last_token=0, state="waiting"),
    ]
    events, flows = check(chrome_trace(Recording(whole.steps, requests)))
    assert len(flows) == 1
    of = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == trace.REQUESTS:
            of[event["tid"]].append(event["name"])
    assert of[2] == ["waits", "queue"]
    assert sorted(of[3]) == ["prefill", "prefill", "queue"]
    assert sorted(of[4]) == ["decode", "decode", "prefill", "queue"]
    assert of[5] == ["refused"] and of[6] == ["late", "queue"]


def test_an_empty_recording_is_a_file_too():
    whole = json.loads(chrome_trace(Recording(StepTable.of(), [])))
    assert {event["ph"] for event in whole["traceEvents"]} == {"M"}


def test_lanes_do_not_overlap_when_two_clocks_disagree_by_a_little():
    steps = [*record(SimDevice(1, maps_host=True), 2, seed=1).steps]
    early = [step._replace(device_start=step.device_start - 700) for step in steps]
    events, _ = check(chrome_trace(Recording(StepTable.of(early), [])))
    starts = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (trace.ENGINE, trace.COMPUTE)]
    assert len(starts) == len(steps) and all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(starts))


def test_ranks_have_a_lane_each_of_what_they_wait_for_others():
    steps = [*record(SimDevice(1, maps_host=True), 2, seed=1).steps]
    waits = [step._replace(ranks_ns=step.device_ns // 4, waits=(step.device_ns, 0)) for step in steps]
    events, _ = check(chrome_trace(Recording(StepTable.of(waits), [])))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == trace.ENGINE}
    waited = defaultdict(list)
    for event in events:
        if event["name"] == "waits":
            waited[names[event["tid"]]].append(round(event["dur"] * 1e3))
    lengths = [step.device_ns for step in steps]
    wanted = [[length // 4 for length in lengths], lengths, [0] * len(steps)]
    assert waited == {f"waits of rank {rank}": times for rank, times in enumerate(wanted)}
    assert sum(e["dur"] for e in events if e["name"] == "ranks") == pytest.approx(sum(wanted[0]) / 1e3)
    rows, gaps = step_rows(StepTable.of(waits))
    at = trace.STEP_COLUMNS.index("waits")
    assert [row[at] for row in rows] == [step.waits for step in waits[1:]]
    assert gaps == sorted(gaps) and {"ranks"} <= {gap.cause for gap in gaps}
    alone = json.loads(chrome_trace(Recording(StepTable.of(steps), [])))
    assert not [event for event in alone["traceEvents"] if "rank" in str(event)]


def test_rows_of_the_feed_say_how_long_the_device_was_idle_and_why():
    steps = record(SimDevice(3), 1, seed=3).steps
    rows, gaps = step_rows(steps[:10])
    assert len(rows) == 9 and all(len(row) == len(trace.STEP_COLUMNS) for row in rows)
    assert sum(row[-2] for row in rows) == sum(gap.end - gap.start for gap in gaps)
    for row, before, step in zip(rows, steps, steps[1:], strict=False):
        assert row[0] == step.step and row[-2] == step.device_start - before.device_end
        of_step = [gap for gap in gaps if gap.step == step.step]
        longest = max((gap.end - gap.start for gap in of_step), default=0)
        assert row[-1] is None if not of_step else row[-1] in {g.cause for g in of_step if g.end - g.start == longest}
    assert step_rows(StepTable.of()) == ([], [])
