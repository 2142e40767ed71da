"""Every row of the catalogue of hidden syncs: the bad form is caught by its rule in its line, the good one passes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sharpest import sharpest
from torch import Tensor
from torch.linalg import lstsq
from torch.nn.functional import ctc_loss, one_hot

from gapless import guard
from gapless.guard import pinned_allocs
from gapless.guard.mends import mend
from gapless.guard.sync_rules import RULES

CUDA = "cuda"
"""Played by the CPU where there is none."""


class World(NamedTuple):
    """Tensors of a step: on the device unless the name says otherwise."""

    x: Tensor
    """float [6]"""
    grid: Tensor
    """float [4, 3]"""
    index: Tensor
    """int64 [2]"""
    mask: Tensor
    """bool [6]"""
    count: Tensor
    """int64 scalar"""
    host: Tensor
    """float [6] in host memory"""
    host_index: Tensor
    ring: Tensor
    """float [12], pinned"""
    back: Tensor
    """float [6], pinned"""


def world_on(device: str, pinned: bool) -> World:
    x, index, host = torch.arange(6.0, device=device), torch.tensor([1, 2]), torch.zeros(6)
    ring, back = (torch.zeros(size, pin_memory=pinned) for size in (12, 6))
    on_device = (torch.ones(4, 3), index, x > 2, torch.tensor(2))
    return World(x, *(tensor.to(device, copy=True) for tensor in on_device), host, index, ring, back)


@pytest.fixture
def world():
    w = world_on("cpu", pinned=False)
    guard.device_tensor([w.x, w.grid, w.index, w.mask, w.count])
    guard.pinned_tensor([w.ring, w.back])
    return w


class Case(NamedTuple):
    row: int
    rule: str
    bad: Callable[[World], Any]
    good: Callable[[World], Any]


def assign(tensor: Tensor, index: Any, value: Any) -> None:
    tensor[index] = value


def branch(w: World) -> None:
    if w.x.sum() > 0:
        w.x.zero_()


def plan_attention(lengths: Tensor) -> list[int]:
    """As libraries of kernels plan: on the host, from lengths that should be there already."""
    starts: list[int] = lengths.to("cpu").cumsum(0).tolist()
    return starts


def square(w: World) -> Tensor:
    """A matrix that has an inverse and a root."""
    return w.grid[:3] + 4 * torch.diag_embed(w.grid[0])


CASES = [
    # 1: reads on the host
    Case(1, "host-read", lambda w: w.x[0].item(), lambda w: torch.where(w.x[0] > 0, w.x, 0.0)),
    Case(1, "host-read", lambda w: w.x.tolist(), lambda w: w.x.clamp(min=0)),
    Case(1, "host-read", lambda w: int(w.count), lambda w: w.count + 1),
    Case(1, "host-read", lambda w: float(w.x[1]), lambda w: w.x[1].double()),
    Case(1, "host-read", lambda w: bool(w.mask.all()), lambda w: w.mask.all()),
    Case(1, "host-read", branch, lambda w: w.x.mul_(w.x.sum() <= 0)),
    Case(1, "host-read", lambda w: repr(w.x), lambda w: repr(w.x.shape)),
    Case(1, "host-read", lambda w: f"{w.count}", lambda w: f"{w.x.dtype}"),
    Case(1, "host-read", lambda w: torch.equal(w.x, w.x + 0), lambda w: (w.x == w.x + 0).all()),
    Case(1, "host-read", lambda w: torch.allclose(w.x, w.x), lambda w: torch.isclose(w.x, w.x).all()),
    Case(1, "host-read", lambda w: torch.is_nonzero(w.count), lambda w: w.count != 0),
    Case(1, "host-read", lambda w: 3.0 in w.x, lambda w: (w.x == 3.0).any()),
    Case(1, "host-read", lambda w: max(w.x[0], w.x[1]), lambda w: torch.maximum(w.x[0], w.x[1])),
    Case(1, "host-read", lambda w: torch.full((2,), w.x[0]), lambda w: w.x[:1].expand(2)),
    Case(1, "host-read", lambda w: w.x.masked_fill_(w.mask, w.x[0]), lambda w: w.x.masked_fill_(w.mask, 1.0)),
    Case(1, "host-read", lambda w: w.x.index_fill_(0, w.index, w.x[0]), lambda w: w.x.index_fill_(0, w.index, 1.0)),
    Case(1, "host-read", lambda w: [v for v in w.index.unbind() if v > 1], lambda w: list(w.index.unbind())),
    Case(1, "host-read", lambda w: sorted(range(3), key=lambda row: w.x[row]), lambda w: w.x.argsort()),
    Case(1, "host-read", lambda w: torch.linspace(0, w.x[1], 3), lambda w: w.x[1] * w.x.new_ones(3).cumsum(0)),
    Case(1, "host-read", lambda w: torch.logspace(w.x[1], 2, 3), lambda w: w.x[1].pow(w.x[:3])),
    # 2: sizes
    Case(1, "host-read", lambda w: torch.tensor([w.x[0], 2.0]), lambda w: torch.stack([w.x[0], w.x[1]])),
    Case(1, "host-read", lambda w: torch.tensor([[w.x[0]]], device=CUDA), lambda w: w.x[:1].view(1, 1).clone()),
    Case(1, "host-read", lambda w: w.x.new_tensor([w.x[0]]), lambda w: w.x[:1].clone()),
    Case(1, "host-read", lambda w: torch.linalg.inv(square(w)), lambda w: torch.linalg.inv_ex(square(w))),
    Case(1, "host-read", lambda w: torch.linalg.cholesky_ex(square(w), check_errors=True), lambda w: square(w).det()),
    Case(1, "host-read", lambda w: torch.linalg.eigh(square(w)), lambda w: torch.linalg.qr(square(w))),
    Case(1, "host-read", lambda w: torch.linalg.svdvals(square(w)).argmax(), lambda w: square(w).norm()),
    Case(1, "host-read", lambda w: lstsq(square(w), square(w))[0].round(), lambda w: torch.linalg.lu(square(w))),
    Case(2, "host-size", lambda w: torch.zeros(w.index.max().item()), lambda w: torch.zeros(5)),
    Case(2, "host-size", lambda w: one_hot(w.index, int(w.index.max()) + 1), lambda w: one_hot(w.index, 3)),
    Case(
        2, "host-size", lambda w: torch.sparse_coo_tensor(w.index[None], w.x[:2], check_invariants=False).shape,
        lambda w: torch.sparse_coo_tensor(w.index[None], w.x[:2], (4,), check_invariants=False).shape,
    ),
    # 3: copies to the host
    Case(3, "copy-to-host", lambda w: w.x.cpu(), lambda w: w.back.copy_(w.x, non_blocking=True)),
    Case(3, "copy-to-host", lambda w: w.x.numpy(), lambda w: w.back.copy_(w.x, non_blocking=True).numpy()),
    Case(3, "copy-to-host", lambda w: np.asarray(w.x), lambda w: np.asarray(w.host)),
    Case(3, "copy-to-host", lambda w: w.x.to("cpu"), lambda w: w.x.to(torch.float16)),
    Case(3, "copy-to-host", lambda w: w.x.to(w.host), lambda w: w.x.to(w.grid)),
    Case(3, "copy-to-host", lambda w: w.back.copy_(w.x), lambda w: w.x.copy_(w.x.flip(0))),
    # 4: a device scalar as an index
    Case(4, "host-index", lambda w: w.x[: w.count], lambda w: w.x * (torch.arange(6, device=CUDA) < w.count)),
    Case(4, "host-index", lambda w: list(range(w.count)), lambda w: list(range(2))),
    Case(4, "host-index", lambda w: ["a", "b", "c"][w.count], lambda w: ["a", "b", "c"][2]),
    Case(4, "host-index", lambda w: w.x[w.count], lambda w: w.x.index_select(0, w.count.view(1))),
    # 5: assigning one element
    Case(5, "scalar-assign", lambda w: assign(w.x, 0, 5.0), lambda w: assign(w.x, slice(0, 1), 5.0)),
    Case(5, "scalar-assign", lambda w: assign(w.grid, (1, 2), 5), lambda w: w.grid[1, 2:3].fill_(5)),
    Case(5, "scalar-assign", lambda w: assign(w.x, 0, w.host[0]), lambda w: assign(w.x, 0, w.x[1])),
    # 6: host data to the device
    Case(6, "list-to-device", lambda w: torch.tensor([1, 2], device=CUDA), lambda w: torch.arange(1, 3, device=CUDA)),
    Case(6, "list-to-device", lambda w: torch.tensor(3.0, device=CUDA), lambda w: torch.full((), 3.0, device=CUDA)),
    Case(6, "list-to-device", lambda w: torch.as_tensor(np.ones(2), device=CUDA), lambda w: torch.ones(2, device=CUDA)),
    Case(6, "list-to-device", lambda w: w.x.new_tensor([1, 2]), lambda w: w.x.new_zeros(2)),
    Case(6, "upload", lambda w: w.host.to(w.x.device), lambda w: w.ring[:6].to(w.x.device, non_blocking=True)),
    Case(6, "upload", lambda w: w.host.cuda(), lambda w: w.ring.cuda(non_blocking=True)),
    Case(6, "upload", lambda w: w.x.copy_(w.ring[:6]), lambda w: w.x.copy_(w.ring[:6], non_blocking=True)),
    Case(6, "upload", lambda w: assign(w.x, slice(0, 6), w.host), lambda w: assign(w.x, slice(0, 6), w.x + 1)),
    # 7: indexing by the host
    Case(7, "index-by-host", lambda w: w.x[[1, 2]], lambda w: w.x[w.index]),
    Case(7, "index-by-host", lambda w: w.x[w.host_index], lambda w: w.x.index_select(0, w.index)),
    Case(7, "index-by-host", lambda w: w.x[np.array([1, 2])], lambda w: w.x[1:3]),
    Case(7, "index-by-host", lambda w: assign(w.x, [1], w.grid[0, 0]), lambda w: assign(w.x, w.index, w.grid[0, 0])),
    Case(7, "index-put-scalar", lambda w: assign(w.x, w.index, 5.0), lambda w: w.x.index_fill_(0, w.index, 5.0)),
    # 8: sizes that depend on data
    Case(8, "data-size", lambda w: w.x.nonzero(), lambda w: w.x.nonzero_static(size=6)),
    Case(8, "data-size", lambda w: torch.where(w.mask), lambda w: torch.where(w.mask, w.x, 0.0)),
    Case(8, "data-size", lambda w: torch.argwhere(w.mask), lambda w: torch.argsort(w.mask)),
    Case(8, "data-size", lambda w: w.x.masked_select(w.mask), lambda w: w.x * w.mask),
    Case(8, "data-size", lambda w: w.grid.to_sparse().values(), lambda w: w.grid * (w.grid != 0)),
    Case(8, "mask-index", lambda w: w.x[w.mask], lambda w: w.x.masked_fill(~w.mask, 0.0)),
    Case(8, "mask-index", lambda w: w.x[w.x > 3], lambda w: w.x[w.host > 3]),
    Case(8, "mask-index", lambda w: assign(w.x, w.mask, w.grid[0]), lambda w: w.x.masked_scatter_(w.mask, w.x.clone())),
    Case(8, "mask-index", lambda w: assign(w.x, w.mask, w.grid[0, 0]), lambda w: assign(w.x, w.mask, 5.0)),
    # 9: counts that are found on the device
    Case(9, "repeat-interleave", lambda w: torch.repeat_interleave(w.index), lambda w: w.index.repeat_interleave(2)),
    Case(
        9, "repeat-interleave",
        lambda w: w.grid[:2].repeat_interleave(w.index, 0),
        lambda w: w.grid[:2].repeat_interleave(w.index, 0, output_size=3),
    ),
    Case(
        9, "counted-size", lambda w: torch.bincount(w.index),
        lambda w: torch.zeros(6, device=CUDA).scatter_add_(0, w.index, w.x[:2]),
    ),
    Case(9, "counted-size", lambda w: torch.unique(w.index), lambda w: w.index.sort()),
    Case(9, "counted-size", lambda w: torch.unique_consecutive(w.index), lambda w: w.index.diff()),
    Case(9, "counted-size", lambda w: torch.histc(w.x), lambda w: torch.histc(w.x, 4, 0, 6)),
    Case(9, "host-read", lambda w: torch.split(w.grid[:3], w.index.tolist()), lambda w: torch.split(w.grid, [1, 3])),
    Case(9, "device-split", lambda w: torch.tensor_split(w.x, w.index), lambda w: torch.tensor_split(w.x, [1, 2])),
    # 10: rejection sampling, and sampling at all
    Case(10, "mask-index", lambda w: w.grid[w.grid[:, 0] > 0], lambda w: torch.where(w.grid[:, :1] > 0, w.grid, 0)),
    Case(10, "host-size", lambda w: w.x.topk(w.index.max().item()), lambda w: w.x.topk(2)),
    # 11: types that name the host, and flags
    Case(11, "type-hop", lambda w: w.x.type(torch.BoolTensor), lambda w: w.x.bool()),
    Case(11, "type-hop", lambda w: w.x.type("torch.LongTensor"), lambda w: w.x.type(torch.int64)),
    Case(
        11, "host-read",
        lambda w: ctc_loss(w.grid[:, None].log_softmax(-1), w.index[None], w.index[1:] + 2, w.index[1:]),
        lambda w: w.grid.log_softmax(-1).gather(1, w.index[:, None]),
    ),
    Case(
        6, "list-to-device",
        lambda w: ctc_loss(w.grid[:, None].log_softmax(-1), w.index[None], [4], [2]),
        lambda w: w.grid.log_softmax(-1).amax(-1),
    ),
    Case(11, "host-read", lambda w: 1 if torch.all(w.mask) else 2, lambda w: torch.where(torch.all(w.mask), 1, 2)),
    # 12: copies that are asynchronous in name only
    Case(
        12, "pageable-async", lambda w: w.host.to(w.x.device, non_blocking=True),
        lambda w: w.ring.to(w.x.device, non_blocking=True),
    ),
    Case(
        12, "pageable-async", lambda w: w.x.copy_(w.host, non_blocking=True),
        lambda w: w.x.copy_(w.back, non_blocking=True),
    ),
    Case(
        12, "gapped-async", lambda w: w.x.copy_(w.ring[::2], non_blocking=True),
        lambda w: w.x.copy_(w.ring[6:], non_blocking=True),
    ),
    Case(
        12, "gapped-async", lambda w: w.ring[::2].copy_(w.x, non_blocking=True),
        lambda w: w.ring[:6].copy_(w.x, non_blocking=True),
    ),
    Case(
        12, "unpinned-download", lambda w: w.host.copy_(w.x, non_blocking=True),
        lambda w: w.back.copy_(w.x, non_blocking=True),
    ),
    # 13: pinned memory
    Case(
        13, "pinned-alloc", lambda w: [w.host.pin_memory().sum() for _ in range(2)],
        lambda w: [w.host.pin_memory() for _ in range(2)],
    ),
    Case(
        13, "pinned-alloc", lambda w: [torch.empty(4, pin_memory=True).shape for _ in range(2)],
        lambda w: torch.empty(4, pin_memory=True),
    ),
    Case(
        13, "pinned-alloc", lambda w: [w.x.to("cpu", non_blocking=True).shape for _ in range(2)],
        lambda w: [w.x.to("cpu", non_blocking=True) for _ in range(2)],
    ),
    # 20, its plan() that asks the device for lengths
    Case(20, "copy-to-host", lambda w: plan_attention(w.index), lambda w: plan_attention(w.host_index)),
    # our own: what a device would refuse
    Case(0, "host-operand", lambda w: w.x + w.host, lambda w: w.x + w.x.new_ones(6)),
    Case(0, "host-operand", lambda w: torch.cat((w.x, w.host)), lambda w: torch.cat((w.x, w.x))),
    Case(0, "host-operand", lambda w: w.host[w.index], lambda w: w.host[w.host_index]),
]  # fmt: skip

ELSEWHERE = {
    14: "allocator-growth, empty-cache",
    15: "event-wait, event-poll, stream-wait",
    16: "slow-call",
    17: "collective",
    18: "graph-capture",
    19: "slow-call",
    21: "gc-pause",
}
"""Rows whose rules are tested in test_sync_cuda.py, with the entry points of torch.cuda played by fakes."""

BY_RACES = {22: "a_thread_begins_on_the_default_stream"}
"""Rows that are an order and no wait: a program of test_race_emulated.py, with and without its fault."""

ONLY_A_GPU = {
    19: "that a compile takes long: the one of the test is played",
    20: "lazy loading of CUDA modules and of cuBLAS, which shows as a slow-call",
    22: "the context that a helper thread makes on GPU 0: the emulation has one device",
}
"""Parts of rows that nothing shows without a GPU."""

ROWS = 22


def names(value: Case | bool) -> str:
    return f"{value.row}-{value.rule}" if isinstance(value, Case) else ("grad", "inference")[value]


SPREAD = sorted(CASES, key=lambda case: CASES.index(case) % 9)
"""Every ninth case first."""
WAYS = [*((case, False) for case in CASES), *sharpest([(case, True) for case in SPREAD], keep=10)]


@pytest.mark.parametrize("case, inference", WAYS, ids=names)
def test_the_bad_form_is_caught(world, case, inference):
    with torch.inference_mode(inference), guard.no_sync(mode="record") as region:
        case.bad(world)
    found = region.report.findings
    assert [f.rule for f in found] == [case.rule], region.report.text()
    assert RULES[case.rule].row == case.row or case.rule in ("mask-index", "host-size", "host-read", "copy-to-host")
    assert_in_lambda(found[0].site, case.bad)


def assert_in_lambda(site: Any, bad: Callable[..., Any]) -> None:
    """The site is in this file, in the case's own lines or in the helper that it calls."""
    assert site.file == __file__
    helpers = [assign, branch, plan_attention, bad]
    spans = [(f.__code__.co_firstlineno, max(line for *_, line in f.__code__.co_lines() if line)) for f in helpers]
    assert any(first <= site.line <= last for first, last in spans), (site, spans)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_bad_form_raises_before_anything_is_returned(world, case):
    with pytest.raises(guard.SyncError) as caught, guard.no_sync():
        case.bad(world)
    text = str(caught.value)
    rule = RULES[case.rule]
    assert caught.value.finding.rule == case.rule
    advice = mend(case.rule, caught.value.finding.what, "") or rule.instead
    assert "test_sync_rules.py:" in text and rule.why in text and advice in text


@pytest.mark.parametrize("case, inference", WAYS, ids=names)
def test_the_good_form_passes(world, case, inference):
    pinned_allocs.forget()  # those of this test's other turns
    with torch.inference_mode(inference), guard.no_sync():
        case.good(world)


def runs_alone(case: Case) -> bool:
    """Not random, and not in need of an accelerator that only emulation has here."""
    return case.rule != "pinned-alloc" and "cuda" not in inspect.getsource(case.bad).lower()


@pytest.mark.parametrize("case", [case for case in CASES if runs_alone(case)], ids=names)
def test_the_bad_form_gives_the_same_values_as_without_a_guard(world, case):
    alone, watched = copy.deepcopy(world), copy.deepcopy(world)
    guard.device_tensor([watched.x, watched.grid, watched.index, watched.mask, watched.count])
    guard.pinned_tensor([watched.ring, watched.back])
    expected = case.bad(alone)
    with guard.no_sync(mode="record"):
        got = case.bad(watched)
    assert same(expected, got) and all(same(a, b) for a, b in zip(alone, watched, strict=True))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def test_every_row_of_the_catalogue_is_here():
    shown = {case.row for case in CASES} - {0}
    for row, reason in ONLY_A_GPU.items():
        print(f"row {row}: not shown on the CPU: {reason}")
    assert shown | set(ELSEWHERE) | set(BY_RACES) == set(range(1, ROWS + 1))
    programs = (Path(__file__).parent / "test_race_emulated.py").read_text()
    assert all(f"def {name}(wait)" in programs for name in BY_RACES.values())


def test_every_rule_has_a_case_and_a_text():
    tested = {case.rule for case in CASES} | set(", ".join(ELSEWHERE.values()).split(", ")) | {"device-sync"}
    assert tested == set(RULES)
    for rule in RULES.values():
        assert rule.what and rule.why and rule.instead, rule.id


def test_nothing_is_caught_among_host_tensors(world):
    host = World(*(tensor.clone() for tensor in world))
    with guard.no_sync():
        for case in CASES:
            if runs_alone(case) and case.row:
                case.bad(host)


def test_every_rule_is_in_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "sanitizer.md").read_text()
    assert [rule for rule in RULES if rule not in text] == []
