"""Memory that changes hands without an operator: resized and replaced storages, and what graphs use by its address."""

from __future__ import annotations

import gc

import pytest
import torch

from gapless import guard
from gapless.guard.emulate import emulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def races_of(program, *args) -> list[str]:
    """Return what the races of a program are about."""
    with emulated_cuda(), guard.no_sync(mode="record"), guard.no_race("record", track="all") as checker:
        program(*args)
        gc.collect()
    return [f"{race.second.verb}: {race.missing}" for race in checker.races]


def gives_back(how: str, order: str) -> None:
    """Free memory that a side stream reads, by another way than the end of its tensor."""
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        x * 2
    if order == "record_stream":
        x.record_stream(side)
    if how == "resize":
        x.untyped_storage().resize_(0)
    elif how == "typed":
        x.storage().resize_(0)
    elif how == "data":
        x.data = torch.empty(0, device="cuda")
    elif how == "set":
        x.set_(torch.empty(0, device="cuda"))
    if order == "wait":
        compute.wait_stream(side)
    torch.zeros(1000, device="cuda")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("how", ["resize", "typed", "data", "set"])
def test_memory_given_back_before_its_tensor_ends_is_reused_too_early(how):
    (race,) = races_of(gives_back, how, "")
    assert race.startswith("reuses the memory of"), race
    assert races_of(gives_back, how, "wait") == races_of(gives_back, how, "record_stream") == []


def test_a_regrown_storage_is_new_memory_of_the_current_stream():
    def program(stream_waits: bool) -> None:
        side = torch.cuda.Stream()
        x = torch.ones(1000, device="cuda")
        storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
        storage.resize_(0)
        with torch.cuda.stream(side):
            storage.resize_(size)
            x.fill_(1)  # what the default stream did was with other memory
        if stream_waits:
            torch.cuda.current_stream().wait_stream(side)
        x.add_(1)

    assert races_of(program, True) == []
    assert len(races_of(program, False)) == 1


def capture(work, pool=None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = work()
    return graph, out


def test_replays_of_one_graph_follow_each_other_on_any_streams():
    def program() -> None:
        x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
        graph, _ = capture(lambda: x * 2)
        side.wait_stream(torch.cuda.current_stream())
        for stream in (side, torch.cuda.default_stream(), side):
            with torch.cuda.stream(stream):
                graph.replay()

    assert races_of(program) == []


def test_a_replay_takes_no_memory_of_the_stream():
    def program() -> None:
        side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
        graph, _ = capture(lambda: x * 2)
        y = torch.ones(1000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y * 2
        del y
        graph.replay()
        torch.cuda.current_stream().wait_stream(side)

    assert races_of(program) == []


@pytest.mark.parametrize("shared, ordered, races", [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_graphs_of_one_pool_have_to_be_replayed_in_order(shared, ordered, races):
    def program() -> None:
        x, y, side = torch.ones(8, device="cuda"), torch.ones(8, device="cuda"), torch.cuda.Stream()
        one, _ = capture(lambda: x * 2)
        other, _ = capture(lambda: y * 2, one.pool() if shared else None)
        side.wait_stream(torch.cuda.current_stream())
        one.replay()
        if ordered:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.replay()

    found = races_of(program)
    assert len(found) == races and all("memory of graph pool" in race for race in found), found


def freed_after_capture(what: str) -> None:
    x, weight = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    view = weight[2:]

    def step() -> torch.Tensor:
        middle = x * weight
        return middle[2:] + view

    graph, out = capture(step)
    again, _ = capture(lambda: x + weight)
    if what == "weight":
        del weight, view
    elif what == "replaced":
        weight.data, view = torch.zeros(8, device="cuda"), None
    elif what == "kept by a view":
        del weight
    elif what == "result":
        del out
    elif what == "other graph":
        graph.reset()
        del graph, weight, view
        x.add_(1)
        again.replay()
        return
    graph.replay()
    del again


@pytest.mark.parametrize(
    "what, races", [("", 0), ("weight", 1), ("replaced", 1), ("kept by a view", 0), ("result", 0), ("other graph", 1)]
)
def test_a_replay_that_uses_memory_freed_after_its_capture_is_found(what, races):
    found = races_of(freed_after_capture, what)
    assert len(found) == races and all("freed after the graph was captured" in race for race in found), found


@pytest.mark.parametrize("pool_lives", [True, False])
def test_memory_of_a_graphs_pool_lives_as_long_as_the_pool(pool_lives):
    def program() -> None:
        x = torch.ones(8, device="cuda")
        first, middle = capture(lambda: x * 2)
        kept = [middle]
        second, _ = capture(lambda: kept[0] + 1)
        kept.clear()
        del middle
        if not pool_lives:
            first.reset()
        second.replay()

    assert len(races_of(program)) == (0 if pool_lives else 1)
