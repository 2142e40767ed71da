"""SimDevice: the contract under every mood, reproducible runs, planted races found, fairness, deadlocks named."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from device_contract import Contract
from sharpest import sharpest

from gapless.device import Device
from gapless.testing.adversary import MOODS
from gapless.testing.sim import TRACE_OPS, SimDevice

SEEDS = 40


@pytest.fixture(params=[None, *MOODS], ids=str)
def mood(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(params=sharpest(range(3)))
def device(request: pytest.FixtureRequest, mood: str | None) -> SimDevice:
    return SimDevice(request.param, mood)


class TestContract(Contract):
    pass


def ping_pong(device: SimDevice, log: list[str]) -> None:
    for i in range(30):
        device.compute.launch(log.append, f"c{i}")
        device.bulk_in.launch(log.append, f"b{i}")
        fence = device.compute.record()
        device.token_out.after(fence)
        device.token_out.launch(log.append, f"t{i}")
        if i % 7 == 0:
            fence.done()
    device.drain()


def test_the_same_seed_gives_the_same_run() -> None:
    runs = {}
    for seed in range(10):
        logs: list[list[str]] = [[], []]
        devices = [SimDevice(seed), SimDevice(seed)]
        for device, log in zip(devices, logs, strict=True):
            ping_pong(device, log)
        assert logs[0] == logs[1] and list(devices[0].trace) == list(devices[1].trace)
        assert devices[0].clock() == devices[1].clock()
        runs[seed] = tuple(logs[0])
    assert len(set(runs.values())) == 10, "every seed of these ten gives another order"


def test_the_trace_names_streams_and_operations() -> None:
    device = SimDevice(0, mood="eager")
    device.compute.launch(int)
    device.token_out.after(device.compute.record())
    device.drain()
    assert list(device.trace)[:3] == [
        ("compute", 0, "int"),
        ("compute", 1, "record"),
        ("token_out", 0, "after compute"),
    ]
    assert device.trace.maxlen == TRACE_OPS


def stage(device: Device, wait: str) -> list[int]:
    """Ten values through a staging buffer. `wait` says what is done before the buffer is written again."""
    ring = device.ring(slots=2, nbytes=8)
    landed = torch.zeros(10, 8, dtype=torch.uint8)
    early = device.compute.record()
    for i in range(10):
        while (slot := ring.acquire()) is None:
            pass
        slot.array[:] = i + 1
        device.compute.launch(device.upload, landed[i], slot.tensor)
        ring.retire(slot, device.compute.record() if wait == "copy" else early)
    device.drain()
    return landed[:, 0].tolist()


def test_a_staging_buffer_written_too_early_is_found() -> None:
    good = list(range(1, 11))
    wrong = [seed for seed in range(SEEDS) if stage(SimDevice(seed), "nothing") != good]
    # The bar is what the engine's tests rely on: a handful of seeds is enough to see a missing fence.
    assert len(wrong) >= SEEDS // 4, wrong
    assert wrong[0] < 5


def test_the_same_program_with_a_fence_is_clean_under_every_seed() -> None:
    for seed in range(SEEDS):
        assert stage(SimDevice(seed), "copy") == list(range(1, 11)), seed


def relay(device: Device, fences: tuple[bool, bool]) -> list[int]:
    """A value made on compute, read on token_out, ten times; `fences` are read-after-write and write-after-read."""
    x, seen = torch.zeros(1, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    for i in range(10):
        device.compute.launch(x.fill_, i + 1)
        if fences[0]:
            device.token_out.after(device.compute.record())
        device.token_out.launch(lambda i=i: seen[i : i + 1].copy_(x))
        if fences[1]:
            device.compute.after(device.token_out.record())
    device.drain()
    return seen.tolist()


@pytest.mark.parametrize("fences", list(itertools.product((True, False), repeat=2)), ids=str)
def test_each_missing_fence_between_streams_is_found(fences: tuple[bool, bool]) -> None:
    wrong = [seed for seed in range(SEEDS) if relay(SimDevice(seed), fences) != list(range(1, 11))]
    assert not wrong if all(fences) else len(wrong) >= SEEDS // 2, wrong


def test_every_mood_lets_polling_end_but_not_at_once(mood: str | None) -> None:
    polls = []
    for seed in range(20):
        device = SimDevice(seed, mood)
        for stream in (device.compute, device.token_out, device.bulk_in):
            stream.launch(int)
        fence = device.compute.record()
        polls.append(next(count for count in itertools.count() if fence.done()))
    assert max(polls) < 500, "fairness is bounded"
    assert max(polls) > 0, "a fence is not done only because it was recorded"


def test_a_done_fence_is_in_the_past() -> None:
    for seed in range(20):
        device = SimDevice(seed)
        device.compute.launch(int)
        fence = device.compute.record(timed=True)
        asked = device.host_now
        while not fence.done():
            asked = device.host_now
        assert asked <= fence.time() <= device.host_now, "not before the last no, not after the first yes"


def test_lazy_runs_only_what_a_wait_needs() -> None:
    device = SimDevice(0, mood="lazy")
    ran: list[str] = []
    device.bulk_out.launch(ran.append, "bulk")
    device.compute.launch(ran.append, "compute")
    device.token_out.after(device.compute.record())
    device.token_out.launch(ran.append, "token")
    assert ran == []
    device.token_out.record().wait()
    assert ran == ["compute", "token"]


def test_manual_moves_by_hand() -> None:
    device = SimDevice(0, mood="manual")
    ran: list[int] = []
    for i in range(3):
        device.compute.launch(ran.append, i)
    for _ in range(1000):
        device.clock()
    assert ran == []
    assert device.advance(2) == 2 and ran == [0, 1]
    assert device.advance(5) == 1 and ran == [0, 1, 2]


def test_a_deadlock_names_the_heads() -> None:
    other, device = SimDevice(1, mood="manual"), SimDevice(0)
    other.bulk_out.launch(int)
    device.compute.after(other.bulk_out.record())
    device.compute.launch(int)
    device.token_out.after(device.compute.record())
    fence = device.token_out.record()
    with pytest.raises(AssertionError, match="deadlock") as caught:
        fence.wait()
    text = str(caught.value)
    assert "a fence of token_out is waited for" in text
    assert "compute: after bulk_out (op 0)" in text and "token_out: after compute (op 0)" in text
    assert "bulk_in: empty" in text
    other.drain()
    fence.wait()
    assert fence.done()


def test_a_program_may_not_call_the_host_side() -> None:
    device = SimDevice(0)
    with pytest.raises(Exception, match="a program may not launch"):
        device.run(device.clock)


def test_nothing_runs_after_an_error_under_any_mood(mood: str | None) -> None:
    for seed in range(10):
        device = SimDevice(seed, mood)
        ran: list[int] = []
        device.compute.launch(ran.append, 1)
        device.compute.launch(lambda: 1 // 0)
        with contextlib.suppress(RuntimeError):
            device.compute.launch(ran.append, 2)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            device.drain()
        assert ran == [1]


def test_nothing_runs_after_an_error_in_the_same_touch() -> None:
    for program_of_the_first in (lambda: 1 // 0, int):
        device = SimDevice(0, mood="lazy")
        ran: list[int] = []
        fence = device.compute.record()
        # Both become ready with the fence, so patience with both ends at one touch.
        device.token_out.after(fence)
        device.bulk_out.after(fence)
        device.token_out.launch(program_of_the_first)
        device.bulk_out.launch(ran.append, 1)
        for _ in range(500):
            device.clock()
        assert ran == ([1] if program_of_the_first is int else [])


def test_streams_move_while_the_bell_is_waited_for() -> None:
    device = SimDevice(0, "manual")
    ran: list[int] = []
    device.bulk_in.launch(ran.append, 1)
    fence = device.bulk_in.record(timed=True)
    device.bulk_in.launch(device.bell.ring)
    assert device.bell.wait(1.0) and ran == [1]
    assert fence.done() and fence.time() <= device.host_now < 10**9, "host time has come to the ring, and no further"
    device.bell.clear()
    device.compute.launch(ran.append, 2)
    before = device.host_now
    assert not device.bell.wait(1.0) and ran == [1, 2] and device.host_now - before in range(10**9, 10**9 + 10_000)


def test_a_bell_ends_a_wait_as_soon_as_a_program_rings_it() -> None:
    device, ran = SimDevice(0, "manual"), []
    device.compute.launch(ran.append, 1)
    device.compute.launch(device.bell.ring)
    device.compute.launch(ran.append, 2)
    fence = device.compute.record()
    assert not fence.wait(device.bell) and ran == [1]
    assert not fence.wait(device.bell) and ran == [1], "until it is cleared"
    device.bell.clear()
    assert fence.wait(device.bell) and ran == [1, 2]
