"""The CUDA half of no_sync, with the entry points of torch.cuda played by fakes."""

from __future__ import annotations

import gc
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch_internals import operators

from gapless import guard
from gapless.guard import marks, sync_calls, sync_waits
from gapless.guard.backends import KINDS_OF_DEVICES

WAITS = (*KINDS_OF_DEVICES["cuda"].all_waits(), ("torch.accelerator", "synchronize", "stream-wait"))
MESSAGE = "called a synchronizing CUDA operation"


def blocking() -> None:
    """What torch does in a call that synchronises while the debug mode is warn."""
    if torch.cuda.get_sync_debug_mode():
        warnings.warn(MESSAGE, UserWarning, stacklevel=2)


@pytest.fixture
def cuda(monkeypatch) -> Any:
    """A fake CUDA: the debug mode, the allocators' counters, and which waits were really made."""
    state = SimpleNamespace(mode=0, device=10, host=5, waits=[])

    def set_mode(mode: Any) -> None:
        state.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def waiting(name: str) -> Any:
        def wait(*args: Any) -> str:
            blocking()
            state.waits.append(name)
            return name

        return wait

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": state.device})
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"num_host_alloc": state.host})
    for path, name, _ in WAITS:
        monkeypatch.setattr(sync_waits.owner_of(path), name, waiting(name), raising=False)
    return state


def test_torchs_own_warning_becomes_a_finding_of_this_thread(cuda):
    with pytest.raises(guard.SyncError) as caught, guard.no_sync():
        assert cuda.mode == 1
        blocking()
    assert caught.value.finding.rule == "device-sync"
    assert caught.value.finding.site.file == __file__
    assert cuda.mode == 0


def test_a_wait_is_counted_every_time(cuda):
    with guard.no_sync(mode="record") as region:
        for _ in range(3):
            blocking()
    assert list(region.report.counts.values()) == [3]


def test_other_threads_are_left_alone(cuda):
    """They neither raise nor are they reported, although the debug mode is the process's."""
    heard = []

    def other():
        try:
            blocking()
            torch.cuda.synchronize()
            heard.append("done")
        except BaseException as error:
            heard.append(error)

    with guard.no_sync() as region:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert heard == ["done"] and cuda.waits == ["synchronize"] and not region.report


def test_the_mode_stays_while_any_thread_is_inside(cuda):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with guard.no_sync():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with guard.no_sync():
        thread.start()
        assert inside.wait(20)
    assert cuda.mode == 1
    leave.set()
    thread.join()
    assert cuda.mode == 0


def test_the_users_own_mode_comes_back(cuda):
    cuda.mode = 2
    with guard.no_sync():
        assert cuda.mode == 1
    assert cuda.mode == 2


def test_filters_that_a_test_runner_resets_are_put_back(cuda):
    with warnings.catch_warnings():
        with guard.no_sync(mode="record") as outer:
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            with guard.no_sync(mode="record") as inner:
                blocking()
        assert not outer.report and [f.rule for f in inner.report.findings] == ["device-sync"]


def test_other_warnings_go_on(cuda):
    with pytest.warns(UserWarning, match="something else"), guard.no_sync():
        warnings.warn("something else", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: torch.cuda.synchronize(), "stream-wait"),
        (lambda: torch.accelerator.synchronize(), "stream-wait"),
        (lambda: torch.cuda.Stream.synchronize(None), "stream-wait"),
        (lambda: torch.cuda.Event.synchronize(None), "event-wait"),
        (lambda: torch.cuda.empty_cache(), "empty-cache"),
        (lambda: torch.cuda.CUDAGraph.capture_begin(None), "graph-capture"),
    ],
)
def test_waits_are_found_once_before_they_happen(cuda, call, rule):
    with pytest.raises(guard.SyncError) as caught, guard.no_sync():
        call()
    assert caught.value.finding.rule == rule and cuda.waits == []
    with guard.no_sync(mode="record") as region:
        call()
    assert [f.rule for f in region.report.findings] == [rule], "the warning inside is the same wait"
    assert len(cuda.waits) == 1
    with guard.no_sync() as region, guard.allow("drain at the end"):
        call()
    assert not region.report


def test_a_few_queries_are_fine_and_a_loop_of_them_is_not(cuda):
    cuda.mode = 0
    torch.cuda.Event.query = lambda event: True
    with guard.no_sync():
        for _ in range(sync_waits.POLLS_ALLOWED):
            torch.cuda.Event.query(None)
    with guard.no_sync(mode="record") as region:
        for _ in range(3 * sync_waits.POLLS_ALLOWED):
            torch.cuda.Event.query(None)
    assert [(f.rule, n) for f, n in zip(region.report.findings, region.report.counts.values(), strict=True)] == [
        ("event-poll", 1)
    ]


@pytest.mark.parametrize("kind", ["device", "host"])
def test_allocator_growth_is_found_when_the_region_ends(cuda, kind):
    with pytest.raises(guard.SyncError, match="allocator-growth"), guard.no_sync():
        setattr(cuda, kind, 77)
    with guard.no_sync():
        pass


def test_growth_does_not_hide_the_programs_error(cuda):
    region = guard.no_sync()
    with pytest.raises(ZeroDivisionError), region:
        cuda.device += 1
        _ = 1 / 0
    assert [f.rule for f in region.report.findings] == ["allocator-growth"]


def test_everything_is_unpatched_afterwards(cuda):
    before = [getattr(sync_waits.owner_of(path), name) for path, name, _ in WAITS]
    filters, show = list(warnings.filters), warnings.showwarning
    with guard.no_sync():
        assert [getattr(sync_waits.owner_of(path), name) for path, name, _ in WAITS] != before
    assert [getattr(sync_waits.owner_of(path), name) for path, name, _ in WAITS] == before
    assert (list(warnings.filters), warnings.showwarning) == (filters, show)


def test_collectives_of_objects_are_reported_as_waits(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: calls.append("barrier"))
    with guard.no_sync(mode="record") as region:
        torch.distributed.barrier()
    assert [f.rule for f in region.report.findings] == ["collective"] and calls == ["barrier"]
    torch.distributed.barrier()
    assert sum(region.report.counts.values()) == 1


# Time limits, which need no CUDA.


def test_a_call_that_takes_long(monkeypatch):
    clock = iter(range(0, 10**12, 3_000_000))  # every reading is 3 ms after the one before
    monkeypatch.setattr(sync_calls, "time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    monkeypatch.setattr(sync_waits, "time", SimpleNamespace(perf_counter_ns=lambda: 0))  # no collection takes long
    x = torch.zeros(2)
    with pytest.raises(guard.SyncError, match=r"slow-call(.|\n)*3.00 ms"), guard.no_sync(slow_ms=2.0):
        x + 1
    with guard.no_sync(slow_ms=4.0):
        x + 1
    with guard.no_sync(slow_ms=0):
        x + 1


@pytest.fixture
def jitted(monkeypatch) -> Any:
    """An operator that is compiled at its first call for each number of dimensions, which takes 30 ms of a clock."""
    clock = SimpleNamespace(now=0)
    compiled = set()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.dim() not in compiled:
            compiled.add(x.dim())
            clock.now += 30_000_000
        return x + 1

    for module in (sync_calls, sync_waits):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: clock.now))
    with operators("gapless_test") as library:
        library.define("jitted(Tensor x) -> Tensor")
        library.impl("jitted", kernel, "CompositeExplicitAutograd")
        yield torch.ops.gapless_test.jitted


def test_a_compile_within_a_region_is_reported_and_a_warmed_call_is_not(jitted):
    """Row 19 of the catalogue. The compile is played: the finding is that of any call that only should enqueue."""
    row, grid = torch.zeros(2), torch.zeros(2, 2)
    jitted(row)
    with pytest.raises(guard.SyncError, match=r"slow-call(.|\n)*30.00 ms") as caught, guard.no_sync(slow_ms=1.0):
        jitted(row)  # warmed
        jitted(grid)  # another variant
    assert "compiled" in caught.value.finding.why and caught.value.finding.site.file == __file__
    with guard.no_sync(slow_ms=1.0):
        jitted(row)
        jitted(grid)


def test_a_long_garbage_collection_is_reported(monkeypatch):
    with guard.no_sync(mode="record", slow_ms=1e-6) as region:
        gc.collect()
    assert [f.rule for f in region.report.findings] == ["gc-pause"]
    assert "generation 2" in region.report.text()
    with guard.no_sync(slow_ms=60_000):
        gc.collect()


class Uploading(TorchFunctionMode):
    """Plays the upload of an index: torch's own, past all modes, with its warning."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        blocking()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("index", [[0, 2], np.array([0, 2]), ([0, 2], slice(1))], ids=["list", "array", "tuple"])
def test_an_index_of_host_data_is_one_finding_though_torch_warns_of_its_upload(cuda, monkeypatch, index):
    monkeypatch.setattr(marks, "has_accelerator", lambda: True)
    x = torch.zeros(4, 4)
    with Uploading(), guard.no_sync(device_tensors=[x], mode="record", slow_ms=0) as region:
        x[index]
        x[index] = x[index]
    assert [finding.rule for finding in region.report.findings] == ["index-by-host"] * 2
