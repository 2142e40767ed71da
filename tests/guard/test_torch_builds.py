"""The emulated device is the same whether torch was built for CUDA or not; `make newest` has a build for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gapless import guard
from gapless.guard.emulate import emulated_cuda
from gapless.guard.refusals import NotEmulatedError, refusal_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_leave_cudnn_alone_and_give_no_warning(region, kind):
    layer = kind(4, 5, num_layers=2, batch_first=True, device="cuda")
    out, _ = layer(torch.ones(2, 3, 4, device="cuda"))
    out.sum().backward()
    layer.flatten_parameters()
    assert out.is_cuda and layer.weight_hh_l0.grad.is_cuda
    assert region.report.findings == []


def test_cudnn_has_settings_and_no_version(region):
    assert torch.backends.cudnn.version() is None
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        x = torch.ones(1, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        assert nn.Conv2d(3, 4, 3, device="cuda")(x).is_cuda


def test_the_core_of_torch_answers_as_one_without_cuda_and_is_left_as_it_was():
    before = {name: value for name, value in vars(torch._C).items() if name.startswith(("_cuda", "_nccl"))}
    with emulated_cuda(), pytest.raises(NotEmulatedError, match=r"^not emulated: torch\.cuda\.tunable\.is_enabled"):
        torch.cuda.tunable.is_enabled()
    assert {name: value for name, value in vars(torch._C).items() if name.startswith(("_cuda", "_nccl"))} == before


def test_the_accelerator_has_every_type(region):
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]


@pytest.mark.parametrize(
    "text", ["0 active drivers ([]). There should only be one.", "libcuda.so cannot found!\nPlease make sure GPU ..."]
)
def test_a_kernel_of_triton_ends_with_one_sentence(text):
    assert str(refusal_of(RuntimeError(text), "a line")) == "not emulated: kernels of Triton"


def test_a_driver_that_is_not_there_is_named_by_what_asked_for_it():
    error = RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version")
    assert str(refusal_of(error, "aten.cat")) == "not emulated: aten.cat"


def test_libraries_that_ask_the_core_of_torch_for_a_device_get_the_emulated_one(region):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = fully_shard(nn.Linear(2, 2, device="cuda"))
        assert layer.weight.device_mesh.device_type == "cuda"
        with torch.device("meta"):
            later = fully_shard(nn.Linear(2, 2))
        later.to_empty(device="cuda")
        for model in (layer, later):
            model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert later.weight.to_local().is_cuda
    finally:
        dist.destroy_process_group()
    assert region.report.findings == []
