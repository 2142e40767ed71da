"""What dtype auto stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gapless.base.config import EngineConfig
from gapless.device import CpuDevice, CudaDevice
from gapless.engine import sizing
from gapless.kernels import dtypes, native
from gapless.model.config import load_config

CONFIG = EngineConfig(model="demo")


@pytest.fixture
def model():
    return replace(load_config(CONFIG), dtype="bfloat16")


def settled(monkeypatch, model, gain, device=CpuDevice, free=64 << 30, config=CONFIG):
    monkeypatch.setattr(sizing, "float32_gains", lambda dtype: gain if dtype == torch.bfloat16 else 0.0)
    monkeypatch.setattr(sizing.host, "memory", lambda: (free, 64 << 30))
    return sizing.settle_dtype(config, model, device.caps).dtype


def test_a_cpu_computes_in_float32_if_that_is_clearly_faster(monkeypatch, model):
    said = []
    monkeypatch.setattr(sizing, "announce", said.append)
    assert settled(monkeypatch, model, 2.0) == "float32"
    assert said == ["computing in float32, 2.0 x as fast here as bfloat16: --dtype bfloat16 keeps that"]


@pytest.mark.parametrize(
    "how",
    [{"gain": 1.2}, {"device": CudaDevice}, {"free": 1 << 20}, {"config": replace(CONFIG, dtype="bfloat16")}],
    ids=["not clearly faster", "a GPU", "would not fit", "named by the user"],
)
def test_another_dtype_than_float32_is_kept(monkeypatch, model, how):
    config = how.get("config", CONFIG)
    assert settled(monkeypatch, model, **{"gain": 2.0, **how}) == config.dtype


def test_products_of_torch_are_measured_if_ours_are_not_built(monkeypatch):
    assert dtypes.float32_gains(torch.float32) == 1.0
    if native.load() is not None:
        assert dtypes.float32_gains(torch.bfloat16) == 1.0
    monkeypatch.setattr(native, "load", lambda: None)
    seconds = {(torch.bfloat16, 1): 1.0, (torch.bfloat16, 128): 4.0, (torch.float32, 1): 2.0, (torch.float32, 128): 0.5}
    with monkeypatch.context() as patched:
        patched.setattr(dtypes, "product_seconds", lambda dtype, rows: seconds[dtype, rows])
        assert dtypes.float32_gains(torch.bfloat16) == 2.0
    assert dtypes.float32_gains(torch.bfloat16) > 0
