"""The world of ranks: what must not happen to them is found and named, and what may happen does no harm."""

from __future__ import annotations

import random

import pytest
import torch
from harness import capture_all, check_at_rest, checksum_loop, run, script, sizes

from gapless.base.errors import DeviceError, EngineError
from gapless.kernels import native
from gapless.step.follower import FollowerProgram
from gapless.step.keys import ForwardKey
from gapless.step.orders import WireError
from gapless.step.program import newest
from gapless.testing.checksum import ChecksumModel, part
from gapless.testing.meetings import added
from gapless.testing.world import Faults, World


def ranked(seed, depth=4, ranks=2, faults=None, kind=ChecksumModel, **options):
    """A world, a loop that its ranks follow, and jobs for it."""
    world, shape = World(seed, ranks, faults=faults), sizes(seed)
    options = {"patience": 2, "kernels": native.load(), **options}
    loop = checksum_loop(world.device, shape, depth, kind, ranks=world, group=world.group, **options)
    world.follow(loop)
    return world, loop, script(seed, shape.max_len)


def together(world, *programs):
    """Run a program on each rank, until all have ended. Raises the error of the first that fails."""
    fences = []
    for device, program in zip(world.devices, programs, strict=True):
        device.compute.launch(program)
        fences.append(device.compute.record())
    while any(fence.at is None for fence in fences):
        for device in world.devices:
            if device.fault.error is not None:
                raise device.fault.error
        assert world.force() is not None, world.deadlock("programs")


# Operations.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_have_equal_bits_on_all_ranks_whoever_comes_last(dtype):
    world, first = World(3, 3), torch.tensor([1e8, -3.0, 2.0**24, 7.0])
    parts = [(first * (1, -1, 1e-7)[rank]).to(dtype) for rank in range(3)]
    wanted = added(parts).to(dtype)
    for _ in range(20):
        mine = [one.clone() for one in parts]
        together(world, *(lambda group=group, y=y: group.add(y) for group, y in zip(world.groups, mine, strict=True)))
        assert all(torch.equal(y, wanted) for y in mine)
    others = [added(parts[::-1]).to(dtype), added([parts[1], parts[2], parts[0]]).to(dtype)]
    assert dtype == torch.int64 or any(not torch.equal(one, wanted) for one in others), "the order of floats matters"
    world.device.close()


def test_columns_go_to_the_leader_and_lines_come_from_there():
    world = World(1, 3)
    given = [torch.full((2, width), float(width)) for width in (3, 1, 2)]
    out, lines = [torch.zeros(2, 6), torch.zeros(2, 0), torch.zeros(2, 0)], [torch.full((4,), n) for n in range(3)]
    lines = [line.int() for line in lines]

    def program(group, given, out, line):
        group.tell(line)
        group.gather(given, out)

    cases = zip(world.groups, given, out, lines, strict=True)
    together(world, *(lambda case=case: program(*case) for case in cases))
    assert torch.equal(out[0], torch.cat(given, dim=1)) and all(not line.any() for line in lines)
    world.device.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda group: group.add(torch.zeros(2)), lambda group: group.tell(torch.zeros(2).int())),
        (lambda group: group.add(torch.zeros(2)), lambda group: group.add(torch.zeros(3))),
        (lambda group: group.add(torch.zeros(2)), lambda group: group.add(torch.zeros(2).bfloat16())),
    ],
    ids=["kind", "shape", "dtype"],
)
def test_calls_of_ranks_that_differ_are_named(one, other):
    world = World(1)
    with pytest.raises(AssertionError, match=r"rank \d comes to .*, and others to .*call 0"):
        together(world, lambda: one(world.groups[0]), lambda: other(world.groups[1]))
    world.device.close()


def test_parts_of_entries_add_up_and_each_depends_on_the_entry():
    entries = torch.randint(2**31 - 1, (50,))
    for count in (2, 3, 5):
        shares = [World(0, count).groups[rank].share for rank in range(count)]
        parts = [part(entries, share) for share in shares]
        assert torch.equal(sum(parts) % (2**31 - 1), entries)
        assert all(len(set(one.tolist())) > 40 for one in parts)


# Ranks that wait for ever, or differ.


def test_a_rank_that_lacks_an_order_is_a_deadlock_that_names_all_ranks():
    world, loop, jobs = ranked(2, ranks=3)
    send, sent = world.send, []

    def lose(order):
        send(order)
        sent.append(order)
        if len(sent) >= 4:
            world.hosts[1].inbox.pop()  # and all after it: no order is out of place

    world.send = lose
    with pytest.raises(AssertionError, match="no stream of any rank can move") as found:
        run(loop, jobs)
    text = str(found.value)
    assert "rank 0 in tell" in text or "without rank [2]" in text
    assert "rank 2: host: after a step of" in text and "last orders: a step of" in text
    world.device.close()


def test_an_order_out_of_place_is_refused_on_the_wire():
    world, loop, jobs = ranked(2)
    send = world.send

    def swap(order):
        send(order)
        inbox = world.hosts[0].inbox
        if len(inbox) > 1:
            inbox.append(inbox.popleft())

    world.send = swap
    with pytest.raises(WireError):
        run(loop, jobs)
    world.device.close()


def test_a_follower_that_skips_one_line_of_its_leader_is_found(monkeypatch):
    original, skipped = FollowerProgram.tell, []

    def tell(program, rows):
        before = [table.clone() for table in (program.tables.state, program.tables.history)]
        original(program, rows)
        skipped.append(rows)
        if len(skipped) == 5:
            program.tables.state.copy_(before[0])
            program.tables.history.copy_(before[1])

    monkeypatch.setattr(FollowerProgram, "tell", tell)
    world, loop, jobs = ranked(5, patience=99)
    with pytest.raises(AssertionError):
        run(loop, jobs)
        for job in jobs:
            job.check()
    world.device.close()


# Faults.


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_dies_at_any_moment_ends_all_and_gives_no_wrong_token(seed):
    rng, died = random.Random(seed), 0
    for moment in [rng.randrange(20, 2_000) for _ in range(8)]:
        dead = rng.randrange(3)
        world, loop, jobs = ranked(seed, ranks=3, faults=Faults(late=10, dies=(dead, moment)))
        try:
            run(loop, jobs)
        except (DeviceError, EngineError) as error:
            died += 1
            assert f"rank {dead} died" in f"{error} {error.__cause__} {error.__cause__ and error.__cause__.__cause__}"
        world.device.close()  # asserts that nobody waits
        for job in jobs:
            assert job.tokens == job.expected()[: len(job.tokens)]
    assert died > 3


def test_a_graph_that_one_rank_lacks_is_kept_nowhere():
    refused = 0
    for seed in range(6):
        world, loop, jobs = ranked(seed, ranks=3, faults=Faults(refused=0.3), buckets=(1, 2, 4))
        capture_all(loop)
        run(loop, jobs)
        for job in jobs:
            job.check()
        check_at_rest(loop)
        world.check_alike(loop)
        known = {key for key, kept in loop.launcher.graphs.known.items() if kept and isinstance(key, ForwardKey)}
        assert known <= world.executors[0].graphs.keys() == world.executors[1].graphs.keys()
        refused += sum(not kept for kept in loop.launcher.graphs.known.values())
        world.device.close()
    assert refused > 10


def test_a_full_ring_declines_steps_and_is_counted():
    declined = 0
    for seed in range(4):
        world, loop, jobs = ranked(seed, 8, faults=Faults(late=60, ring=1))
        run(loop, jobs)
        for job in jobs:
            job.check()
        declined += loop.counters.declined_ranks
        world.device.close()
    assert declined > 20


def test_a_follower_that_fails_ends_all_with_its_own_words(monkeypatch):
    world, loop, jobs = ranked(1)
    model = world.executors[0].program.model

    def forward(*_):
        raise MemoryError("no room on this rank")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises((DeviceError, EngineError)) as found:
        run(loop, jobs)
    assert "rank 1 has failed: MemoryError('no room on this rank')" in f"{found.value} {found.value.__cause__}"
    world.device.close()


def test_a_seed_of_the_world_gives_the_same_run_again():
    traces = []
    for _ in range(2):
        world, loop, jobs = ranked(7, ranks=3, faults=Faults(late=20, refused=0.2))
        run(loop, jobs)
        traces.append(([list(device.trace) for device in world.devices], world.moment))
        world.device.close()
    assert traces[0] == traces[1]


# News of rows.


@pytest.mark.parametrize("most", [4, 8, 9, 48])
def test_news_of_a_row_are_its_last_tokens_and_next_drafts_in_histories_of_any_size(most):
    for width in (1, 3, 5):
        for length in range(most + 1):
            places = newest(torch.tensor([length]), width, most)[0].tolist()
            assert len(places) == 2 * width - 1
            wanted = {place for place in range(length - width, length + width - 1) if 0 <= place < most}
            assert wanted <= set(places) <= set(range(most))
