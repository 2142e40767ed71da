"""The group of ranks on GPUs, with sums.cu run by threads of the host: each of its kernels' threads is one."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import pytest
import torch
from comm.emulated_gpu import PlayedDriver, fake_device, groups_of, library, ranks_of, together
from torch import Tensor
from waiting import until

from gapless.base.errors import ConfigError, DeviceError
from gapless.base.share import Share
from gapless.comm import cuda
from gapless.comm.cuda import MOST_BLOCKS, Arena, CudaGroup, HostWords
from gapless.kernels import plain

WORLDS = (2, 3)
SMALL = {"MOST_SENT": 4096, "LARGE_PIECE": 3072, "THREADS": 4, "KEPT_CELLS": 32}
"""Sizes at which large sums, and sums of several pieces, are a few kilobytes"""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", params=WORLDS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ctypes.CDLL]:
    return request.param, library(tmp_path_factory.mktemp("sums"), request.param)


@pytest.fixture
def world(kernels: tuple[int, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> list[CudaGroup]:
    for name, value in SMALL.items():
        monkeypatch.setattr(cuda, name, value)
    return ranks_of(kernels[1], kernels[0])


def parts_of(world: list[CudaGroup], shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return [torch.randint(-(2**62), 2**62, shape, generator=draw) for _ in world]
    return [torch.randn(shape, generator=draw).mul(8).to(dtype) for _ in world]


def summed(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, rounded once."""
    total = parts[0].to(torch.int64 if parts[0].dtype == torch.int64 else torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64), ids=str)
def test_sums_are_in_the_order_of_ranks_and_equal_to_the_bit(world: list[CudaGroup], dtype: torch.dtype):
    for seed, shape in enumerate(((1, 8), (3, 5), (3, 20), (5, 256), (16, 512), (5, 1001), (1, 8))):
        parts = parts_of(world, shape, dtype, seed)
        want = summed(parts)
        found = together(*(partial(group.add, part.clone()) for group, part in zip(world, parts, strict=True)))
        for one in found:
            assert torch.equal(one, want), shape


@pytest.mark.parametrize("count", [12, 4000], ids=str)
def test_a_sum_is_of_equal_units_on_a_rank_whose_numbers_are_not_aligned(world: list[CudaGroup], count: int):
    parts = [torch.arange(count + 8).bfloat16()[rank : rank + count] for rank in range(len(world))]
    want = summed(parts)
    for one in together(*(partial(group.add, part) for group, part in zip(world, parts, strict=True))):
        assert torch.equal(one, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (5, 512), (40, 96)], ids=str)
def test_add_norm_equals_a_sum_and_then_the_kernels_own(
    world: list[CudaGroup], dtype: torch.dtype, shape: tuple[int, int]
):
    parts = parts_of(world, shape, dtype, 1)
    x, weight = parts_of(world, shape, dtype, 2)[0], torch.rand(shape[1]) + 0.5
    want_x = x.clone()
    want = plain.KERNELS.add_rms_norm(want_x, summed(parts), weight, 1e-6)
    own = [x.clone() for _ in world]
    given = zip(world, own, parts, strict=True)
    found = together(*(partial(group.add_norm, mine, part.clone(), weight, 1e-6) for group, mine, part in given))
    for mine, normed in zip(own, found, strict=True):
        assert torch.equal(mine, want_x) and torch.equal(normed, found[0])
        assert torch.allclose(normed.float(), want.float(), atol=1e-5, rtol=1e-2)


def test_gather_puts_columns_side_by_side_though_their_widths_differ(world: list[CudaGroup]):
    rows = 5
    for width in (8, 9000, 3):
        parts = [torch.randn(rows, width + 5 * rank).bfloat16() for rank in range(len(world))]
        want = torch.cat(parts, dim=1)
        outs = [torch.empty_like(want), *(torch.empty(rows, 0).bfloat16() for _ in world[1:])]
        # Several in a row: a follower runs ahead until its channel is full.
        turns = zip(world, parts, outs, strict=True)
        together(*(partial(repeat, partial(group.gather, part, out), 3) for group, part, out in turns))
        assert torch.equal(outs[0], want), width


def repeat(run, times: int) -> None:
    for _ in range(times):
        run()


def test_all_ranks_hear_what_the_leader_tells(world: list[CudaGroup], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "TELL_WORDS", 64)
    for size in (1, 7, 64, 150):
        words = [torch.full((size,), rank, dtype=torch.int32) for rank in range(len(world))]
        words[0] = torch.arange(size, dtype=torch.int32) - 3
        found = together(*(partial(group.tell, word.clone()) for group, word in zip(world, words, strict=True)))
        assert all(torch.equal(one, words[0]) for one in found)
    for group in world:
        waited, _, launches = (ctypes.c_uint64 * 3).from_address(group.call.board)
        assert waited > 0 and launches == 6, "the host is told, too"


def test_a_long_run_of_operations_of_all_kinds_keeps_ranks_in_step(world: list[CudaGroup]):
    """Both halves of an arena are used again and again, in grids of all sizes."""

    def run(group: CudaGroup) -> list[Tensor]:
        found, rank = [], group.share.rank
        for turn in range(12):
            rows = (1, 4, 40)[turn % 3]
            y = torch.full((rows, 32), float(turn + rank)).bfloat16()
            found.append(group.add(y))
            found.append(group.add_norm(torch.ones(rows, 32).bfloat16(), y.clone(), torch.ones(32), 1e-6))
            found.append(group.tell(torch.full((rows,), turn if group.share.leads else -1, dtype=torch.int32)))
            out = torch.empty(rows, 4 * len(world) if group.share.leads else 0).bfloat16()
            found += [group.gather(y[:, :4].contiguous(), out)] if group.share.leads else []
            group.share.leads or group.gather(y[:, :4].contiguous(), out)
        return found

    leader, *others = together(*(partial(run, group) for group in world))
    for other in others:
        mine = [one for at, one in enumerate(leader) if at % 4 != 3]
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    for turn in range(12):
        want = sum(float(turn + rank) for rank in range(len(world)))
        assert (leader[4 * turn] == torch.tensor(want).bfloat16()).all()


def test_epochs_go_on_after_the_last_number(world: list[CudaGroup]):
    for group in world:
        state = (ctypes.c_uint32 * 4).from_address(group.state)
        for operation in range(3):
            state[operation] = 2**32 - 3
    for turn in range(6):
        parts = parts_of(world, (40, 96), torch.bfloat16, turn)
        found = together(*(partial(group.add, part.clone()) for group, part in zip(world, parts, strict=True)))
        assert all(torch.equal(one, summed(parts)) for one in found)
    assert 2 <= state[1] < 20, "six sums of three launches, after the wrap"


def test_a_muted_rank_does_nothing_and_waits_for_nobody(world: list[CudaGroup]):
    group, y = world[1], torch.ones(40, 96).bfloat16()
    with group.muted():
        group.add(y)
        group.tell(torch.zeros(3, dtype=torch.int32))
        group.gather(y, torch.empty(40, 0).bfloat16())
    assert (y == 1).all()
    found = together(*(partial(one.add, torch.ones(1, 8)) for one in world))
    assert all((one == len(world)).all() for one in found)


@pytest.mark.parametrize("what", ["add", "add_large", "add_norm", "tell", "gather"])
def test_stop_ends_every_wait_and_later_launches_at_once(world: list[CudaGroup], what: str):
    """A peer that never comes: rank 0 waits, and a leader waits for a follower's columns."""
    group, y = world[0], torch.ones(40, 96).bfloat16()
    calls = {
        "add": lambda: group.add(y[:1].contiguous()),
        "add_large": lambda: group.add(y),
        "add_norm": lambda: group.add_norm(y[:1].clone(), y[:1].clone(), torch.ones(96), 1e-6),
        "tell": lambda: group.tell(torch.zeros(3, dtype=torch.int32)),
        "gather": lambda: group.gather(y, torch.empty(40, 96 * len(world)).bfloat16()),
    }
    waits = threading.Thread(target=calls[what], daemon=True)
    waits.start()
    until(lambda: group.driver.launches)
    waits.join(0.2)
    assert waits.is_alive()
    world[-1].stop()
    waits.join(60)
    assert not waits.is_alive()
    world[-1].stop()
    for call in calls.values():
        call()
    with pytest.raises(DeviceError, match="the ranks were stopped"):
        group.device.fault.ask()


def test_a_failed_device_stops_all_ranks(world: list[CudaGroup]):
    world[0].device.fault.set(RuntimeError("out of memory"), "here")
    with pytest.raises(DeviceError, match="stopped"):
        world[1].device.fault.ask()


def test_grids_depend_on_sizes_and_gpus_alone(kernels: tuple[int, ctypes.CDLL]):
    """The blocks of all ranks of a GPU fit it at once."""
    world, loaded = kernels
    for processors, blocks in ((132, min(MOST_BLOCKS, 132 // world)), (8, 8 // world)):
        groups = groups_of(drivers := [PlayedDriver(loaded, processors) for _ in range(world)])
        for group in groups:
            group.connect([one.handles() for one in groups])
        together(*(partial(group.add, torch.ones(512, 2048)) for group in groups))
        assert {driver.launches[-1][1] for driver in drivers} == {blocks}


def test_memory_of_other_processes_is_mapped_once_and_let_go(kernels: tuple[int, ctypes.CDLL], monkeypatch):
    world, loaded = kernels
    groups = groups_of(drivers := [PlayedDriver(loaded, 4) for _ in range(world)])
    handles = []
    for rank, group in enumerate(groups):
        monkeypatch.setattr(cuda.os, "getpid", lambda rank=rank: 100 + rank)
        handles.append(group.handles())
    for rank, group in enumerate(groups):
        monkeypatch.setattr(cuda.os, "getpid", lambda rank=rank: 100 + rank)
        group.connect(handles)
    assert [len(driver.open_handles) for driver in drivers] == [world - 1] * world
    for _ in range(200):
        for group in groups:
            with group.muted():
                group.add(torch.ones(1, 8))
    assert [(len(driver.open_handles), len(driver.memory)) for driver in drivers] == [(world - 1, 1)] * world
    for group in groups:
        group.close()
        group.close()
    assert not any(driver.open_handles or driver.memory for driver in drivers)


def test_gpus_that_do_not_reach_each_other_are_refused_by_rank(kernels: tuple[int, ctypes.CDLL], monkeypatch):
    world, loaded = kernels
    group = groups_of([driver := PlayedDriver(loaded, 4)] * world)[0]
    handles = [group.handles()] * world
    driver.refuses = True
    monkeypatch.setattr(cuda.os, "getpid", lambda: -1 % 2**32)
    with pytest.raises(ConfigError, match=r"rank 0 cannot map the GPU memory of rank 0 .*device_ids"):
        group.connect(handles)


def test_more_ranks_than_the_kernels_serve_are_refused():
    with pytest.raises(ConfigError, match="2 to 8 ranks on one host, not 9"):
        CudaGroup(Share(0, 9), fake_device(), HostWords(torch.zeros(0), 0, 0, print), PlayedDriver(None))


def test_a_second_stream_is_an_error_of_ours(world: list[CudaGroup]):
    world[0].driver.stream = lambda: 8
    with pytest.raises(AssertionError, match="a group belongs to one stream"):
        world[0].add(torch.ones(1, 8))


@pytest.mark.parametrize("ranks", range(2, 9))
def test_places_of_an_arena_do_not_overlap(ranks: int):
    arena = Arena.of(ranks)
    places = sorted(arena.offsets.values())
    assert len({*places}) == len(places) and all(place % 256 == 0 for place in places)
    assert places[-1] < arena.nbytes <= 64 << 20 and arena.nbytes % (2 << 20) == 0
