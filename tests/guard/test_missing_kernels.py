"""Operators whose kernel for the CPU lacks a type that CUDA's has, and programs that need one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gapless import guard
from gapless.guard.detectors import Detectors
from gapless.guard.emulate import emulated_cuda
from gapless.guard.refusals import NotEmulatedError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


def ints(kind: torch.dtype) -> torch.Tensor:
    return torch.arange(5, device="cuda").to(kind)


def halves(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device="cuda").half().reshape(shape)


CALLS = {
    **{f"histc {kind}": (lambda kind=kind: torch.histc(ints(kind), 4, 0, 4), kind)
       for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)},
    "abs of bool": (lambda: (ints(torch.int64) > 2).abs(), torch.bool),
    "trace of bool": (lambda: torch.ones(3, 3, device="cuda").bool().trace(), torch.int64),
    "avg_pool3d": (lambda: F.avg_pool3d(halves(1, 2, 2, 2, 2), 2), torch.float16),
    "rrelu_": (lambda: F.rrelu_(halves(4), training=True), torch.float16),
    "polygamma": (lambda: torch.polygamma(1, halves(3)), torch.float16),
    "product in a wider type": (lambda: torch.mm(halves(2, 2), halves(2, 2), out_dtype=torch.float32), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("grads", [False, True])
def test_a_type_without_a_kernel_runs_in_a_wider_one(region, call, grads):
    run, kind = CALLS[call]
    with torch.set_grad_enabled(grads):
        out = run()
    assert out.dtype == kind and out.is_cuda and region.report.findings == []


def test_results_in_a_wider_type_are_right_and_arguments_are_written(region):
    assert torch.histc(ints(torch.int32), 5, 0, 4).tolist() == [1] * 5
    x = halves(4)
    y = F.rrelu_(x, 0.5, 0.5, training=True)
    assert y is x and x[0].item() == -0.5


def test_a_host_tensor_without_a_kernel_fails_as_on_a_gpu(region):
    with pytest.raises(NotImplementedError, match="histogram_cpu"):
        torch.histc(torch.arange(3), 3, 0, 2)


def test_half_precision_ffts_are_refused(region):
    with pytest.raises(NotEmulatedError, match="FFT of half-precision numbers"):
        torch.fft.rfft(halves(8))


def test_a_recurrent_layer_in_half_precision_runs_in_a_wider_type(region):
    layer = torch.nn.LSTM(4, 5, device="cuda").half()
    out, _ = layer(halves(3, 2, 4))
    out.float().sum().backward()
    assert out.dtype == layer.weight_ih_l0.grad.dtype == torch.float16


def test_an_export_of_tensors_of_the_device_is_refused(region):
    with pytest.raises(NotEmulatedError, match=r"torch\.export of tensors on the device"):
        torch.export.export(torch.nn.Linear(2, 2, device="cuda"), (torch.ones(1, 2, device="cuda"),))


@pytest.mark.process
def test_a_mixture_of_experts_of_transformers_runs_by_its_default_path():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    detectors = Detectors(["sync", "race"], emulate_cuda=True)
    with detectors:
        model = transformers.Qwen3MoeForCausalLM(config).cuda()
        ids = torch.ones(1, 5, dtype=torch.int64).cuda()
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            assert model(ids).logits.is_cuda
    rules = {entry.finding.rule for entry in detectors.findings()}
    assert rules == {"upload"}
