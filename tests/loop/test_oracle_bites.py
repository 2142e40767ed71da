"""The depth oracle with one protection taken away at a time: it must notice every one.

A protection that another one covers is taken away together with its cover, or with less room around it, and the test
says so: that the engine survives the loss of one is part of what is shown.
"""

from __future__ import annotations

import pytest
import torch
from harness import (
    WaryModel,
    captures_at_once,
    check_at_rest,
    checksum_loop,
    one_line_for_all,
    run,
    script,
    sizes,
    small_outbox_ring,
)

from gapless.kernels import plain
from gapless.kernels.layout import HEADER_WORDS
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan.planner import Planner
from gapless.step.launcher import Launcher
from gapless.step.outbox import Outbox
from gapless.step.packet import Packer
from gapless.testing.adversary import MOODS
from gapless.testing.sim import SimDevice, SimStream

SEEDS = 24


def oracle(seed, depth, prepare=None, maps_host=False, mood=None):
    """One seed of the depth oracle."""
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    device = SimDevice(seed * 8 + depth, mood, maps_host)
    graphs = captures_at_once(shape) if seed % 2 else {}
    loop = checksum_loop(device, shape, depth, WaryModel, **graphs)
    if prepare:
        prepare(loop)
    run(loop, jobs)
    for job in jobs:
        job.check("tokens")
    check_at_rest(loop)
    return loop


def reasons(depth=4, prepare=None, maps_host=False, mood=None):
    """Why seeds fail, one reason a seed that does."""
    for seed in range(SEEDS):
        try:
            oracle(seed, depth, prepare, maps_host, mood)
        except Exception as error:  # whatever the broken engine runs into
            yield str(error)


def noticed(**options):
    """All of the reasons."""
    return list(reasons(**options))


def noticed_once(**options):
    """Whether a seed fails; none runs after the first that does."""
    return next(reasons(**options), None) is not None


@pytest.fixture(scope="module", autouse=True)
def _sound_before_and_after():
    """Check that the same seeds pass with nothing taken away, before the tests and after them."""
    check_sound()
    yield
    check_sound()


def check_sound():
    oracle(0, 4)
    oracle(1, 4, maps_host=True)


# The ledger.


def test_releasing_at_once_is_noticed(monkeypatch):
    monkeypatch.setattr(Ledger, "retire", lambda self, last_step, release, item: release(item))
    assert len(noticed()) > SEEDS // 2


@pytest.mark.parametrize("room", [PagePool, RowTable])
def test_a_last_step_recorded_one_too_small_is_noticed(room, monkeypatch):
    retire = room.retire
    monkeypatch.setattr(room, "retire", lambda self, item, last_step: retire(self, item, last_step - 1))
    assert len(noticed()) > SEEDS // 2


def test_preempting_with_steps_in_flight_is_noticed(monkeypatch):
    def preempt(self):
        for seq in self.leaving:
            seq.last_step = 0
        preempt_now(self)

    preempt_now = Planner.preempt
    monkeypatch.setattr(Planner, "preempt", preempt)
    assert noticed_once()


def test_sharing_pages_before_their_chunk_is_planned_is_noticed(monkeypatch):
    def publish(self, seq, computed, step):
        publish_pages(self, seq, max(computed, seq.length), step)

    publish_pages = Planner.publish
    monkeypatch.setattr(Planner, "publish", publish)
    assert noticed_once()


# Rings. They have a slot more than steps can be in flight, so a slot's fence has always passed when its turn comes:
# each protection is taken away with a ring of one slot, on which the sound engine declines to launch instead.


def short_packets(loop):
    loop.launcher.executor.packets = loop.device.ring(1, 4 * loop.launcher.executor.sent.numel())


def short_outboxes(loop):
    small_outbox_ring(loop, 1)
    if loop.device.maps_host:
        executor = loop.launcher.executor
        executor.host_lines = lines = executor.outboxes.memory.view(torch.int32)
        executor.buffers = executor.buffers._replace(lines=lines, scores=lines)


class Passed:
    """A fence that guards nothing."""

    def done(self):
        return True


def test_a_ring_of_one_slot_is_enough_though_slow():
    for prepare in (short_packets, short_outboxes):
        assert sum(oracle(seed, 4, prepare).counters.declined_ring for seed in range(4)) > 0


def test_a_packet_slot_given_back_without_its_fence_is_noticed():
    def prepare(loop):
        short_packets(loop)
        ring = loop.launcher.executor.packets
        retire = ring.retire
        ring.retire = lambda slot, fence: retire(slot, Passed())

    assert len(noticed(prepare=prepare)) > SEEDS // 2


@pytest.mark.parametrize("maps_host", [False, True])
def test_an_outbox_slot_given_back_before_it_is_read_is_noticed(maps_host, monkeypatch):
    def enqueue(self, *args, **kwargs):
        flight = enqueue_step(self, *args, **kwargs)
        self.executor.release(flight.outbox, flight.on_host)
        return flight

    enqueue_step = Launcher.enqueue
    monkeypatch.setattr(Launcher, "enqueue", enqueue)
    monkeypatch.setattr(Launcher, "release", lambda self, flight: None)
    # The next step must run to its end within one launch, which few moods of the device allow: first one that does.
    moods = ("starve", *MOODS)
    assert any(noticed_once(prepare=short_outboxes, maps_host=maps_host, mood=mood) for mood in moods)


def test_the_device_lines_of_a_step_overwritten_by_the_next_are_noticed(monkeypatch):
    assert noticed_once(prepare=one_line_for_all)


# Fences between streams, and between device and host.


def test_a_token_copy_that_does_not_wait_for_the_step_is_noticed(monkeypatch):
    monkeypatch.setattr(SimStream, "after", lambda self, fence: None)
    assert len(noticed()) > SEEDS // 2


def test_reading_the_outbox_behind_the_wrong_fence_is_noticed(monkeypatch):
    launch_step = Launcher.launch
    monkeypatch.setattr(Launcher, "launch", lambda *args: early(launch_step(*args)))

    def early(flight):
        return flight._replace(on_host=flight.started)

    assert len(noticed(maps_host=True)) > SEEDS // 2


# Inert rows.


def test_inert_rows_writing_to_their_own_pages_are_noticed(monkeypatch):
    slots = plain.kv_slots

    def everyone(pages, rows, positions, active, size):
        return slots(pages, rows, positions, torch.ones_like(active), size)

    monkeypatch.setattr(plain, "kv_slots", everyone)
    assert noticed_once()


def test_inert_rows_in_their_own_pages_harm_nobody_while_leases_hold(monkeypatch):
    """Why only the wary model notices the above: the page is leased until the row's last step has completed."""
    slots = plain.kv_slots
    monkeypatch.setattr(
        plain, "kv_slots", lambda pages, rows, positions, active, size:
        slots(pages, rows, positions, torch.ones_like(active), size)
    )  # fmt: skip
    monkeypatch.setattr(WaryModel, "look", lambda self, *given: None)
    assert noticed() == []


def test_finished_rows_that_go_on_harm_nobody_while_leases_hold(monkeypatch):
    """tests/step/test_program.py notices these."""
    advance = plain.advance

    def never_inert(rows, line, sizes, given, tables):
        advance(rows, line, sizes, given._replace(flags=torch.zeros_like(given.flags)), tables)

    monkeypatch.setattr(plain, "advance", never_inert)
    assert noticed() == []


def test_a_bucket_filled_up_with_a_row_that_runs_is_noticed(monkeypatch):
    write = Packer.write

    def no_null_rows(packer, plan, shape, requests, words, *rest):
        write(packer, plan, shape, requests, words, *rest)
        if not shape.chunks:
            rows = words[HEADER_WORDS : HEADER_WORDS + shape.rows]
            rows[len(plan.decode) :] = rows[0]

    monkeypatch.setattr(Packer, "write", no_null_rows)
    found = noticed()
    assert found and all("two tokens in one slot" in reason for reason in found)


# Identity. Leases keep late lines away, so one is forged: each step's outbox also holds an older one's lines again.


def forge(loop):
    seen = []
    read = loop.launcher.read

    def read_with_ghosts(flight):
        out = read(flight)
        lines = torch.tensor([*(column.tolist() for column in out[1:4]), out.tokens[:, 0].tolist()])
        mine = set(out.rows.tolist())
        # A line that says LIVE, of a row that has another owner by now.
        ghosts = [g for g in seen if g[0] not in mine and loop.rows.generation[g[0]] > g[4]][:1]
        current = loop.rows.generation[out.rows].tolist()
        seen.extend((*line, now) for line, now in zip(lines.T.tolist(), current, strict=True) if line[2] == 0)
        if not ghosts:
            return out
        both = torch.cat([lines, torch.tensor(ghosts)[:, :4].T], dim=1).int().numpy()
        return Outbox(out.step, *both[:3], both[3][:, None])

    loop.launcher.read = read_with_ghosts


def test_late_lines_are_dropped_and_counted():
    dropped = 0
    for seed in range(SEEDS):
        try:
            oracle(seed, 4, forge)
        except AssertionError as error:
            # The tokens are right; only the count of dropped lines is not what leases alone would leave.
            assert "late lines" in str(error)
            dropped += 1
    assert dropped > SEEDS // 2


def test_late_lines_without_generations_are_noticed(monkeypatch):
    def prepare(loop):
        forge(loop)
        same_generation(loop)

    def same_generation(loop):
        read = loop.launcher.read

        def blind(flight):
            out = read(flight)
            return out._replace(generations=loop.rows.generation[out.rows])

        loop.launcher.read = blind

    found = noticed(prepare=prepare)
    assert found and not any("late lines" in reason for reason in found)
