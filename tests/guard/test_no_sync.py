"""Regions of no_sync: raising and recording, allow, nesting, threads, marks, reports, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_internals import open_modes

from gapless import guard
from gapless.guard import marks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def t():
    return guard.device_tensor(torch.arange(4.0))


def test_raising_stops_at_the_first_finding(t):
    with pytest.raises(guard.SyncError) as caught, guard.no_sync() as region:
        t.sum().item()
        t.tolist()
    assert caught.value.finding.what == "torch.Tensor.item"
    assert region.report.findings == [caught.value.finding]


def test_recording_counts_by_site(t):
    with guard.no_sync(mode="record") as region:
        for _ in range(3):
            t.tolist()
        t.cpu()
    (where, three), (_, one) = region.report.counts.items()
    assert (three, one) == (3, 1)
    assert where.startswith("tests/guard/test_no_sync.py:")
    assert [f.rule for f in region.report.findings] == ["host-read", "copy-to-host"]
    text = region.report.text()
    assert "3 times" in text and text.endswith("4 reports at 2 sites, 0 sites allowed")


def test_the_site_is_the_callers_line_and_the_stack_goes_outwards(t):
    def helper():
        return t.item()

    with guard.no_sync(mode="record") as region:
        t = t[:1]
        helper()
    stack = region.report.findings[0].stack
    assert [frame.function.split(".")[-1] for frame in stack[:2]] == ["helper", stack[1].function]
    assert stack[1].line == stack[0].line + 4


def test_allow_needs_a_reason_and_is_counted(t):
    with guard.no_sync() as region, guard.allow("the answer is wanted now"):
        t.tolist()
    assert not region.report
    (entry,) = region.report.entries()
    assert (entry.excuse, entry.count) == ("the answer is wanted now", 1)
    assert "allowed 1 time(s): the answer is wanted now" in region.report.text()
    with pytest.raises(ValueError, match="reason"), guard.allow("  "):
        pass
    with guard.allow("outside of any region it is nothing"):
        t.tolist()


def test_allow_ends_with_its_block(t):
    with guard.no_sync() as region:
        with guard.allow("once"):
            t.tolist()
        with pytest.raises(guard.SyncError):
            t.tolist()
    assert len(region.report.findings) == 1


def test_overlapping_sections_of_coroutines_end_with_themselves(t):
    async def section(seconds):
        with guard.allow("open here"):
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(section(0), section(0.02))

    with guard.no_sync(mode="record") as region:
        asyncio.run(both())
        t.tolist()
    assert [entry.excuse for entry in region.report.entries()] == [None]


def test_a_section_is_open_in_its_task_and_in_tasks_made_inside_while_it_lasts(t):
    async def reads(when):
        await when.wait()
        t.tolist()

    def elsewhere():
        with region:
            t.numpy()

    async def waits(begun, go, ended):
        with guard.allow("inside"):
            begun.set()
            await go.wait()
            await asyncio.create_task(reads(go))
            await asyncio.to_thread(elsewhere)
            later = asyncio.create_task(reads(ended))
        ended.set()
        await later

    async def main():
        begun, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(waits(begun, go, ended))
        await begun.wait()
        t.sum().item()  # while the section of the other task is open
        go.set()
        await task

    with guard.no_sync(mode="record") as region:
        asyncio.run(main())
    found = [(entry.finding.what.rpartition(".")[2], entry.excuse) for entry in region.report.entries()]
    assert found == [("item", None), ("tolist", "inside"), ("numpy", None), ("tolist", None)]


def test_sections_of_generators_end_in_any_order_and_in_any_context(t):
    def section(reason):
        with guard.allow(reason):
            yield

    with guard.no_sync(mode="record") as region:
        first, second = section("first"), section("second")
        next(first), next(second)
        first.close()
        t.tolist()
        contextvars.copy_context().run(second.close)
        t.cpu()
    assert [entry.excuse for entry in region.report.entries()] == ["second", None]


def test_a_comment_allows_its_line(t):
    with guard.no_sync() as region:
        t.tolist()  # san: ok(shown to a person)
    assert [entry.excuse for entry in region.report.entries()] == ["shown to a person"]


def test_a_comment_without_a_reason_allows_nothing(t):
    with pytest.raises(guard.SyncError), guard.no_sync():
        t.tolist()  # san: ok( )


def test_regions_nest_and_the_inner_one_decides(t):
    with guard.no_sync() as outer:
        with guard.no_sync(mode="record") as inner:
            t.tolist()
        with pytest.raises(guard.SyncError):
            t.cpu()
    assert [f.rule for f in inner.report.findings] == ["host-read"]
    assert [f.rule for f in outer.report.findings] == ["copy-to-host"]


def test_a_decorated_function_is_a_region_each_time(t):
    region = guard.no_sync(mode="record")

    @region
    def total(depth: int) -> float:
        """Adds."""
        return total(depth - 1) if depth else t.sum().item()

    assert total(2) == 6.0 and total(0) == 6.0
    assert total.__doc__ == "Adds."
    assert sum(region.report.counts.values()) == 2


def test_coroutines_cannot_be_decorated():
    async def nothing() -> None: ...

    with pytest.raises(TypeError, match="coroutine"):
        guard.no_sync()(nothing)


def test_an_unknown_mode_and_a_wrong_tensor_are_refused():
    with pytest.raises(ValueError, match="raise"):
        guard.no_sync(mode="warn")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got int"):
        guard.no_sync(device_tensors=[1])


def test_a_region_belongs_to_its_thread(t):
    seen = []

    def other():
        seen.append(t.tolist())
        with pytest.raises(guard.SyncError), guard.no_sync():
            t.tolist()

    with guard.no_sync() as region:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen and not region.report


def test_one_region_on_many_threads_counts_all(t):
    region = guard.no_sync(mode="record")

    @region
    def read():
        t.tolist()

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(region.report.counts.values()) == 8


def test_an_error_of_the_program_goes_through(t):
    with pytest.raises(ZeroDivisionError), guard.no_sync():
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="shape"), guard.no_sync():
        t.view(7)


def test_after_no_sync_everything_is_as_before(t):
    def state():
        return (
            open_modes(), list(gc.callbacks),
            torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.Tensor.to, torch.Tensor.item,
            list(warnings.filters), warnings.showwarning, threading.Thread.start,
        )  # fmt: skip

    before = state()
    with guard.no_sync():
        assert state() != before
    assert state() == before
    with pytest.raises(guard.SyncError), guard.no_sync():
        t.tolist()
    assert state() == before


@pytest.mark.process
def test_the_import_changes_nothing_and_a_region_does_not_load_the_compiler():
    code = (
        "import torch, gc, sys; f = (torch.cuda.synchronize, torch.Tensor.to, list(gc.callbacks))\n"
        "from gapless import guard; guard.no_sync; guard.device_tensor(torch.zeros(2))\n"
        "assert f == (torch.cuda.synchronize, torch.Tensor.to, list(gc.callbacks))\n"
        "assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0\n"
        "with guard.no_sync(device_tensors=lambda t: True): torch.zeros(2) + 1\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# Marks.


def test_marks_follow_storage_and_results(t):
    with guard.no_sync() as region:
        made = (t[1:], t.view(2, 2), t + 1, torch.stack((t, t))[0], t.split(2)[1], t.long(), t.new_zeros(2))
        more = (torch.zeros(2, device=t.device), torch.where(t > 0, t, 1.0), t.clone(), t.detach().reshape(-1))
        free = (torch.zeros(2), torch.tensor([1.0]), torch.from_numpy(np.ones(2)))
    assert all(x in marks.DEVICE_TENSORS for x in (*made, *more))
    assert not any(x in marks.DEVICE_TENSORS for x in free)
    assert not region.report


def test_marks_die_with_their_storage(t):
    gc.collect()

    def living() -> int:
        return sum(ref() is not None for ref in marks.DEVICE_TENSORS.refs.values())

    before = living()
    extra = guard.device_tensor([torch.zeros(3) for _ in range(50)])
    assert living() == before + 50
    view = extra[0][1:]
    del extra
    assert living() == before + 1 and view in marks.DEVICE_TENSORS


def test_a_copy_on_the_host_is_a_host_tensor(t):
    with guard.no_sync(mode="record") as region:
        copies = (t.cpu(), t.to("cpu"), t.type(torch.FloatTensor))
        before = sum(region.report.counts.values())
        for copy in copies:
            copy.tolist()
            copy[0] = 9
    assert before == 3 and sum(region.report.counts.values()) == 3
    assert t[0] == 0, "a copy has memory of its own"


def test_a_tensor_for_another_device_is_played_by_the_cpu():
    host = torch.ones(2)
    with guard.no_sync(mode="record") as region:
        a = torch.zeros(2, device="cuda")
        b = host.to(a.device)
        c = host.to("cuda:0", torch.float64)
        layer = torch.nn.Linear(2, 2).to("cuda")
        out = layer(a)
    assert all(x in marks.DEVICE_TENSORS for x in (a, b, c, out, layer.weight)) and host not in marks.DEVICE_TENSORS
    assert {f.rule for f in region.report.findings} == {"upload"}
    b.zero_()
    assert host.tolist() == [1.0, 1.0]


def test_the_device_of_a_marked_tensor_is_none_of_the_hosts(t):
    with guard.no_sync():
        assert t.device == torch.zeros(1, device=t.device).device
        assert t.device != torch.zeros(1).device and t.device.type == "cpu"
    assert t.device == torch.device("cpu")


def test_a_predicate_names_device_tensors():
    host, device = torch.zeros(3), torch.zeros(4)
    with guard.no_sync(device_tensors=lambda x: x.shape[:1] == (4,)):
        host.tolist()
        with pytest.raises(guard.SyncError):
            device.tolist()


def test_modules_and_containers_are_marked_whole():
    module, more = torch.nn.BatchNorm1d(2), {"a": [torch.zeros(1)], "b": None}
    guard.device_tensor([module, more])
    assert all(x in marks.DEVICE_TENSORS for x in (module.weight, module.running_mean, more["a"][0]))


def test_opaque_tensors_are_marked_themselves():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN, so there is no opaque CPU layout to mark")
    opaque = torch.zeros(4).to_mkldnn()
    guard.device_tensor(opaque)
    assert opaque in marks.DEVICE_TENSORS


def test_a_read_that_follows_a_dropped_sum_is_not_called_a_size(t):
    """What is read may have the id that the sum's storage had."""
    with guard.no_sync(mode="record") as region:
        for _ in range(50):
            t.sum()
            (t[0] + 1).item()
    assert {entry.finding.rule for entry in region.report.entries()} == {"host-read"}


def test_checks_that_only_a_cpu_makes_are_no_findings(t):
    with guard.no_sync():
        torch.nn.functional.one_hot(t.long(), 4)
        torch.quantile(t, 0.5)
    with pytest.raises(guard.SyncError), guard.no_sync():
        torch.nn.functional.one_hot(t.long())


def test_composites_are_taken_apart_in_inference_mode(t):
    with torch.inference_mode(), guard.no_sync(mode="record") as region:
        torch.ops.aten.where(t > 1)
        torch.ops.aten.item(t[0])
        torch.ops.aten.isclose(t, t)
    assert [f.rule for f in region.report.findings] == ["data-size", "host-read"]


def test_gradients_of_backward_are_marked_as_device_tensors(t):
    weight = torch.ones(4, requires_grad=True)
    guard.device_tensor(weight)
    with guard.no_sync():
        (weight * t).sum().backward()
        assert weight.grad in marks.DEVICE_TENSORS
