"""The allocator of the fake accelerator: segments that are counted, memory that comes back, and pools of graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gapless.testing import fake

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    fake.load()
    gc.collect()  # engines of earlier tests, whose parts refer to each other
    torch.fake.empty_cache()
    yield
    fake.hold(False)
    fake.delays(None)
    fake.synchronize()


LIBRARY = torch.library.Library("fake_memory_test", "FRAGMENT")


def define(name: str, kernel: Callable[[Tensor], None]) -> None:
    """Make an operator of the host's code, which runs when the stream gets there."""
    LIBRARY.define(f"{name}(Tensor(a!) x) -> ()")
    LIBRARY.impl(name, kernel, "CPU")


def taken() -> int:
    """Segments that the allocator has, by its counts of calls; the same by its gauge."""
    stats = torch.accelerator.memory_stats()
    count = int(stats["num_device_alloc"] - stats["num_device_free"])
    assert count == stats["segment.all.current"]
    return count


def test_calls_of_the_driver_are_counted_by_whole_segments() -> None:
    before, reserved = taken(), torch.accelerator.memory_reserved()
    tensors = [torch.empty(1 << 18, device="fake") for _ in range(8)]  # two in each segment of 2 MiB
    held = taken()
    assert held - before == 4 and torch.accelerator.memory_reserved() - reserved == 8 << 20
    del tensors[1::2]
    torch.fake.empty_cache()
    assert taken() == held, "a part of a segment was given back"
    del tensors[1:]
    torch.fake.empty_cache()
    assert taken() == before + 1
    del tensors
    torch.fake.empty_cache()
    assert taken() == before and torch.accelerator.memory_reserved() == reserved


def test_large_blocks_that_are_freed_side_by_side_stay_segments_of_their_own() -> None:
    before = taken()
    large = [torch.empty(11 << 20, dtype=torch.uint8, device="fake") for _ in range(3)]
    del large
    torch.fake.empty_cache()
    assert taken() == before


def test_a_stream_that_is_busy_again_keeps_no_memory_that_was_freed_before() -> None:
    side, late = sorted((torch.Stream("fake"), torch.Stream("fake")), key=lambda stream: stream.stream_id)
    x, y = torch.zeros(4, device="fake"), torch.zeros(4, device="fake")
    reserved = torch.accelerator.memory_reserved()
    with side:
        torch.empty(20 << 20, dtype=torch.uint8, device="fake")
    assert torch.accelerator.memory_reserved() == reserved + (20 << 20)

    def launch_on_side(_: Tensor) -> None:
        with side:
            y.add_(1)

    define("launch", launch_on_side)
    fake.hold(True)  # work runs when it is waited for: `launch` once `side` has been
    with late:
        torch.ops.fake_memory_test.launch(x)
    torch.fake.empty_cache()
    assert not side.query() and torch.accelerator.memory_reserved() == reserved


def test_memory_of_a_graph_is_not_overwritten_when_its_result_is_freed() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def meet(_: Tensor) -> None:
        meeting.wait()  # the replay is between two kernels
        meeting.wait()

    define("meet", meet)
    graph, stream = fake.Graph(), torch.Stream("fake")
    x, z = torch.ones(1000, device="fake"), torch.zeros(1000, device="fake")
    fake.synchronize()
    with stream:
        graph.capture_begin()
        y = x * 2
        torch.ops.fake_memory_test.meet(z)
        z.copy_(y)
        graph.capture_end()
    other = torch.Stream("fake")
    with other:
        graph.replay()
    meeting.wait()
    del y
    meeting.wait()
    other.synchronize()
    assert bool((z == 2).all())
