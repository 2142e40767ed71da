"""Records of backends that have not run here: complete, spelled with torch's own names, and honest about what lacks."""

from __future__ import annotations

import importlib.machinery
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from device_contract import Contract, ones, step

from gapless import guard
from gapless.base.errors import CaptureError, ConfigError
from gapless.device import device_class
from gapless.device.accelerator import AcceleratorDevice
from gapless.device.accelerators import ACCELERATORS, gaudi, mps, xpu
from gapless.device.seam import Caps
from gapless.guard.emulate import emulated_cuda
from gapless.testing import fake

SENTENCE = re.compile(r"[A-Z].*[^.]\.$")
TYPES = {"rocm": "cuda", "xpu": "xpu", "ascend": "npu", "gaudi": "hpu", "mps": "mps"}


def is_here(record: type[AcceleratorDevice]) -> bool:
    """Return whether torch sees hardware of this record, which the record then opens."""
    seen = torch.accelerator.current_accelerator()
    return seen is not None and seen.type == record.torch_type and (seen.type != "cuda" or bool(torch.version.hip))


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_record_names_its_backend_and_everything_that_it_lacks(name: str) -> None:
    record = ACCELERATORS[name]
    assert record.kind == name and record.torch_type == TYPES[name]
    assert isinstance(record.caps, Caps) and record.caps.own_memory and not record.caps.maps_host
    assert record.caps.real_time and record.caps.kernels in ("torch", "triton")
    assert record.missing and all(SENTENCE.match(sentence) for sentence in record.missing)
    assert not record.has_run and "Never run." in (record.__doc__ or "")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_record_without_graphs_says_so(name: str) -> None:
    record = ACCELERATORS[name]
    says = any("aptured" in sentence or "Graphs need" in sentence for sentence in record.missing)
    assert says == (name != "rocm") and (record.caps.captures or not record.caps.pads)
    assert ("one queue" in " ".join(record.missing)) == record.one_queue


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_record_is_refused_by_its_name_where_its_backend_is_not(name: str) -> None:
    record = ACCELERATORS[name]
    if is_here(record):
        pytest.skip(f"torch sees a device of {name}, which opens")
    with pytest.raises(ConfigError, match=f"device.*({name}|type {record.torch_type})"):
        record.open(0)


def test_names_of_torch_that_records_use_exist() -> None:
    assert all(torch.device(kind).type == kind for kind in TYPES.values() if kind != "npu")
    assert callable(torch.xpu.get_device_name)
    assert all(callable(getattr(torch.mps, name)) for name in ("recommended_max_memory", "driver_allocated_memory"))
    graphs = hasattr(torch.xpu, "XPUGraph")  # from torch 2.12
    assert ACCELERATORS["xpu"].caps.captures == ACCELERATORS["xpu"].caps.pads == graphs
    if graphs:
        assert callable(torch.xpu.graph_pool_handle)
        assert list(inspect.signature(torch.xpu.XPUGraph.capture_begin).parameters) == ["self", "pool"]


class RecordContract(Contract):
    """The device contract, and what a record says of streams and graphs."""

    def test_streams_are_one_where_the_backend_has_one(self, device: AcceleratorDevice) -> None:
        streams = (device.compute, device.token_out, device.bulk_out, device.bulk_in)
        assert len({stream.raw.stream_id for stream in streams}) == (1 if device.one_queue else 4)

    def test_a_program_is_captured_or_refused_by_the_device_s_name(self, device: AcceleratorDevice) -> None:
        x = ones(device)
        device.drain()
        if not device.caps.captures:
            with pytest.raises(CaptureError, match=f"kind {device.kind} captures nothing"):
                device.capture("key", step, (x, 1))
            return
        graph = device.capture("key", step, (x, 1))
        device.run(x.fill_, 1)
        for _ in range(3):
            graph.launch(device.compute)
        device.drain()
        assert x.tolist() == [40]


class TestRecordsOnEmulatedCuda(RecordContract):
    """CUDA by both classes, and ROCm, whose torch spells everything as CUDA's, on the sanitizer's CUDA."""

    @pytest.fixture(params=["cuda", "accelerator:cuda", "rocm"])
    def device(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceleratorDevice]:
        with emulated_cuda(), guard.no_sync(mode="record"):
            if request.param == "rocm":
                monkeypatch.setattr(torch.version, "hip", "7.2")
            device: Any = (ACCELERATORS.get(request.param) or device_class(request.param)).open(0)
            yield device
            device.close()


def spelled_by_fake(record: type[AcceleratorDevice], monkeypatch: pytest.MonkeyPatch) -> type[AcceleratorDevice]:
    """Return a record's class on the fake accelerator, which stands for the backend's own module of torch."""
    torch_xpu = {"is_available": lambda: True, "get_device_name": lambda: "fake", "XPUGraph": fake.load().Graph}
    monkeypatch.setattr(xpu, "torch_xpu", SimpleNamespace(**torch_xpu, graph_pool_handle=fake.graph_pool_handle))
    torch_mps = {"recommended_max_memory": lambda: 10, "driver_allocated_memory": lambda: 3}
    monkeypatch.setattr(mps, "torch_mps", SimpleNamespace(**torch_mps))
    monkeypatch.setattr(fake, "mem_get_info", torch.accelerator.get_memory_info, raising=False)
    return type("SpelledByFake", (record,), {"torch_type": "fake"})


@pytest.mark.fake
class TestRecordsOnTheFake(RecordContract):
    """The other records, with what each has and lacks, on streams that really overlap and are late by a seed."""

    @pytest.fixture(params=["xpu", "ascend", "gaudi", "mps"])
    def device(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceleratorDevice]:
        device = spelled_by_fake(ACCELERATORS[request.param], monkeypatch).open(0)
        fake.delays(3)
        yield device
        device.close()
        fake.delays(None)
        torch.accelerator.synchronize()


@pytest.mark.fake
def test_gaudi_that_computes_int64_as_int32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.load()
    monkeypatch.setattr(gaudi, "PRODUCT", gaudi.PRODUCT % (1 << 31))
    with pytest.raises(ConfigError, match=r"capability int64.*PT_ENABLE_INT64_SUPPORT=1"):
        spelled_by_fake(ACCELERATORS["gaudi"], monkeypatch).open(0)


def test_rocm_asks_for_a_torch_and_for_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match="not built for ROCm"):
        ACCELERATORS["rocm"].open(0)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no AMD GPU"):
        ACCELERATORS["rocm"].open(0)


@pytest.mark.parametrize(
    "architecture, kernels", [("gfx942:sramecc+:xnack-", "triton"), ("gfx950", "triton"), ("gfx1100", "torch")]
)
def test_rocm_has_triton_on_gpus_that_its_kernels_are_compiled_for(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with emulated_cuda(), guard.no_sync(mode="record"):
        properties = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        device = ACCELERATORS["rocm"].open(0)
        assert device.caps.kernels == kernels
        device.close()


def test_an_intel_gpu_whose_events_pass_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xpu, "torch_xpu", SimpleNamespace(
        is_available=lambda: True, get_device_name=lambda: "Intel(R) Data Center GPU Max 1550",
    ))  # fmt: skip
    with pytest.raises(ConfigError, match="capability ordered copies"):
        xpu.XpuDevice.open(0)


def habana(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """Put modules in the place of habana_frameworks, as far as its record imports them."""
    for name in ("", ".torch", ".torch.core", ".torch.utils", ".torch.utils.internal"):
        module = ModuleType(f"habana_frameworks{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.is_lazy = lambda: lazy
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_gaudi_in_lazy_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    habana(monkeypatch, lazy=True)
    with pytest.raises(ConfigError, match=r"capability eager.*PT_HPU_LAZY_MODE=0"):
        gaudi.GaudiDevice.open(0)
    habana(monkeypatch, lazy=False)
    if not is_here(gaudi.GaudiDevice):
        with pytest.raises(ConfigError, match="no accelerator of the type hpu"):
            gaudi.GaudiDevice.open(0)


def test_factors_of_random_numbers_give_another_product_in_32_bits() -> None:
    a, b = torch.tensor(gaudi.FACTORS)
    assert int(a * b) == gaudi.PRODUCT
    assert int(a.int() * b.int()) != gaudi.PRODUCT


def of_its_own(record: type[AcceleratorDevice], module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a device that was not opened, for what it asks torch's module of its type."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = object.__new__(record)
    vars(device).update(torch_device=torch.device("cpu"), _pool=None)
    return device


def test_ascend_asks_torch_npu_for_memory_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (3, 4), memory_stats_as_nested_dict=lambda device: {"num_device_alloc": 5}
    )
    device = of_its_own(ACCELERATORS["ascend"], module, monkeypatch)
    assert device.memory() == (3, 4) and device.allocations() == 5


def test_gaudi_asks_torch_hpu_for_memory_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    module = SimpleNamespace(
        synchronize=lambda: waits.append("all"), mem_get_info=lambda device: (3, 4),
        memory_stats=lambda device: {"TotalSystemAllocs": 34, "TotalSystemFrees": 2},
    )  # fmt: skip
    device = of_its_own(ACCELERATORS["gaudi"], module, monkeypatch)
    device.synchronize()
    assert device.memory() == (3, 4) and device.allocations() == 36 and waits == ["all"]


def test_mps_has_the_memory_that_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    device = of_its_own(ACCELERATORS["mps"], None, monkeypatch)
    for taken, free in ((3, 7), (12, 0)):
        module = SimpleNamespace(recommended_max_memory=lambda: 10, driver_allocated_memory=lambda taken=taken: taken)
        monkeypatch.setattr(mps, "torch_mps", module)
        assert device.memory() == (free, 10) and device.allocations() == 0


def test_xpu_captures_without_a_mode_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(capture_begin=lambda pool: f"begun in {pool}")
    monkeypatch.setattr(
        xpu, "torch_xpu", SimpleNamespace(XPUGraph=lambda: graph, graph_pool_handle=lambda: "a new pool")
    )
    device = of_its_own(ACCELERATORS["xpu"], None, monkeypatch)
    raw, begin = device.new_graph()
    assert raw is graph and begin() == "begun in a new pool"
