"""Recordings as files, there and back, and what the terminal says of them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from gapless.base.errors import ConfigError
from gapless.cli.main import main
from gapless.engine.trace import COLUMNS, ChunkRecord, Recording, RequestRecord, StepRecord, StepTable, chrome_trace
from gapless.lab import trace
from gapless.lab.trace import TraceSummary

KEYS = np.array([7, 2**62], np.int64)


def step(number, start, end, late=0, rows=2, chunks=(), launched=None):
    """A step whose launch came `late` after the device could have begun it."""
    at = start - 10 if launched is None else launched
    return StepRecord(
        step=number, decode_rows=rows, chunk_tokens=sum(c.size for c in chunks), in_flight=1,
        work_at=0, held_by=0, held_until=0,
        planning_at=at - 300 - late, planned_at=at - 200, packed_at=at - 100, launched_at=at,
        loads_from=number, loads_until=number + 40, stores_from=0, stores_until=0,
        capture_from=0, capture_until=0, missed=False, chained=number == 3,
        device_start=start, device_end=end, home_at=end, observing_at=end, observed_at=end + 40, committed_at=end + 90,
        waited=True, in_vain=False, ranks_ns=0, decode=KEYS if rows else KEYS[:0], chunks=chunks,
        waits=(number, 40),
    )  # fmt: skip


def recording():
    steps = [
        step(1, 1_000, 5_000, rows=0, chunks=(ChunkRecord(7, 0, 60), ChunkRecord(2**62, 0, 4))),
        step(2, 5_100, 6_000, chunks=(ChunkRecord(9, 3, 1),)),
        step(3, 7_000, 9_000),
        step(4, 9_000, 10_000, launched=8_000),
        step(6, 20_000, 21_000),
    ]
    requests = [
        RequestRecord("a", (7,), 500, 600, 5_050, 21_040, 60, 0, 5, "done", "length"),
        RequestRecord("ü", (2**62, 9), 700, 800, 6_050, 21_050, 4, 16, 7, "running", None),
    ]
    return Recording(StepTable.of(steps), requests)


def same(before, after):
    assert list(after.requests) == list(before.requests)
    assert len(after.steps) == len(before.steps)
    for old, new in zip(before.steps, after.steps, strict=True):
        assert new._replace(decode=None) == old._replace(decode=None)
        assert new.decode.tolist() == old.decode.tolist() and new.decode.dtype == np.int64
        assert type(new.waited) is bool and all(type(chunk) is ChunkRecord for chunk in new.chunks)


@pytest.mark.parametrize("name", ["t.json", "t.jsonl", "t.json.gz", "t.jsonl.gz", "t.trace"])
def test_a_file_of_either_form_holds_all_of_it(tmp_path, name):
    path = tmp_path / name
    trace.write(path, recording())
    same(recording(), trace.read(path))
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    again = tmp_path / f"again-{name}"
    trace.write(again, trace.read(path))
    assert again.read_bytes() == path.read_bytes()


def test_copies_of_pages_have_a_lane_and_may_begin_before_all_else():
    events = json.loads(chrome_trace(recording()))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    loads = [event for event in events if event["name"] == "loads"]
    assert len(loads) == 5 and {names[event["tid"]] for event in loads} == {"pages from the host tier"}
    assert [event["dur"] for event in loads] == [0.04] * 5 and loads[0]["ts"] == 0
    assert not [event for event in events if event["name"] == "stores"]


def test_a_trace_converted_there_and_back_is_the_same(tmp_path, capsys):
    first, second, third = tmp_path / "a.jsonl", tmp_path / "b.json.gz", tmp_path / "c.jsonl"
    trace.write(first, recording())
    assert main(["trace", "convert", str(first), str(second)]) == 0
    assert gzip.decompress(second.read_bytes()) == chrome_trace(recording())
    assert main(["trace", "convert", str(second), str(third)]) == 0
    assert third.read_bytes() == first.read_bytes()
    head, *lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert head["columns"][:3] == ["step", "decode_rows", "chunk_tokens"]
    assert [next(iter(line)) for line in lines] == ["group", "step", "group", "step", *["step"] * 3, *["request"] * 2]
    assert capsys.readouterr().out == ""


def damaged(path, change):
    trace.write(path, recording())
    lines = path.read_text().splitlines()
    changed = change(lines)
    path.write_text("\n".join(changed if isinstance(changed, list) else lines) + "\n")


def edit(line, **fields):
    return json.dumps(json.loads(line) | fields)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (1, lambda lines: lines.__setitem__(0, '{"format": "other"}')),
        (1, lambda lines: lines.__setitem__(0, "not json")),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], group=5))),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], group=-1))),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], step=[1, 2]))),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], step=["1"] * len(COLUMNS)))),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], step=[2**63] * len(COLUMNS)))),
        (3, lambda lines: lines.__setitem__(2, edit(lines[2], more=1))),
        (3, lambda lines: lines.__setitem__(0, edit(lines[0], columns=["step"] * len(COLUMNS)))),
        (2, lambda lines: lines.__setitem__(1, edit(lines[1], group=[2**63]))),
        (9, lambda lines: lines.__setitem__(8, '{"request": ["a"]}')),
        (4, lambda lines: lines.__setitem__(3, lines[3][:-3])),
    ],
)
def test_a_damaged_file_is_reported_by_line(tmp_path, line, change):
    path = tmp_path / "t.jsonl"
    damaged(path, change)
    with pytest.raises(ConfigError, match=rf"t\.jsonl:{line}: "):
        trace.read(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"args": {"record": [1]}}], "otherData": {"format": "gapless 6"}}',
        b"\x1f\x8bnonsense",
        b'{"traceEvents": [{"args": {"arrival": 1}}], "otherData": {"format": "gapless 6"}}',
    ],
)
def test_other_files_are_refused(tmp_path, data, capsys):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"t\.json"):
        trace.read(path)
    assert main(["trace", "summary", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_files_that_cannot_be_had(tmp_path, capsys):
    assert main(["trace", "summary", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    path = tmp_path / "t.jsonl"
    trace.write(path, recording())
    assert main(["trace", "convert", str(path), str(tmp_path / "no" / "t.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_summary_counts_steps_and_their_time():
    found = TraceSummary(recording(), worst=1)
    assert (found.steps, found.missing, found.requests) == (5, 1, 2)
    assert found.kinds == {"prefill": 1, "mixed": 1, "decode": 3}
    assert found.busy == 4_000 + 900 + 2_000 + 1_000 + 1_000
    # 5,000 to 5,100 and 6,000 to 7,000; around the missing step nothing is known.
    assert found.span == found.busy + 100 + 1_000
    assert {cause: numbers for cause, *numbers in found.idle} == {
        "host_late": [90 + 990, 2, 990],
        "launch": [10 + 10, 2, 10],
    }
    (worst,) = found.worst
    assert (worst.cause, worst.end - worst.start, worst.step) == ("host_late", 990, 3)
    assert found.phases["plan"][0] == 100 and found.phases["commit"] == (50, 50)
    assert found.phases["on the device"] == (1_000, 4_000)
    late = Recording(StepTable.of([step(1, 0, 100, launched=40)]), [])
    assert TraceSummary(late).enqueueing == 40


def test_a_step_whose_masks_were_all_late_is_idle_time_of_grammar():
    found = TraceSummary(
        Recording(StepTable.of([step(1, 1_000, 5_000), step(2, 5_000, 5_900)._replace(in_vain=True)]), [])
    )
    assert (found.busy, found.span) == (4_000, 4_900) and found.idle == [("grammar", 900, 1, 900)]


def test_a_wait_for_other_ranks_is_idle_time_of_its_step():
    waits = step(2, 5_000, 5_900)._replace(ranks_ns=300)
    found = TraceSummary(Recording(StepTable.of([step(1, 1_000, 5_000), waits]), []))
    assert (found.busy, found.span) == (4_600, 4_900) and found.idle == [("ranks", 300, 1, 300)]


def test_the_summary_is_printed_in_the_terminal(tmp_path, capsys):
    path = tmp_path / "t.json"
    trace.write(path, recording())
    assert main(["trace", "summary", str(path), "--worst", "2"]) == 0
    out = capsys.readouterr().out
    assert out.strip() == str(TraceSummary(recording(), 2))
    for words in ("5 steps (3 decode, 1 mixed, 1 prefill)", "device busy 89.00 %", "host_late", "1 steps are missing"):
        assert words in out
    assert str(TraceSummary(Recording(StepTable.of(), []))) == "no steps in this recording"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trace", "draw"], "unknown command 'trace draw'; see gapless trace --help"),
        (["trace", "summary"], "FILE"),
        (["trace", "summary", "x", "--worst", "-1"], "--worst"),
        (["trace", "record", "http://localhost:1", "--seconds", "61"], "--seconds"),
        (["trace", "record", "ftp://localhost", "-o", "/dev/null"], "must look like"),
        (["trace", "record", "http://localhost:1", "-o", "/no/such/place.json"], "cannot write"),
    ],
)
def test_a_wrong_command_line_is_refused(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_trace_shows_help_and_refuses_no_command(capsys):
    assert main(["trace", "--help"]) == 0
    assert "convert" in capsys.readouterr().out
    assert main(["trace"]) == 2


def test_a_recording_that_fails_leaves_the_file_as_it_was(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for path in (old, new):
        assert main(["trace", "record", "http://localhost:1", "-o", str(path)]) == 1
    assert old.read_text() == "kept" and not new.exists()
