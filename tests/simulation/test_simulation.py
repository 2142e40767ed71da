"""320 seeds of the simulator, 96 of them in `make test`, and as many of several ranks.

A failure prints its seed and the smallest scenario for it.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
from loops_under_guard import loops_under_no_race
from sharpest import sharpest
from simulation.run import check, failure, run, sound_world
from simulation.scenario import RANKS, Job, draw
from simulation.shrink import shrink
from simulation.world import World

from gapless.testing.adversary import MOODS

SEEDS, FEW, SHARES = 320, 96, 8
EARLY = (*range(FEW), 121)
"""121 has a host tier and several page groups."""
ONE_WORKER = pytest.mark.xdist_group("simulator")


@cache
def played(seed: int) -> World:
    world = sound_world(draw(seed))
    try:
        world.run()
    except Exception as error:
        raise AssertionError(check(seed)) from error
    return world


@ONE_WORKER
@pytest.mark.parametrize("share", range(SHARES))
def test_no_seed_of_the_simulator_fails(share, guarded_steps):
    # One share under no_sync: what the host asks of the device does not depend on the seed.
    with guarded_steps.rest() if share else nullcontext():
        for seed in EARLY[share::SHARES]:
            played(seed)


@pytest.mark.seeds
@pytest.mark.parametrize("share", range(SHARES))
def test_no_further_seed_of_the_simulator_fails(share, guarded_steps):
    with guarded_steps.rest():
        reports = run(FEW + share, len(range(FEW + share, SEEDS, SHARES)), stride=SHARES)
    assert not reports, "\n\n".join(reports)


def rank_shares():
    """Shares of the seeds of several ranks; the first few in `make test`."""
    yield 0, 16
    yield from (pytest.param(first, 40, marks=pytest.mark.seeds) for first in range(16, 336, 40))


@pytest.mark.parametrize(("first", "count"), [*rank_shares()])
def test_no_seed_of_several_ranks_fails(first, count, guarded_steps):
    with guarded_steps.rest():
        reports = run(RANKS + first, count)
    assert not reports, "\n\n".join(reports)


@pytest.mark.parametrize("first", sharpest((200, 204, 208, 212), mark="raced"))
def test_no_seed_of_the_simulator_has_a_race(first, guarded_steps):
    with guarded_steps.rest(), loops_under_no_race():
        reports = run(first, 4)
    assert not reports, "\n\n".join(reports)


@ONE_WORKER
def test_the_seeds_reach_what_they_are_for(guarded_steps):
    with guarded_steps.rest():
        worlds = [played(seed) for seed in EARLY]
    ends = {client.end for world in worlds for client in world.clients.values()}
    assert ends == {"STOP", "LENGTH", "ERROR", "left", "refused", "died", "failed"}
    assert sum(world.preemptions for world in worlds) > 20
    assert sum(world.chained for world in worlds) > 120
    assert sum(world.accepted for world in worlds) > 40
    assert sum(world.engines > 1 for world in worlds) > 2
    assert {world.scenario.depth for world in worlds} == {1, 2, 3, 4, 5, 6, 7, 8, None}
    assert {world.scenario.mood for world in worlds} == {None, *MOODS}
    struck = {fault.kind for world in worlds for fault in world.scenario.faults if fault.turn < world.turns}
    assert struck == {"raise", "restart", "jump", "spoil", "swap", "unload", "flip", "rot", "flush", "renew"}
    assert sum(world.brought for world in worlds) > 40
    adapted = [client for world in worlds for client in world.clients.values() if client.job.adapter]
    assert sum(bool(client.tokens) for client in adapted) > 32
    assert sum(world.spoiled > 0 for world in worlds) > 1
    assert sum(client.scored for world in worlds for client in world.clients.values()) > 40
    assert {world.scenario.step for world in worlds} == {"one", "held", "several"}
    assert {world.scenario.grouped for world in worlds} == {False, True}
    assert sum(world.stored for world in worlds) > 80 and sum(world.loaded for world in worlds) > 32
    assert sum(world.rung for world in worlds) > 8
    assert sum(world.hosted for world in worlds) > 40 and sum(world.refused for world in worlds) > 6
    assert sum(world.fetched for world in worlds) > 20 and sum(world.disproved for world in worlds) > 2
    assert any(world.scenario.host and world.scenario.grouped and world.hosted for world in worlds)
    assert any(world.scenario.tier and world.scenario.grouped and world.loaded for world in worlds)
    assert sum(world.followed for world in worlds) > 400 and sum(world.declined for world in worlds) > 4
    assert sum(world.deaths for world in worlds) > 1
    biased = [client for world in worlds for client in world.clients.values() if client.job.bias is not None]
    assert sum(bool(client.tokens) for client in biased) > 20
    masked = [client for world in worlds for client in world.clients.values() if client.job.automaton is not None]
    assert sum(bool(client.tokens) for client in masked) > 20 and sum(world.held for world in worlds) > 40
    assert {client.job.filters for world in worlds for client in world.clients.values()} == {0, 1, 2, 3}


def test_a_seed_gives_the_same_run_again():
    first, second = World(draw(7)), World(draw(7))
    first.run()
    second.run()
    assert list(first.device.trace) == list(second.device.trace)
    assert first.turns == second.turns


@pytest.mark.seeds
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
