"""Slots of the host tier and the rings of transfers under no_race: giving away, or reusing, early is found."""

from __future__ import annotations

import pytest
from dictionary_tier import DictionaryTier
from harness import Job, checksum_loop, run, script, sizes
from loops_under_guard import loops_under_no_race
from sharpest import sharpest
from test_host_tier import SLOT, prompts
from test_lower_tiers import Engine
from test_peer_engines import Side

from gapless.loop.spec import HostSizes
from gapless.testing.sim import SimDevice

SEEDS = 6


def given_away(stores):
    """The slots of a transfer come back when it begins."""

    def change(transfers):
        way = transfers.bulk_out if stores else transfers.bulk_in
        begin = way.begin

        def begins(batch, since):
            count = begin(batch, since)
            for move in batch.moves:
                move.copy.group.free.append(move.copy.slot)
            return count

        way.begin = begins

    return change


def one_slot(ring):
    """Both transfers on their way have one slot of a ring."""

    def change(transfers):
        setattr(transfers.bulk_in, ring, getattr(transfers.bulk_in, ring)[:1] * 2)

    return change


FAULTS = {
    "none": (lambda transfers: None, None),
    "a slot is given away while a store fills it": (given_away(True), "host"),
    "a slot is given away while a load reads it": (given_away(False), "host"),
    "places are written while a load reads them": (one_slot("places"), "bulk in places[0]"),
    "checksums arrive where others are not read": (one_slot("arrived"), "bulk in arrived[0]"),
}


def play(seed, change):
    """A script twice, over a host tier that moves a page or two at a time."""
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    again = max(job.arrives for job in jobs) + 30
    for number, job in enumerate(script(seed, shape.max_len)):
        jobs.append(Job(job.request._replace(key=100 + number), again + 3 * number, job.aborts_after))
    device = SimDevice(seed)
    loop = checksum_loop(device, shape, 2, host=HostSizes(40 * SLOT, 1))
    loop.parts.transfers.most = lambda *_: 2
    change(loop.parts.transfers)
    try:
        run(loop, jobs)
    finally:
        device.close()
    assert loop.parts.transfers.host.counts.loaded or not seed


@pytest.mark.parametrize("name", sharpest(FAULTS, 2))
def test_a_planted_fault_of_transfers_is_reported(name, guarded_steps):
    change, buffer = FAULTS[name]
    reported = set()
    for seed in range(SEEDS if buffer else 2):
        with guarded_steps.rest(), loops_under_no_race("record") as checker:
            try:
                play(seed, change)
            except Exception:
                assert buffer, "nothing is at fault"
        reported |= {race.buffer.removeprefix("engine 1 ") for race in checker.races}
        if buffer in reported:
            return
    assert not (buffer or reported)


@pytest.mark.parametrize("early", [True, False])
def test_a_planted_fault_of_a_tier_below_is_reported(early, guarded_steps):
    """The slots that a tier is to fill come back when it begins."""
    with guarded_steps.rest(), loops_under_no_race("record") as checker:
        engine = Engine(DictionaryTier)
        load, group = engine.workers[0].load, engine.loop.parts.transfers.host.groups[0]

        def loads(job, *rest):
            load(job, *rest)
            for copy in engine.below.jobs[job].copies:
                group.free.append(copy.slot)

        engine.workers[0].load = loads if early else load
        try:
            for _ in range(2):
                engine.ask(*prompts())
                engine.settle()
        except Exception:
            assert early, "nothing is at fault"
        engine.close()
    assert {race.buffer for race in checker.races} == ({"engine 1 host"} if early else set())


@pytest.mark.parametrize("early", [True, False])
def test_a_planted_fault_of_a_peer_is_reported(early, guarded_steps, tmp_path):
    """Memory of a peer is unmapped when a load begins to read it."""
    with guarded_steps.rest(), loops_under_no_race("record") as checker:
        prefiller, decoder = Side(listen=tmp_path / "p.sock"), Side(peer=tmp_path / "p.sock")
        begin = decoder.loop.parts.transfers.bulk_in.begin

        def begins(batch, since):
            count = begin(batch, since)
            batch.moves[0].copy.lease.memory.close()
            return count

        decoder.loop.parts.transfers.bulk_in.begin = begins if early else begin
        prefiller.prefill(prompts()[0], "R")
        decoder.ask(prompts()[0], claim="R")
        assert decoder.counts.lent >= 9
        for side in (decoder, prefiller):
            side.close()
    assert {race.buffer for race in checker.races} == ({"peer memory 1"} if early else set())
