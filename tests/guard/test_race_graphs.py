"""Replays of graphs under no_race: an access of their stream, seen by operator or as the graph declares it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import capturing_cpu
from torch_internals import all_schemas, operators, without_modes

from gapless.base import observe
from gapless.device import Device
from gapless.device.schemas import OperatorSchema
from gapless.guard.race import no_race
from gapless.guard.race_checker import RaceChecker
from gapless.guard.race_index import STATED
from gapless.guard.race_ops import plan
from gapless.guard.race_report import WRITE
from gapless.testing.sim import SimDevice

RUNS, STEPS, SLOTS = 20, 5, 2
KINDS = ("sim", "cpu", "declared")


class Declaring:
    """A device whose graphs show no operators, as on a GPU: what they declare is all that is known."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def capture(self, key: object, program: Callable[..., None]) -> object:
        graph = self._device.capture(key, program)

        def unseen() -> None:
            with without_modes():
                graph.tape.replay()

        def launch(stream) -> None:
            assert observe.watcher is not None
            observe.watcher.replayed(stream, graph.tape.name, graph.tape.reads, graph.tape.writes)
            looking, observe.watcher = observe.watcher, None
            stream.launch(unseen)
            observe.watcher = looking

        return SimpleNamespace(launch=launch, reads=graph.tape.reads, writes=graph.tape.writes)


def open_device(kind: str, seed: int) -> Device:
    if kind == "cpu":
        return capturing_cpu()
    return SimDevice(seed) if kind == "sim" else Declaring(SimDevice(seed))


def decode(device: Device, checker: RaceChecker, fault: str = "") -> None:
    """Steps as an engine launches them: upload, replay, and the tokens come home on a stream of their own."""
    packets, outboxes = device.ring(SLOTS, 32), device.ring(SLOTS, 32)
    words, tokens = torch.zeros(8), torch.zeros(SLOTS, 8)
    for name, what in {"packets": packets, "outboxes": outboxes, "words": words, "tokens": tokens}.items():
        checker.register(name, what)
    graphs = [device.capture(slot, lambda slot=slot: torch.mul(words, 2, out=tokens[slot])) for slot in range(SLOTS)]
    device.drain()
    uploaded, home = [], []
    for number in range(STEPS):
        slot = number % SLOTS
        if number >= SLOTS:
            home[number - SLOTS].wait()
            assert outboxes.slots[slot].array.view(np.float32)[0] == 2 * (number - SLOTS) or fault
            if fault != "slot is rewritten":
                uploaded[number - SLOTS].wait()
        packets.slots[slot].array.view(np.float32)[:] = number
        device.compute.upload(words, packets.slots[slot].tensor.view(torch.float32))
        uploaded.append(device.compute.record())
        graphs[slot].launch(device.compute)
        stepped = device.compute.record()
        if fault != "copy does not wait":
            device.token_out.after(stepped)
        device.token_out.launch(device.download, outboxes.slots[slot].tensor.view(torch.float32), tokens[slot])
        home.append(device.token_out.record())
        if fault == "host looks in":
            tokens[slot].add_(1)
        if fault == "slot is rewritten":
            packets.slots[slot].array.view(np.float32)[:] = -1
    device.drain()


@pytest.mark.parametrize(
    "fault, buffer", [("copy does not wait", "tokens"), ("slot is rewritten", "packets"), ("host looks in", "tokens")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_fence_beside_a_replay_is_found_and_the_same_with_a_fence_is_silent(
    kind: str, fault: str, buffer: str
) -> None:
    for run in range(RUNS):
        device = open_device(kind, run)
        with no_race("record") as right:
            decode(device, right)
        with no_race("record") as wrong:
            decode(device, wrong, fault)
        device.close()
        assert right.races == [], f"run {run}\n{right.races[0]}"
        assert wrong.races and all(race.buffer.startswith(buffer) for race in wrong.races), f"run {run}: {wrong.races}"


def test_a_report_names_the_graph() -> None:
    device = open_device("declared", 1)
    with no_race("record") as checker:
        decode(device, checker, "copy does not wait")
    text = str(checker.races[0])
    assert "stream compute, program <listcomp>.<lambda> 0, writes it" in text, text
    assert "test_race_graphs.py" in text and "in decode" in text


def test_declared_rows_are_not_known_and_do_not_count() -> None:
    """A graph declares the whole KV cache; pages that the host frees meanwhile are no race of it."""
    device, kv = open_device("declared", 2), torch.zeros(16, 4)
    graph = device.capture("k", lambda: kv.index_copy_(0, torch.zeros(1, dtype=torch.int64), torch.ones(1, 4)))
    with no_race("record") as checker:
        checker.register("kv", kv, "rows")
        graph.launch(device.compute)
        checker.freed("kv", [7])
        device.drain()
    assert checker.races == [] and checker.unknown_index == 1


@pytest.fixture
def store():
    """An operator that is not torch's: writes one row of a table, chosen by a tensor."""

    def write(table: torch.Tensor, row: torch.Tensor) -> None:
        table.index_fill_(0, row, 1.0)

    with operators("gapless_tests") as library:
        library.define("store(Tensor(a!) table, Tensor row) -> ()")
        library.impl("store", write, "CPU")
        yield torch.ops.gapless_tests.store
    STATED.pop("gapless_tests::store", None)


@pytest.mark.parametrize("row, races", [(7, 1), (3, 0)])
def test_rows_of_an_operator_of_others_can_be_stated(store, row: int, races: int) -> None:
    device, table, at = SimDevice(3, mood="lazy"), torch.zeros(16, 4), torch.tensor([7])
    graph = device.capture("k", lambda: store(table, at))
    for stated in (False, True):
        if stated:
            STATED["gapless_tests::store"] = lambda args: [(args[0], args[1].numpy())]
        with no_race("record") as checker:
            checker.register("table", table, "rows")
            graph.launch(device.compute)
            table[row : row + 1].add_(1)
            device.drain()
        assert (len(checker.races), checker.unknown_index) == ((races, 0) if stated else (0, 1))


def test_an_operator_raises_its_own_error_where_what_is_stated_is_out_of_range(store) -> None:
    STATED["gapless_tests::store"] = lambda args: [(args[0], np.zeros(16)[args[1].numpy()])]
    table = torch.zeros(16, 4)
    with no_race("record") as checker:
        checker.register("table", table, "rows")
        with pytest.raises(IndexError, match="for dimension 0"):
            store(table, torch.tensor([70]))
    assert checker.races == []


def test_guard_and_devices_read_every_operators_schema_alike() -> None:
    """Each has its own reading, since neither imports the other."""
    schemas = all_schemas()
    assert len(schemas) > 2000
    for schema in schemas:
        one = SimpleNamespace(_schema=schema)
        known = OperatorSchema.of(one)
        assert known.tensors == tuple((arg.position, arg.kind == WRITE) for arg in plan(one).args), schema
