"""Settings that a device cannot honour are refused by the capability that it lacks, and devices by the needed ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.device import AcceleratorDevice, Caps, CudaDevice, device_class
from gapless.device.accelerators import ACCELERATORS
from gapless.device.probe import lacking
from gapless.engine.capabilities import refuse_lacking

LESS = Caps(maps_host=False, own_memory=True, fp8=False)


@pytest.mark.parametrize(
    "field, value, capability",
    [
        ("batch_invariant", True, "kernels"),
        ("kv_cache_dtype", "fp8", "fp8"),
        ("kv_cache_dtype", "k8v4", "fp8"),
        ("quantization", "fp8", "fp8"),
        ("tensor_parallel_size", 2, "sums"),
    ],
)
def test_a_setting_is_refused_by_the_capability_that_the_device_lacks(field, value, capability) -> None:
    refuse_lacking(EngineConfig(), "other", LESS)
    with pytest.raises(ConfigError, match=f"{field}.*other.*capability {capability}"):
        refuse_lacking(EngineConfig(**{field: value}), "other", LESS)


def test_devices_are_chosen_by_number_only_where_there_are_some() -> None:
    refuse_lacking(EngineConfig(device_ids="1"), "cuda", CudaDevice.caps)
    with pytest.raises(ConfigError, match=r"^device_ids: cpu has no devices to choose from.*leave device_ids out"):
        refuse_lacking(EngineConfig(device_ids="1"), "cpu", Caps())


def test_metal_has_no_fp8() -> None:
    assert [name for name, record in ACCELERATORS.items() if not record.caps.fp8] == ["mps"]


def test_settings_that_a_gpu_honours_pass() -> None:
    config = EngineConfig(batch_invariant=True, kv_cache_dtype="fp8", quantization="fp8", tensor_parallel_size=2)
    refuse_lacking(config, "cuda", CudaDevice.caps)


class Lacking(AcceleratorDevice):
    """A backend with one stream, whose events cannot be asked."""

    kind = torch_type = "lacking"
    pins = False

    @classmethod
    def new_stream(cls, device, priority):
        return SimpleNamespace(stream_id=0)

    @classmethod
    def new_event(cls, device, timed):
        raise RuntimeError("events are not implemented")


def test_each_needed_capability_is_tried_and_the_backend_s_error_is_kept() -> None:
    found = {need.capability: str(error or "") for need, error in lacking(Lacking, torch.device("cpu"))}
    assert found == {"streams": "", "events": "events are not implemented", "times": "events are not implemented"}


def test_a_type_with_a_record_keeps_its_refusals_by_the_general_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in ("xpu", "ascend", "gaudi", "mps"):
        assert device_class(f"accelerator:{ACCELERATORS[record].torch_type}") is ACCELERATORS[record]
    assert not issubclass(device_class("accelerator:cuda"), CudaDevice)
    for name, mend in (("cpu", "use --device cpu"), ("fake", "use --device fake"), ("nonsense", "accelerator:TYPE")):
        with pytest.raises(ConfigError, match=f"no accelerator of the type '{name}': .*{mend}"):
            device_class(f"accelerator:{name}")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert device_class("accelerator:cuda") is ACCELERATORS["rocm"]
    with pytest.raises(ConfigError, match="use --device rocm"):
        CudaDevice.open(0)
