"""The catalogue on real CUDA tensors: what no_sync says of each form, held against torch's own sync debug mode."""

from __future__ import annotations

import pytest
import torch
from guard.test_sync_rules import CASES, Case, names, world_on

from gapless import guard

TORCH_ROWS = range(1, 12)
"""Rows of the catalogue that torch's debug mode is said to flag."""
ONLY_OURS = ("host-operand",)
"""Rules of which torch says nothing, or not in every release."""

REFUSED = {("copy-to-host", 1), ("copy-to-host", 2), ("device-split", 0)}
"""Forms, by rule and place in its list, that a CUDA tensor refuses by itself: numpy(), numpy.asarray, tensor_split."""


def place(case: Case) -> tuple[str, int]:
    return case.rule, [other for other in CASES if other.rule == case.rule].index(case)


REAL = [case for case in CASES if case.rule not in ONLY_OURS and place(case) not in REFUSED]


@pytest.fixture
def world():
    return world_on("cuda", pinned=True)


@pytest.fixture
def strict():
    """Torch raises on what it knows to synchronise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", REAL, ids=names)
def test_the_bad_form_is_caught(world, case: Case):
    with guard.no_sync(mode="record", slow_ms=0) as region:
        case.bad(world)
    found = [f.rule for f in region.report.findings if f.rule != "allocator-growth"]
    # An index that is no tensor reaches the device inside torch, whose own word for it is the general one.
    general = ["device-sync"] if case.rule == "index-by-host" else []
    # An index of the host's is uploaded inside of torch.
    inner = ["upload", case.rule] if case.rule == "index-by-host" else []
    # Inside torch, the size of a sparse tensor is a copy besides.
    sized = ["host-size", "copy-to-host"] if case.rule == "host-size" else []
    assert found in ([case.rule], general, inner, sized), region.report.text()


@pytest.mark.parametrize("case", REAL, ids=names)
def test_the_good_form_passes(world, case: Case):
    case.good(world)  # what it needs is allocated and loaded now
    torch.cuda.synchronize()
    with guard.no_sync(slow_ms=0):
        case.good(world)


@pytest.mark.parametrize("case", [c for c in REAL if c.row in TORCH_ROWS and c.rule not in ONLY_OURS], ids=names)
def test_torch_agrees_that_the_bad_form_waits(world, strict, case: Case):
    with pytest.raises(RuntimeError, match="synchronizing"):
        case.bad(world)


@pytest.mark.parametrize("case", REAL, ids=names)
def test_torch_agrees_that_the_good_form_does_not(world, strict, case: Case):
    case.good(world)


@pytest.mark.parametrize("case", [case for case in CASES if place(case) in REFUSED], ids=names)
def test_torch_refuses_the_form_by_itself(world, case: Case):
    with pytest.raises((TypeError, RuntimeError)):
        case.bad(world)


HOOKS = {
    "event.synchronize": ("event-wait", lambda x, event: event.synchronize()),
    "cuda.synchronize": ("stream-wait", lambda x, event: torch.cuda.synchronize()),
    "stream.synchronize": ("stream-wait", lambda x, event: torch.cuda.current_stream().synchronize()),
    "empty_cache": ("empty-cache", lambda x, event: torch.cuda.empty_cache()),
    "growth": ("allocator-growth", lambda x, event: torch.empty(1 << 28, device="cuda")),
    "item": ("host-read", lambda x, event: x[0].item()),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_real_entry_point_that_waits_is_refused(name):
    rule, call = HOOKS[name]
    x = torch.zeros(1 << 20, device="cuda")
    event = torch.cuda.Event()
    event.record()
    torch.cuda.empty_cache()  # what earlier tests left would serve the allocation without growth
    with pytest.raises(guard.SyncError) as caught, guard.no_sync(slow_ms=0):
        call(x, event)
    assert caught.value.finding.rule == rule
    assert torch.cuda.get_sync_debug_mode() == 0
