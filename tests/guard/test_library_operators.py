"""Operators of torch.library over an emulated device: their bodies are the user's code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapless import guard
from gapless.guard.emulate import emulated_cuda
from gapless.guard.operators import Bodies
from gapless.guard.refusals import NotEmulatedError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")
LIBRARY = torch.library.Library("bodies", "DEF")
SEEN: list[bool] = []


def body(x: Tensor) -> Tensor:
    """Use CUDA in all ways that an operator's body may; wait once."""
    SEEN.append(x.is_cuda and x.device.type == "cuda")
    on_device = torch.empty(3, device="cuda")
    home = torch.zeros(3, pin_memory=True)
    assert on_device.is_cuda and home.is_pinned() and torch.ones(3).to(x.device).is_cuda
    home.copy_(x, non_blocking=True)
    return x * len(x.tolist())


def by_library(name: str, key: str):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, body, key)
    return getattr(torch.ops.bodies, name)


def by_decorator():
    torch.library.define("bodies::decorated", "(Tensor x) -> Tensor")
    torch.library.impl("bodies::decorated", "cuda")(body)
    return torch.ops.bodies.decorated.default


def by_kernel():
    operator = torch.library.custom_op("bodies::kernel", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_kernel("cuda")(body)
    return operator


def with_gradient():
    operator = torch.library.custom_op("bodies::graded", body, mutates_args=(), device_types="cuda")
    operator.register_autograd(lambda ctx, grad: body(grad))
    return lambda x: operator(x.clone().requires_grad_())


# Before any region, as operators of an imported library are.
WAYS = {
    "cuda": by_library("cuda", "CUDA"),
    "explicit": by_library("explicit", "CompositeExplicitAutograd"),
    "implicit": by_library("implicit", "CompositeImplicitAutograd"),
    "decorator": by_decorator(),
    "custom_op": torch.library.custom_op("bodies::custom", body, mutates_args=()),
    "register_kernel": by_kernel(),
    "register_autograd": with_gradient(),
    "triton_op": torch.library.triton_op("bodies::triton", body, mutates_args=()),
}


@pytest.fixture
def region():
    SEEN.clear()
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_body_is_on_the_device_and_its_waits_are_found_at_their_lines(region, way, inference):
    x = torch.ones(3, device="cuda")
    with torch.inference_mode(inference):
        y = WAYS[way](x)
    assert y.is_cuda and SEEN == [True] and y.tolist() == [3, 3, 3]
    found = [finding.rule for finding in region.report.findings if finding.site.function == "body"]
    # Only a line that allocates again is reported, and the ways share theirs.
    assert [rule for rule in found if rule != "pinned-alloc"] == ["upload", "host-read"]


def test_the_backward_of_an_operator_is_seen_too(region):
    x = torch.ones(3, device="cuda", requires_grad=True)
    torch.ops.bodies.graded(x).sum().backward()
    assert SEEN == [True, True] and x.grad.is_cuda
    assert [entry.count for entry in region.report.entries() if entry.finding.rule == "host-read"] == [2]


def test_a_kernel_for_the_cpu_runs_for_host_tensors_and_the_one_for_cuda_for_the_others(region):
    LIBRARY.define("both(Tensor x) -> Tensor")
    LIBRARY.impl("both", lambda x: x - 1, "CPU")
    assert torch.ops.bodies.both(torch.ones(1, device="cuda")).tolist() == [0]
    LIBRARY.impl("both", lambda x: x + 1, "CUDA")  # it counts from now on
    assert torch.ops.bodies.both(torch.ones(1, device="cuda")).tolist() == [2]
    assert torch.ops.bodies.both(torch.ones(1)).tolist() == [0]


def test_a_host_result_of_a_body_is_on_the_host(region):
    LIBRARY.define("lengths(Tensor x, Device device) -> (Tensor, Tensor)")
    LIBRARY.impl("lengths", lambda x, device: (x.cpu(), torch.ones(1, device=device)), "CUDA")
    home, made = torch.ops.bodies.lengths(torch.ones(3, device="cuda"), "cuda")
    assert not home.is_cuda and made.is_cuda


def test_a_compiled_kernel_for_cuda_alone_is_refused_with_its_name(region):
    with pytest.raises(NotEmulatedError) as refused:
        Bodies(None, None, True).choose("bodies::compiled", on_device=True)
    assert str(refused.value) == "not emulated: the operator bodies::compiled, which has a CUDA kernel alone"
    with pytest.raises(NotEmulatedError, match="the operator aten::batch_norm_stats, which has a CUDA kernel alone"):
        torch.batch_norm_stats(torch.ones(2, 3, device="cuda"), 1e-5)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_body_touches_less_than_its_schema_allows(san_source, rows):
    source = f"""
        import torch
        LIBRARY = torch.library.Library("bodies_{rows}", "DEF")
        LIBRARY.define("fill(Tensor(a!) x, Tensor(b!) unused) -> ()")
        LIBRARY.impl("fill", lambda x, unused: x[:{rows}].add_(1).untyped_storage() and None, "CUDA")
        x, y = torch.ones(4, 1, device="cuda"), torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.ops.bodies_{rows}.fill(x, y)
        with torch.cuda.stream(side):
            y.add_(1)
            x[2:].add_(1)
    """
    code, report, _ = san_source(source)
    assert [entry["line"] for entry in report["findings"]] == ([12] if rows == 4 else []), report
    assert code == (rows == 4)
