"""no_race on small programs: what is a race, what is not, and what a report says."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.base import observe
from gapless.base.errors import DeviceError
from gapless.device import CpuDevice
from gapless.guard.race import RaceError, no_race
from gapless.guard.race_index import FIRST_ARGUMENT, named_rows
from gapless.testing.sim import SimDevice

SLOTS, STEPS = 2, 6


def double_buffered(device, checker, *, wait: bool) -> None:
    """Staging in, compute, tokens out: two slots each, used again behind their fences, if `wait`."""
    staging, outputs = device.ring(SLOTS, 32), device.ring(SLOTS, 32)
    words, tokens = (torch.zeros(SLOTS, 8, device=device.torch_device) for _ in range(2))
    device.drain()
    for name, what in {"staging": staging, "outputs": outputs, "words": words, "tokens": tokens}.items():
        checker.register(name, what)

    def step(slot: int) -> None:
        device.upload(words[slot], staging.slots[slot].tensor.view(torch.float32))
        torch.mul(words[slot], 2, out=tokens[slot])

    def bring_home(slot: int) -> None:
        device.download(outputs.slots[slot].tensor.view(torch.float32), tokens[slot])

    home = []
    for number in range(STEPS):
        slot = number % SLOTS
        if wait and number >= SLOTS:
            home[number - SLOTS].wait()
            assert outputs.slots[slot].array.view(np.float32)[0] == 2 * (number - SLOTS)
        staging.slots[slot].array.view(np.float32)[:] = number
        device.compute.launch(step, slot)
        device.token_out.after(device.compute.record())
        device.token_out.launch(bring_home, slot)
        home.append(device.token_out.record())
    device.drain()


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_double_buffering_is_silent_with_its_fences_and_caught_without(kind):
    for run in range(20):
        device = SimDevice(run) if kind == "sim" else CpuDevice(threads=1)
        with no_race("record") as right:
            double_buffered(device, right, wait=True)
        with no_race("record") as wrong:
            double_buffered(device, wrong, wait=False)
        device.close()
        assert right.races == [], f"run {run}"
        assert {race.buffer.split("[")[0] for race in wrong.races} == {"staging", "tokens"}, f"run {run}"
        assert all("stream compute" in race.missing or "stream token_out" in race.missing for race in wrong.races)


def fault(mode="record", **options):
    """A host write that races with a launched read of the same 8 floats."""
    device = SimDevice(0, mood="lazy")
    memory, seen = torch.zeros(8), torch.zeros(8)
    with no_race(mode, **options) as checker:
        checker.register("memory", memory)
        device.compute.launch(seen.copy_, memory)
        memory[2:4].fill_(1.0)
        device.drain()
    return checker.races


def test_a_report_names_both_sides_the_part_and_the_fence():
    (race,) = fault()
    assert (race.rule, race.buffer, race.part) == ("race", "memory", "bytes 8..16")
    assert (race.first.agent, race.first.verb) == ("thread MainThread", "writes")
    assert (race.second.agent, race.second.verb) == ("stream compute", "reads")
    assert [side.site.file for side in (race.first, race.second)] == [__file__] * 2
    assert race.missing.startswith(
        "thread MainThread writes 'memory' without waiting for a fence of stream compute after program"
    )
    assert race.missing.endswith("none has been recorded after it")
    assert race.mend.startswith("fence.wait() before it, for a fence that compute records after program")
    assert race.first.site.function == "fault" and race.second.launched[0].function == "fault"


def test_a_race_is_reported_as_json_and_in_the_common_form():
    (race,) = fault()
    finding = race.finding()
    written = json.loads(json.dumps(finding.as_dict()))
    assert written["stack"][0]["function"] == "fault" and written["details"] == list(finding.details)
    assert (finding.detector, finding.rule, finding.site.file) == ("race", "race", __file__)
    assert finding.why == race.missing and "launched at" in "\n".join(finding.details)


def test_the_report_tells_of_a_fence_that_is_there_and_not_waited_for():
    device = SimDevice(0)
    memory = torch.zeros(8)
    with no_race("record") as checker:
        checker.register("memory", memory)
        device.compute.launch(memory.fill_, 1.0)
        device.compute.record()
        device.token_out.launch(memory.sum)
        device.drain()
    (race,) = checker.races
    assert race.missing.startswith("stream token_out (program ")
    assert "of stream compute after program" in race.missing
    assert "the one recorded at " in race.missing and race.missing.endswith(" is not waited for")


# Which part of the memory.


def unordered(memory: Tensor, one, other, granularity="bytes"):
    """Races of two programs on two streams that nothing orders."""
    device = SimDevice(0)
    with no_race("record") as checker:
        checker.register("memory", memory, granularity)
        device.compute.launch(one, memory)
        device.bulk_in.launch(other, memory)
        device.drain()
    return checker.races


@pytest.mark.parametrize(
    "one, other, part",
    [
        (lambda m: m[0:2].fill_(1), lambda m: m[2:4].fill_(1), None),
        (lambda m: m[0:3].fill_(1), lambda m: m[2:4].sum(), "bytes 32..48"),
        (lambda m: m[:, 0].fill_(1), lambda m: m[:, 1].fill_(1), None),
        (lambda m: m[:, 0].fill_(1), lambda m: m[1, :2].sum(), "bytes 16..24"),
        (lambda m: m.t().fill_(1), lambda m: m[3, 3].fill_(1), "bytes 60..64"),
        (lambda m: m.sum(), lambda m: m.sum(), None),
        (lambda m: m.view(-1)[5:6].fill_(1), lambda m: torch.cat([m[2], m[1]]), "bytes 20..24"),
        (lambda m: torch.add(m[0], 1, out=m[1]), lambda m: m[1].clone(), "bytes 16..32"),
        (lambda m: m.zero_(), lambda m: torch.zeros_like(m), None),
        (lambda m: m[torch.tensor([0, 2])], lambda m: m.index_fill_(0, torch.tensor([1, 3]), 1), None),
        (lambda m: m[torch.tensor([0, 2])], lambda m: m.index_fill_(0, torch.tensor([2]), 1), "bytes 0..64"),
    ],
)
def test_a_race_is_found_by_exact_byte_ranges(one, other, part):
    races = unordered(torch.zeros(4, 4), one, other)
    assert [race.part for race in races] == ([part] if part else [])


def index(*rows: int) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "one, other, part",
    [
        (lambda m: m.index_copy_(0, index(1, 4), torch.ones(2, 3)), lambda m: m.index_select(0, index(0, 5)), None),
        (lambda m: m.index_copy_(0, index(1, 4), torch.ones(2, 3)), lambda m: m[index(4, 5)], "rows 4"),
        (lambda m: m.index_put_((index(1, -1),), torch.ones(3)), lambda m: m[7].sum(), "rows 7"),
        (lambda m: m.index_put_((index(1), index(2)), torch.ones(1)), lambda m: m[2:5].sum(), None),
        (lambda m: m[index(1, 2, 3, 6)], lambda m: m.fill_(1), "rows 1..3, 6"),
        (lambda m: m[m.new_ones(8).bool()], lambda m: m[3:4].zero_(), "rows 3"),
        (lambda m: m.gather(0, index(0, 5, 2)[None]), lambda m: m[2].zero_(), "rows 2"),
        (lambda m: m.scatter_(0, index(0, 5, 2)[None], 1.0), lambda m: m[1].zero_(), None),
        (lambda m: m.view(-1).index_fill_(0, index(3, 4, 20), 1), lambda m: m[5:7].sum(), "rows 6"),
        (lambda m: torch.embedding(m, index(2, 6)), lambda m: m[6].zero_(), "rows 6"),
        (lambda m: m[::2].fill_(1), lambda m: m[1::2].fill_(1), None),
        (lambda m: m[2:].index_add_(0, index(0), torch.ones(1, 3)), lambda m: m[2].sum(), "rows 2"),
        (lambda m: m[2:6].index_put_((index(0, -1),), torch.ones(2, 3)), lambda m: m[:6].sum(), "rows 2, 5"),
        (lambda m: m[:, 1].index_select(0, index(5).int()), lambda m: m[5].zero_(), "rows 5"),
        (lambda m: m[:, 1][index(5)], lambda m: m[:, 0].index_fill_(0, index(5), 1), "rows 5"),
    ],
)
def test_rows_that_an_index_names(one, other, part):
    races = unordered(torch.zeros(8, 3), one, other, "rows")
    assert [race.part for race in races] == ([part] if part else [])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_named_rows_do_not_share_the_memory_of_their_index(dtype):
    # Rows that a compiled kernel states are an index that is gone before they are looked at.
    memory, rows = torch.zeros(8, 3), torch.tensor([2, 5], dtype=dtype)
    found = named_rows(FIRST_ARGUMENT, (memory, rows), np.arange(len(memory)), memory.stride(0) * memory.itemsize)
    rows.fill_(7)
    assert found is not None and found.tolist() == [2, 5]


ROWS, COLUMNS = 6, 4
row, column = st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1)
pairs = st.lists(st.tuples(row, column), min_size=1, max_size=3)
places = st.one_of(
    st.tuples(row, row).map(lambda ends: (slice(min(ends), max(ends) + 1), slice(None))),
    column.map(lambda c: (slice(None), c)),
    st.lists(row, min_size=1, max_size=3).map(lambda rows: (rows,)),
    pairs.map(lambda cells: tuple(map(list, zip(*cells, strict=True)))),
)


def used(memory: Tensor, place: tuple, write: bool) -> None:
    """Reads or writes the place, and gives an index that says so other values afterwards."""
    index = [torch.tensor(part) for part in place if isinstance(part, list)]
    if not index:
        _ = memory[place].fill_(1.0) if write else memory[place].sum()
    elif len(index) == 2:
        _ = memory.index_put_(index, torch.ones(1)) if write else memory[tuple(index)]
    else:
        _ = memory.index_fill_(0, index[0], 1.0) if write else memory.index_select(0, index[0])
    for part in index:
        part.fill_(ROWS - 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(places, st.booleans()), min_size=2, max_size=2), st.sampled_from(("bytes", "rows", "all")))
def test_two_accesses_race_where_they_share_an_element(accesses, granularity):
    memory = torch.zeros(ROWS, COLUMNS)
    device = SimDevice(0)
    with no_race("record", track="all" if granularity == "all" else "registered") as checker:
        if granularity != "all":
            checker.register("memory", memory, granularity)
        for stream, access in zip((device.compute, device.bulk_in), accesses, strict=True):
            stream.launch(used, memory, *access)
        device.drain()
    marks = np.zeros((2, ROWS, COLUMNS), bool)
    for mark, (place, _) in zip(marks, accesses, strict=True):
        mark[place] = True
        if granularity == "rows":
            mark[mark.any(1)] = True
    assert bool(checker.races) == (marks.all(0).any() and any(write for _, write in accesses))


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("element, count", [(399, 1), (160, 1), (400, 0)])
def test_one_agents_many_parts_are_remembered(by_index, element, count):
    memory = torch.zeros(401)

    def many() -> None:
        for i in range(400):
            _ = memory.index_select(0, index(i)) if by_index else memory[i].sum()

    device = SimDevice(0)
    with no_race("record", track="all") as checker:
        device.compute.launch(many)
        device.bulk_in.launch(lambda: memory[element].fill_(1))
        device.drain()
    assert len(checker.races) == count


def test_an_index_out_of_range_is_the_operators_own_error():
    device = SimDevice(0)
    memory = torch.zeros(4, 2)
    with no_race("record") as checker:
        checker.register("memory", memory, "rows")
        device.compute.launch(memory.index_select, 0, index(9))
        with pytest.raises(DeviceError, match="index"):
            device.drain()
    assert checker.races == []


def test_an_array_that_shares_a_tensors_memory_is_the_same_buffer():
    array = np.zeros(8, np.float32)
    races = unordered(torch.from_numpy(array), lambda m: m.zero_(), lambda m: torch.from_numpy(array)[3:].sum())
    assert [race.part for race in races] == ["bytes 12..32"]


# Host memory that torch does not see written.


@pytest.mark.parametrize("kind", ["sim", "cpu"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_numpy_write_between_launch_and_execution_is_seen_by_checksum(kind, waits):
    device = SimDevice(3, mood="lazy") if kind == "sim" else CpuDevice(threads=1)
    staging, words = np.zeros(64, np.float32), torch.zeros(64)
    gate = threading.Event()
    source = torch.from_numpy(staging)
    with no_race("record") as checker:
        checker.register("staging", staging)
        if kind == "cpu":
            device.compute.launch(gate.wait)
        device.compute.launch(words.copy_, source, reads=(staging,))
        fence = device.compute.record()
        if waits:
            gate.set()
            fence.wait()
        staging[:] = 1.0
        gate.set()
        device.drain()
    device.close()
    assert [race.rule for race in checker.races] == ([] if waits else ["overwritten"])
    for race in checker.races:
        assert race.buffer == "staging" and "through" not in race.missing and "fence of stream compute" in race.missing
        assert race.first.site.file == __file__


def test_a_device_write_that_is_in_order_is_no_overwrite():
    device = SimDevice(3, mood="lazy")
    slot = device.ring(1, 16).slots[0]
    seen = torch.zeros(16, dtype=torch.uint8)
    with no_race("record") as checker:
        checker.register("slot", slot)
        device.compute.launch(slot.tensor.fill_, 7)
        device.compute.launch(seen.copy_, slot.tensor, reads=(slot,))
        device.drain()
    assert checker.races == [] and seen[0] == 7


def test_a_slot_in_the_hosts_hands_counts_as_written():
    device = SimDevice(0)
    slot = device.ring(1, 16).slots[0]
    with no_race("record") as checker:
        checker.register("slot", slot)
        device.token_out.launch(slot.tensor.fill_, 7)
        _ = slot.array
        device.drain()
    (race,) = checker.races
    assert "thread MainThread takes 'slot' without waiting for a fence of stream token_out" in race.missing


# What is given back.


def test_freeing_races_with_a_late_write_and_lets_a_late_read_be():
    cache = torch.zeros(4, 2)
    for program, count in ((lambda: cache[2].fill_(1), 1), (lambda: cache[2].sum(), 0)):
        for early in (True, False):
            device = SimDevice(0, mood="eager" if early else "lazy")
            with no_race("record") as checker:
                checker.register("kv", cache, "rows")
                device.compute.launch(program)
                checker.freed("kv", [2, 3])
                device.drain()
                checker.freed("kv", [2])
            assert len(checker.races) == count
            for race in checker.races:
                assert race.part == "rows 2" and "thread MainThread frees 'kv'" in race.missing


def test_accesses_can_be_stated_where_they_cannot_be_seen():
    memory = np.zeros(8, np.float32)
    device = SimDevice(0)
    for kind, count in (("write", 1), ("read", 0)):
        with no_race("record") as checker:
            checker.register("memory", memory)
            device.compute.launch(lambda checker=checker: checker.access("memory", "read"))
            checker.access(memory[2:4], kind)
            device.drain()
        assert len(checker.races) == count


# How it raises.


def test_raise_mode_raises_at_once_for_the_host_and_at_the_next_call_for_a_program():
    memory = torch.zeros(4)
    with pytest.raises(RaceError, match="'memory'"), no_race() as checker:
        checker.register("memory", memory)
        device = SimDevice(0, mood="eager")
        device.compute.launch(memory.fill_, 1)
        with pytest.raises(RaceError):
            memory.sum()
        device = SimDevice(0, mood="lazy")
        device.compute.launch(memory.sum)
        memory.fill_(1)
        with pytest.raises(RaceError):
            device.drain()


def test_raise_mode_raises_at_the_end_and_does_not_hide_another_error():
    with pytest.raises(RaceError) as caught:
        fault("raise")
    assert [race.buffer for race in caught.value.races] == ["memory"]
    memory = torch.zeros(4)
    with pytest.raises(KeyError), no_race("raise") as checker:
        checker.register("memory", memory)
        device = SimDevice(0, mood="lazy")
        device.compute.launch(memory.fill_, 1)
        device.advance(1)
        with pytest.raises(RaceError):
            memory.sum()
        raise KeyError("the program's own")


def test_two_lines_are_one_report_however_often_they_race():
    memory = torch.zeros(4)
    device = SimDevice(5)
    with no_race("record") as checker:
        checker.register("memory", memory)
        for _ in range(10):
            device.compute.launch(memory.fill_, 1)
            device.token_out.launch(memory.sum)
        device.drain()
    assert len(checker.races) == 1


def test_no_race_as_a_decorator_returns_the_result():
    @no_race("raise")
    def double(x):
        return x * 2

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


# What it leaves behind, and what it refuses.


def test_nothing_is_left_when_it_is_over():
    names = [(threading.Thread, "start"), (threading.Event, "set"), (threading, "Lock"), (Tensor, "numpy")]
    before = [getattr(owner, name) for owner, name in names]
    device = SimDevice(0)
    with no_race("record") as checker:
        device.compute.launch(torch.zeros(1).sum)
        fence = device.compute.record()
        assert [getattr(owner, name) for owner, name in names] != before
    assert [getattr(owner, name) for owner, name in names] == before
    assert observe.watcher is None
    assert "numpy" not in vars(Tensor)
    fence.wait()
    device.drain()
    assert checker.races == []


def test_a_region_inside_another_shares_its_checker():
    memory = torch.zeros(4)
    with no_race("record") as outer:
        for _ in range(2):
            with no_race("raise") as inner:
                assert inner is outer
                inner.register("memory", memory)
        inner.register("memory", memory)


@pytest.mark.parametrize(
    "register, words",
    [
        (lambda c, m: [c.register("a", m), c.register("a", torch.zeros(2))], "registered already"),
        (lambda c, m: [c.register("a", m), c.register("b", m[1])], "overlaps 'a'"),
        (lambda c, m: c.register("a", m[:, 1]), "gaps"),
        (lambda c, m: c.register("a", torch.zeros(0)), "empty"),
    ],
)
def test_registering_what_cannot_be_watched(register, words):
    with no_race("record") as checker, pytest.raises(ValueError, match=words):
        register(checker, torch.zeros(4, 4))


def test_an_unknown_choice_of_no_race_is_refused():
    for options in ({"mode": "warn"}, {"track": "some"}, {"threads": "two"}):
        with pytest.raises(ValueError):
            no_race(**options)


# Everything watched.


def test_track_all_names_a_tensor_by_where_it_was_first_seen():
    device = SimDevice(0)
    with no_race("record", track="all") as checker:
        memory = torch.zeros(4)
        device.compute.launch(memory.fill_, 1)
        device.token_out.launch(memory.sum)
        device.drain()
    (race,) = checker.races
    assert race.buffer.startswith("tensor first seen at ") and "test_race_checker.py:" in race.buffer


def test_track_all_does_not_confuse_memory_that_is_used_again():
    device = SimDevice(7)

    def work() -> None:
        x = torch.ones(100)
        for _ in range(20):
            x = x * 2 + 1

    with no_race("record", track="all") as checker:
        for _ in range(10):
            device.compute.launch(work)
            device.token_out.launch(work)
        device.drain()
    assert checker.races == []


def test_track_all_follows_a_storage_that_is_resized_and_forgets_an_earlier_checker():
    memory = torch.zeros(4)
    for _ in range(2):
        device = SimDevice(0)
        with no_race("record", track="all") as checker:
            device.compute.launch(memory.fill_, 1)
            device.drain()
            memory.resize_(4000)
            device.compute.launch(memory.fill_, 1)
            device.token_out.launch(memory[3000:].sum)
            device.drain()
        assert [race.part for race in checker.races] == ["bytes 12000..16000"]


def test_backward_and_views_of_a_module_run_unchanged():
    layer = torch.nn.Linear(4, 2)
    with no_race(track="all"):
        layer(torch.ones(3, 4)).sum().backward()
    assert layer.bias.grad.tolist() == [3.0, 3.0]


@pytest.mark.seeds
def test_a_compiled_function_runs_under_it():
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend="eager")
    x = torch.ones(4)
    with no_race() as checker:
        checker.register("x", x)
        assert torch.equal(compiled(x), (x * 2).sin() + 1)
