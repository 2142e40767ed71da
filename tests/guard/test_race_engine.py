"""The engine under no_race: silent as it is, on threads and on the simulator; loud with a fence or a lease removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from harness import captures_at_once, checksum_loop, run, script, sizes
from loops_under_guard import watch
from sharpest import sharpest

from gapless.base.errors import EngineError
from gapless.device import CpuDevice
from gapless.guard.race import no_race
from gapless.guard.race_checker import RaceChecker
from gapless.guard.race_report import Race
from gapless.kernels import plain
from gapless.loop.loop import Loop
from gapless.testing.guarded import guarded
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

FAULT_SEEDS = 6


def open_device(kind: str, seed: int, maps_host: bool):
    if kind == "sim":
        return SimDevice(seed, maps_host=maps_host)
    device = CpuDevice(threads=1)
    # Without mapped host memory, tokens come home on a stream of their own, as on a GPU.
    device.caps = device.caps._replace(maps_host=maps_host)
    return device


def drive(kind: str, seed: int, depth: int, fault: Callable | None = None) -> tuple[list[Race], Loop]:
    """One script under the checker. A fault may break the run; what was launched is drained all the same."""
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    device = open_device(kind, seed * 8 + depth, maps_host=fault is None and seed % 4 == 0)
    with no_race("record") as checker:
        graphs = captures_at_once(shape) if seed % 2 else {}
        # A packet that is torn on purpose names any row: torch refuses it, the C++ kernels would write there.
        loop = checksum_loop(device, shape, depth, kernels=plain.KERNELS if fault else None, **graphs)
        watch(checker, loop)
        if fault is None:
            run(loop, jobs)
            assert all(job.flag == -1 or job.tokens == job.expected() for job in jobs), f"seed {seed}"
        else:
            fault(loop, checker)
            break_with(loop, jobs, device)
        device.close()
    assert checker.unknown_index == 0, "an operator of ours whose rows are not stated: see kernel_rows.py"
    return checker.races, loop


def break_with(loop: Loop, jobs, device) -> None:
    """Run as far as the fault allows; it may show in other ways too: a wrong step number, a row that ended twice."""
    with suppress(AssertionError, EngineError, LookupError, ValueError):
        run(loop, jobs, check=False, most_turns=300)
    with suppress(EngineError):
        device.drain()


@pytest.mark.parametrize("kind, seeds", sharpest([("sim", range(4)), ("sim", range(4, 12)), ("cpu", range(8))]))
def test_the_engine_has_no_race(kind, seeds):
    captured = 0
    for seed in seeds:
        races, loop = drive(kind, seed, depth=(1, 2, 4, 8)[seed % 4])
        assert races == [], f"seed {seed}\n{races[0]}"
        captured += loop.counters.graph_steps
    assert captured > len(seeds)


def operators_seen(graphs: bool) -> int:
    """Count the operators of a script that are seen when it runs for the second time."""
    shape, seen = sizes(1), []
    with no_race() as checker:
        options = captures_at_once(shape) if graphs else {}
        loop = checksum_loop(SimDevice(9), shape, 4, kernels=plain.KERNELS, **options)
        watch(checker, loop)
        run(loop, script(1, shape.max_len))
        saw = checker.saw
        checker.saw = lambda *args: (seen.append(args[0]), saw(*args))[1]
        run(loop, script(1, shape.max_len))
    return len(seen)


@pytest.mark.parametrize("graphs", sharpest([True, False]))
def test_operators_of_programs_that_no_sync_has_checked_are_seen(graphs):
    """With both, as `make test` runs engines: such programs run outside of no_sync, and not of no_race."""
    alone = operators_seen(graphs)
    with guarded() as checked:
        assert operators_seen(graphs) == alone > 1_000
    assert checked.launched > 20 and not checked.trouble()


# Faults, each one fence or lease less.


def token_copy_does_not_wait(loop: Loop, checker: RaceChecker) -> None:
    loop.device.token_out.after = lambda fence: None


def host_waits_for_the_step_and_not_for_its_copy(loop: Loop, checker: RaceChecker) -> None:
    executor = loop.launcher.executor
    download_lines = executor.download_lines
    executor.download_lines = lambda *args: download_lines(*args) and args[-1]


def host_does_not_wait(loop: Loop, checker: RaceChecker) -> None:
    executor = loop.launcher.executor
    download_lines = executor.download_lines

    def passed_at_once(*args):
        fence = download_lines(*args)
        return SimpleNamespace(done=lambda: True, wait=lambda: None, time=lambda: 0, mark=None, fence=fence)

    executor.download_lines = passed_at_once


def one_line_buffer_for_all_steps(loop: Loop, checker: RaceChecker) -> None:
    executor, packer = loop.launcher.executor, loop.launcher.leader.packer
    write = packer.write
    packer.write = lambda *args: write(*args[:4], 0, *args[5:])
    executor.copy_lines = lambda outbox, start, end: loop.device.download(
        outbox.tensor.view(torch.int32)[start:end], executor.buffers.scores[0, start:end]
    )


def small_packet_ring_retired_at_the_start_of_its_step(loop: Loop, checker: RaceChecker) -> None:
    # The outbox ring alone keeps packets apart if there are more slots: see docs/notes/2026-11-proof-race.md.
    executor, compute = loop.launcher.executor, loop.device.compute
    ring = executor.packets = loop.device.ring(1, executor.packets.slots[0].tensor.numel())
    checker.register("small packet", ring)
    fences, record, retire = [], compute.record, ring.retire

    def recorded(timed: bool = False):
        fences.append(record(timed))
        return fences[-1]

    compute.record = recorded
    ring.retire = lambda slot, fence: retire(slot, fences[-2])


def packet_written_again_after_launch(loop: Loop, checker: RaceChecker) -> None:
    packer, before = loop.launcher.leader.packer, []
    write = packer.write

    def write_both(*args) -> None:
        if before:
            before[-1][-1] += 1
        write(*args)
        before.append(args[3])

    packer.write = write_both


ALWAYS = [
    token_copy_does_not_wait,
    host_waits_for_the_step_and_not_for_its_copy,
    host_does_not_wait,
    one_line_buffer_for_all_steps,
]
OFTEN = [small_packet_ring_retired_at_the_start_of_its_step, packet_written_again_after_launch]
"""Whether these race depends on how far the host ran ahead in that run."""


@pytest.mark.parametrize("kind", sharpest(["sim", "cpu"]))
@pytest.mark.parametrize("fault", sharpest(ALWAYS + OFTEN, 4))
def test_a_missing_fence_is_reported(kind, fault):
    seeds = FAULT_SEEDS if kind == "sim" else 3
    caught = sum(bool(drive(kind, seed, 4, fault)[0]) for seed in range(seeds))
    assert caught == seeds if fault in ALWAYS else caught >= (seeds + 1) // 2, f"{caught} of {seeds}"


def at_once(retire: Callable) -> Callable:
    return lambda item, last_step: retire(item, 0)


def pages_are_free_at_once(loop: Loop) -> None:
    loop.pools[0].retire = at_once(loop.pools[0].retire)


def rows_are_free_at_once(loop: Loop) -> None:
    loop.rows.retire = at_once(loop.rows.retire)


def nothing_is_kept_by_the_ledger(loop: Loop) -> None:
    loop.planner.ledger.retire = lambda last_step, release, item: release(item)


@pytest.mark.seeds
@pytest.mark.parametrize("fault", [pages_are_free_at_once, rows_are_free_at_once, nothing_is_kept_by_the_ledger])
def test_a_page_or_row_freed_while_a_step_may_write_it_is_reported(fault):
    """On one stream this gives no wrong token: the order of the stream hides it. It is the lease that is broken."""
    mattered = caught = 0
    for seed in range(16):
        exposed: list[int] = []

        def plant(loop: Loop, checker: RaceChecker, exposed=exposed) -> None:
            note_steps_in_flight(loop, exposed)
            fault(loop)

        races, _ = drive("sim", seed, 4, plant)
        mattered += bool(exposed)
        caught += bool(races)
        assert all("frees" in race.missing for race in races), races
    assert mattered >= 4, "the scripts were meant to end requests with steps in flight"
    # A row is written by every step, its pages only by one in which the sequence still runs: mostly after an abort.
    least = mattered // 4 if fault is pages_are_free_at_once else mattered
    assert caught >= least, f"{caught} of {mattered}"


def note_steps_in_flight(loop: Loop, exposed: list[int]) -> None:
    """Note the ends of sequences that have steps in flight."""
    give_up = loop.planner.give_up

    def noted(row) -> None:
        if any(flight.plan.step <= row.last_step for flight in loop.flights):
            exposed.append(row.number)
        give_up(row)

    loop.planner.give_up = noted
