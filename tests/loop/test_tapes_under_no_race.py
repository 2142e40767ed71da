"""Tapes that report to the checker say what the mode sees of their replays, and their races are found."""

from __future__ import annotations

import loops_under_guard
import pytest
import torch
from harness import capturing_cpu
from loops_under_guard import loops_under_no_race
from oracles import ASKING
from tapes_under_no_race import ReportingTape, reports

from gapless.base import observe
from gapless.base.errors import DeviceError
from gapless.device.record import Call, Place, Tape, TapeGraph
from gapless.guard.race import no_race
from gapless.guard.race_shadow import Ranges, Rows
from gapless.testing.sim import SimDevice


@pytest.fixture
def accesses(monkeypatch):
    """What every registered buffer was touched by: the agent and its time, the kind of access, the bytes or rows."""
    seen = []
    for kind in (Ranges, Rows):
        touch = kind.touch

        def noted(shadow, actor, access, region, note, touch=touch):
            low, high, layout, chosen = region
            # Of an index its way and what it holds; where the memory begins differs from run to run.
            part = (chosen[0], *chosen[2:]) if isinstance(chosen, tuple) else chosen if chosen is None else [*chosen]
            seen.append((actor.index, actor.time, access, low - shadow.start, high - shadow.start, layout, part))
            return touch(shadow, actor, access, region, note)

        monkeypatch.setattr(kind, "touch", noted)
    return seen


def by_appearance(accesses):
    """Accesses with their agents numbered as they come: a thread of an earlier test may have a number too."""
    agents = {}
    return [(agents.setdefault(agent, len(agents)), *rest) for agent, *rest in accesses]


@pytest.mark.parametrize("seed", [104, 106, 107])
def test_a_tape_reports_what_the_mode_sees(seed, accesses, guarded_steps, monkeypatch):
    runs, reported = [], []
    report = ReportingTape.report
    monkeypatch.setattr(ReportingTape, "report", lambda *args: (reported.append(args), report(*args)))
    for itself in (False, True):
        monkeypatch.setattr(loops_under_guard, "reports", reports if itself else lambda part: None)
        with guarded_steps.rest(), loops_under_no_race():
            loop = ASKING.play(seed, SimDevice(seed), 4)
        assert loop.counters.graph_steps and bool(reported) == itself
        runs.append(by_appearance(accesses))
        accesses.clear()
    assert runs[0] == runs[1] and len(runs[0]) > 400


@pytest.mark.parametrize("orders", [True, False])
@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_a_race_beside_a_reporting_tape_is_found(kind, orders):
    device = SimDevice(1) if kind == "sim" else capturing_cpu()
    table, rows = torch.zeros(8, 4), torch.tensor([2, 5])
    with no_race("record") as checker, observe.listening(reports):
        checker.register("table", table, "rows")
        graph = device.capture("step", lambda: table.index_add_(0, rows, torch.ones(2, 4)))
        device.drain()
        for row in (5, 3):
            graph.launch(device.compute)
            if orders or row == 3:
                device.token_out.after(device.compute.record())
            device.token_out.launch(lambda row=row: table[row].add_(1))
            device.drain()
    device.close()
    assert isinstance(graph.tape, ReportingTape)
    assert [race.buffer for race in checker.races] == ([] if orders else ["table"])


def test_a_tape_that_makes_tensors_of_registered_memory_is_refused():
    device, table = SimDevice(1), torch.zeros(8)
    same = Call(torch.ops.aten.alias.default, (table,), (), Place(0), ())
    with no_race() as checker, observe.listening(reports):
        checker.register("table", table)
        TapeGraph("step", Tape("step", (same,), 1, (), ())).launch(device.compute)
        with pytest.raises(DeviceError, match=r"alias.* gives watched memory"):
            device.drain()
