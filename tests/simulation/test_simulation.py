"""320 seeds of the simulator; a failure prints its seed and the smallest scenario that still fails."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from simulation.run import check, failure, run, sound_world
from simulation.scenario import Job, draw
from simulation.shrink import shrink
from simulation.world import World

from gapless.testing.adversary import MOODS

SEEDS = 320
SHARES = 8
FIRST = 200
"""Seeds that run in one test, which looks at all that they reach."""


@pytest.mark.parametrize("share", range(SHARES))
def test_no_seed_of_the_simulator_fails(share, guarded_steps):
    # One share under no_sync: what the host asks of the device does not depend on the seed.
    with guarded_steps.rest() if share else nullcontext():
        reports = run(FIRST + share, len(range(FIRST + share, SEEDS, SHARES)), stride=SHARES)
    assert not reports, "\n\n".join(reports)


def test_the_seeds_reach_what_they_are_for(guarded_steps):
    worlds = []
    with guarded_steps.rest():
        for seed in range(FIRST):
            worlds.append(sound_world(draw(seed)))
            try:
                worlds[-1].run()
            except Exception as error:
                raise AssertionError(check(seed)) from error
    ends = {client.end for world in worlds for client in world.clients.values()}
    assert ends == {"STOP", "LENGTH", "ERROR", "left", "refused", "died", "failed"}
    assert sum(world.preemptions for world in worlds) > 50
    assert sum(world.chained for world in worlds) > 300
    assert sum(world.accepted for world in worlds) > 100
    assert sum(world.engines > 1 for world in worlds) > 10
    assert {world.scenario.depth for world in worlds} == {1, 2, 3, 4, 5, 6, 7, 8, None}
    assert {world.scenario.mood for world in worlds} == {None, *MOODS}
    struck = {fault.kind for world in worlds for fault in world.scenario.faults if fault.turn < world.turns}
    assert struck == {"raise", "restart", "jump", "spoil", "swap", "unload", "flip", "rot", "flush", "renew"}
    assert sum(world.brought for world in worlds) > 100
    adapted = [client for world in worlds for client in world.clients.values() if client.job.adapter]
    assert sum(bool(client.tokens) for client in adapted) > 80
    assert sum(world.spoiled > 0 for world in worlds) > 5
    assert sum(client.scored for world in worlds for client in world.clients.values()) > 100
    assert {world.scenario.step for world in worlds} == {"one", "held", "several"}
    assert {world.scenario.grouped for world in worlds} == {False, True}
    assert sum(world.stored for world in worlds) > 200 and sum(world.loaded for world in worlds) > 80
    assert sum(world.rung for world in worlds) > 20
    assert sum(world.hosted for world in worlds) > 100 and sum(world.refused for world in worlds) > 15
    assert sum(world.fetched for world in worlds) > 50 and sum(world.disproved for world in worlds) > 5
    assert any(world.scenario.host and world.scenario.grouped and world.hosted for world in worlds)
    assert any(world.scenario.tier and world.scenario.grouped and world.loaded for world in worlds)
    assert sum(world.compared for world in worlds) > 1_000
    biased = [client for world in worlds for client in world.clients.values() if client.job.bias is not None]
    assert sum(bool(client.tokens) for client in biased) > 50
    masked = [client for world in worlds for client in world.clients.values() if client.job.automaton is not None]
    assert sum(bool(client.tokens) for client in masked) > 50 and sum(world.held for world in worlds) > 100
    assert {client.job.filters for world in worlds for client in world.clients.values()} == {0, 1, 2, 3}


def test_a_seed_gives_the_same_run_again():
    first, second = World(draw(7)), World(draw(7))
    first.run()
    second.run()
    assert list(first.device.trace) == list(second.device.trace)
    assert first.turns == second.turns


def test_a_planted_fault_is_found_and_shrunk(monkeypatch):
    from gapless.memory.ledger import Ledger

    # Pages come back at once, while steps in flight still touch them.
    monkeypatch.setattr(Ledger, "retire", lambda self, last_step, release, item: release(item))
    failing = [seed for seed in range(20) if failure(draw(seed))]
    assert len(failing) > 2
    scenario, found = draw(failing[0]), []

    def shrunk(*args):
        found.append(shrink(*args, most_runs=150))
        return found[0]

    monkeypatch.setattr("simulation.run.shrink", shrunk)
    report = check(failing[0])
    (small,) = found
    assert report is not None and f"seed {failing[0]}" in report and str(small) in report
    assert failure(small)
    assert len(small.jobs) < len(scenario.jobs) or len(scenario.jobs) <= 2


def test_a_dropped_token_is_found(monkeypatch):
    from gapless.memory.rows import RowTable

    original = RowTable.append
    monkeypatch.setattr(RowTable, "append", lambda self, rows, tokens: original(self, rows, tokens * 0))
    # Settled tokens are read again after a preemption, and by the prefix index.
    assert any(failure(draw(seed)) for seed in range(60))


class Never:
    """A fence that is not reached."""

    def done(self):
        return False


@pytest.mark.parametrize("name", ["packet", "outbox"])
@pytest.mark.parametrize("fault", ["held", "wait for their fences"])
def test_a_slot_that_does_not_come_back_is_found(name, fault):
    def lose(loop):
        ring = getattr(loop.launcher.executor, {"packet": "packets", "outbox": "outboxes"}[name])
        retire = ring.retire
        ring.retire = lambda slot, fence: None if fault == "held" else retire(slot, Never())

    job = Job(1, 0, (3,), 3, (), 0, "", None)
    world = World(draw(0)._replace(depth=8, jobs=(job,), faults=()), lose)
    with pytest.raises(AssertionError, match=f"at rest, {name} slots are in use"):
        world.run()


def test_a_scenario_is_printed_readably():
    job = Job(1, 2, (3,), 4, (), 0, "", None)
    assert "Job(key=1, arrives=2, prompt=(3,)" in str(draw(0)._replace(jobs=(job,)))
