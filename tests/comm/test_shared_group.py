"""The group in shared memory: sums, gathers and words of ranks that are threads or processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest
import shared_ranks
import torch
from shared_ranks import DTYPES, alone, in_order, parts, process, shared, together
from sharpest import sharpest
from waiting import until

from gapless.base.errors import ConfigError, DeviceError, EngineError
from gapless.base.share import Share
from gapless.comm.shared import Commons
from gapless.device import CpuDevice, build, cpu_native
from gapless.kernels import native, plain

SLOT = 1 << 20
"""Bytes of a piece"""
FLOATS = DTYPES[:3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_sum_is_of_float32_in_the_order_of_ranks_and_rounded_once(world: int, dtype: torch.dtype) -> None:
    sizes = 1, 15, 16, 17, 1000, SLOT // dtype.itemsize, SLOT // dtype.itemsize * 2 + 5
    given = [parts(size, world, dtype, (size,)) for size in sizes]
    with shared(world) as ranks:
        found = together(ranks, lambda one: [one.group.add(some[one.share.rank].clone()) for some in given])
    for at, some in enumerate(given):
        for got in found:
            assert torch.equal(got[at], in_order(some))
        if dtype.is_floating_point:
            exact = torch.stack(some).double().sum(0)
            error = (found[0][at].double() - exact).abs()
            assert (error <= torch.stack(some).double().abs().sum(0) * torch.finfo(dtype).eps * world).all()


def test_a_sum_of_numbers_without_end_has_equal_bits_on_all_ranks() -> None:
    inf, nan, tiny = float("inf"), float("nan"), 1e-45
    given = torch.tensor([[inf, -inf, nan, -0.0, tiny, 3e38, 1.0], [inf, inf, 1.0, -0.0, -tiny, 3e38, nan]])
    with shared(2) as ranks:
        found = together(ranks, lambda one: one.group.add(given[one.share.rank].clone()))
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))
    assert torch.equal(found[0], given.sum(0)) or torch.equal(found[0].isnan(), given.sum(0).isnan())
    assert torch.signbit(found[0][3]) and found[0][5] == inf


def test_a_call_of_several_dimensions_is_added_as_it_lies() -> None:
    given = parts(3, 2, torch.float32, (3, 5, 7))
    with shared(2) as ranks:
        found = together(ranks, lambda one: one.group.add(given[one.share.rank].clone()))
    assert torch.equal(found[1], in_order(given))


@pytest.mark.parametrize(("rows", "widths"), [(3, (4, 1, 6)), (0, (3, 3, 2)), (2, (0, 5, 0)), (1, (1, 1, 1))])
def test_gathered_columns_lie_in_the_order_of_ranks(rows: int, widths: tuple[int, ...]) -> None:
    blocks = [torch.randn(rows, width) for width in widths]

    def gather(one: Commons) -> torch.Tensor:
        return one.group.gather(blocks[one.share.rank], torch.empty(rows, 0 if one.share.rank else sum(widths)))

    with shared(3) as ranks:
        found = together(ranks, gather)
    assert torch.equal(found[0], torch.cat(blocks, 1)) and [got.shape for got in found[1:]] == [(rows, 0)] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gather_that_is_larger_than_a_piece_keeps_every_column(dtype: torch.dtype) -> None:
    blocks = [torch.randn(7, width).to(dtype) for width in (5, SLOT // 3, 100)]

    def gather(one: Commons) -> torch.Tensor:
        width = 0 if one.share.rank else sum(block.shape[1] for block in blocks)
        return one.group.gather(blocks[one.share.rank], torch.empty(7, width, dtype=dtype))

    with shared(3) as ranks:
        assert torch.equal(together(ranks, gather)[0], torch.cat(blocks, 1))


def test_all_ranks_have_the_words_of_the_leader() -> None:
    words = torch.arange(300_000, dtype=torch.int32)
    with shared(3) as ranks:
        found = together(
            ranks, lambda one: one.group.tell(words.clone() if one.share.leads else torch.zeros_like(words))
        )
    assert all(torch.equal(got, words) for got in found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 40, 1024, 1030])
def test_add_norm_has_the_bits_of_add_and_then_the_norm(size: int, dtype: torch.dtype) -> None:
    rows = SLOT // size // 4 if size == 1024 else 3
    given, weight, before = parts(1, 2, dtype, (rows, size)), torch.randn(size), torch.randn(rows, size).to(dtype)

    def add_norm(one: Commons) -> tuple[torch.Tensor, torch.Tensor]:
        x = before.clone()
        return one.group.add_norm(x, given[one.share.rank].clone(), weight, 1e-6), x

    with shared(2) as ranks:
        (norm, x), (other, other_x) = together(ranks, add_norm)
    assert torch.equal(norm, other) and torch.equal(x, other_x)
    by_torch = before.clone()
    wanted = plain.KERNELS.add_rms_norm(by_torch, in_order(given), weight, 1e-6)
    assert torch.equal(x, by_torch)
    torch.testing.assert_close(norm, wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    if (kernels := native.load()) is not None:
        assert torch.equal(norm, kernels.add_rms_norm(before.clone(), in_order(given), weight, 1e-6))


def step(commons: Commons, words: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """A step in small: told words, two sums, one with a norm, and a gather."""
    group = commons.group
    group.tell(words)
    y = group.add(x * (words[:1] + commons.share.rank))
    hidden = group.add_norm(x, y * 0.5, weight, 1e-6)
    group.gather(hidden.float()[:, : 3 + commons.share.rank].contiguous(), out)


@pytest.mark.parametrize("use_native", [True, False])
def test_a_recorded_step_does_its_calls_at_each_replay_and_none_while_recorded(use_native: bool) -> None:
    if cpu_native.load() is None and use_native:
        pytest.skip("no native streams")

    def run(one: Commons) -> list[torch.Tensor]:
        device = CpuDevice(1, use_native)
        words, x, weight = torch.zeros(2, dtype=torch.int32), torch.zeros(4, 24), torch.ones(24)
        out, found = torch.empty(4, 0 if one.share.rank else 7), []
        if use_native:
            with one.group.muted():
                graph = device.capture("step", step, (one, words, x, weight, out))
        for turn in range(3):
            words.fill_(turn if one.share.leads else -1)
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(turn)))
            if use_native:
                graph.launch(device.compute)
            else:
                device.compute.launch(step, one, words, x, weight, out)
            device.drain()
            found += [words.clone(), x.clone(), out.clone()]
        assert one.board.line(one.share.rank).calls == 4 * 3
        device.close()
        return found

    with shared(2) as ranks:
        leader, follower = together(ranks, run)
    for turn in range(3):
        words, x, out = leader[3 * turn : 3 * turn + 3]
        assert words.tolist() == [turn] * 2 == follower[3 * turn].tolist() and torch.equal(x, follower[3 * turn + 1])
        before = torch.randn(x.shape, generator=torch.Generator().manual_seed(turn))
        wanted = before.clone()
        y = before * turn + before * (turn + 1)
        norm = plain.KERNELS.add_rms_norm(wanted, y * 0.5 + y * 0.5, torch.ones(24), 1e-6)
        torch.testing.assert_close(x, wanted)
        torch.testing.assert_close(out, torch.cat([norm[:, :3], norm[:, :4]], 1))


def test_a_muted_call_does_nothing_and_waits_for_no_rank() -> None:
    with shared(2) as ranks:
        group = ranks[0].group
        with group.muted(), group.muted():
            assert group.add(torch.ones(3)).tolist() == [1, 1, 1]
            assert group.add_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-6).shape == (2, 4)
            group.gather(torch.ones(2, 2), torch.empty(2, 4))
            group.tell(torch.ones(3, dtype=torch.int32))
        assert ranks[0].board.line(0).calls == 0
        assert [got.tolist() for got in together(ranks, lambda one: one.group.add(torch.ones(1)))] == [[2], [2]]


# Mistakes are named.


def test_calls_that_differ_by_rank_are_named_with_both() -> None:
    with shared(2) as ranks, pytest.raises(RuntimeError, match=r"call 1 of rank \d is add of 1 rows, (8|12) bytes"):
        together(ranks, lambda one: one.group.add(torch.ones(2 + one.share.rank)))
    with shared(2) as ranks, pytest.raises(RuntimeError, match="the ranks' columns do not make up the leader's"):
        together(ranks, lambda one: one.group.gather(torch.ones(1, 3), torch.empty(1, 0 if one.share.rank else 5)))


def test_a_second_stream_is_refused_since_a_group_belongs_to_one() -> None:
    with shared(1) as ranks:
        together(ranks, lambda one: one.group.add(torch.ones(2)))
        with pytest.raises(RuntimeError, match="a second thread uses the ranks' group"):
            ranks[0].group.add(torch.ones(2))


def test_tensors_that_no_rank_can_add_are_refused() -> None:
    with shared(1) as ranks:
        group = ranks[0].group
        with pytest.raises(RuntimeError, match="contiguous"):
            group.add(torch.ones(4, 4).t()[:2])
        with pytest.raises(RuntimeError, match="float32, bfloat16, float16 and int64"):
            group.add(torch.ones(4, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="int32"):
            group.tell(torch.ones(4))
        with pytest.raises(RuntimeError, match="other shapes"):
            group.add_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(3), 1e-6)
        with pytest.raises(RuntimeError, match="other shapes"):
            group.gather(torch.ones(2, 4), torch.ones(3, 4))


def test_a_closed_memory_and_one_of_other_ranks_are_refused() -> None:
    with shared(2) as ranks:
        with pytest.raises(EngineError, match="another size than 3 ranks"):
            Commons.attach(os.dup(ranks[0].fd), Share(1, 3))
        ranks[1].close()
        ranks[1].close()
        with pytest.raises(RuntimeError, match="closed"):
            ranks[1].group.add(torch.ones(1))
        with pytest.raises(EngineError, match="closed"):
            ranks[1].ring.take()
        with pytest.raises(EngineError, match="closed"), ranks[1].group.muted():
            pass


def test_a_machine_without_a_compiler_is_told_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = build.Outcome(None, "there is no C++ compiler (g++ or clang++)", 0.0)
    monkeypatch.setattr(build, "outcomes", {"gapless_comm": reason})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .*no C\+\+ compiler.*install g\+\+"):
        Commons.create(2)


# Waits.


def test_a_wait_is_on_the_board_while_it_lasts_and_counted_afterwards() -> None:
    with shared(2) as ranks:
        thread = threading.Thread(target=lambda: ranks[0].group.add(torch.ones(1)))
        thread.start()
        since = until(lambda: ranks[1].board.line(0).waiting_since)
        begin = time.monotonic_ns()
        assert since <= begin
        time.sleep(0.02)
        waited = time.monotonic_ns() - begin
        ranks[1].group.add(torch.ones(1))
        thread.join(60)
        line = ranks[1].board.line(0)
        assert line.waited >= waited and line.waiting_since == 0 and line.calls == 1


def test_stop_ends_the_wait_of_a_program_and_fails_its_device() -> None:
    with shared(2) as ranks:
        device = CpuDevice(1)
        device.compute.launch(lambda: ranks[0].group.add(torch.ones(5)))
        until(lambda: ranks[1].board.line(0).waiting_since)
        ranks[1].group.stop()
        ranks[1].group.stop()
        with pytest.raises(DeviceError, match="the ranks were stopped"):
            device.drain()
        assert ranks[0].stopped and ranks[1].stopped
        with pytest.raises(RuntimeError, match="the ranks were stopped"):
            ranks[1].group.tell(torch.ones(1, dtype=torch.int32))
        device.close()


@pytest.mark.process
def test_stop_ends_the_wait_of_another_process() -> None:
    with alone(2) as leader, process(shared_ranks.waits, leader, 1, 2) as peer:
        until(lambda: leader.board.line(1).waiting_since)
        begin = time.monotonic_ns()
        leader.group.stop()
        ended, _, text = peer.stdout.readline().partition(" ")
        assert text == "the ranks were stopped\n"
        assert int(ended) - begin < 5e9  # about a millisecond on a free core


@pytest.mark.process
@pytest.mark.parametrize("world", sharpest([2, 3, 4]))
def test_ranks_that_are_processes_have_equal_sums(world: int) -> None:
    with alone(world) as leader, ExitStack() as stack:
        peers = [stack.enter_context(process(shared_ranks.calls, leader, rank, world)) for rank in range(1, world)]
        found = shared_ranks.mixed_calls(leader)
        assert [int(peer.stdout.readline()) for peer in peers] == [found] * (world - 1)


def stop_once_waiting(leader: Commons) -> None:
    until(lambda: leader.board.line(0).waiting_since)
    leader.group.stop()


@pytest.mark.process
def test_a_rank_that_is_killed_leaves_waits_that_stop_ends() -> None:
    with alone(2) as leader:
        with process(shared_ranks.waits, leader, 1, 2) as peer:
            until(lambda: leader.board.line(1).waiting_since)
            peer.send_signal(signal.SIGKILL)
            peer.wait()
        leader.group.add(torch.ones(9))  # its part was there
        thread = threading.Thread(target=stop_once_waiting, args=(leader,))
        thread.start()
        with pytest.raises(RuntimeError, match="the ranks were stopped"):
            leader.group.add(torch.ones(9))
        thread.join()


@pytest.mark.process
def test_a_process_that_is_forked_off_is_no_rank() -> None:
    with alone(2) as leader, process(shared_ranks.forks, leader, 1, 2) as peer:
        assert peer.stdout.readline() == "the memory of the ranks is closed\n"
