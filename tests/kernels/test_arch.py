"""Facts about GPUs that are not here, and what kernels conclude from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gapless.device import facts as device_facts
from gapless.kernels.arch import arch_of, stores_e4m3

A100 = SimpleNamespace(
    major=8, minor=0, multi_processor_count=108, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=163 << 10,
)  # fmt: skip
H200 = SimpleNamespace(**vars(A100) | {"major": 9, "shared_memory_per_block_optin": 227 << 10})
B200 = SimpleNamespace(**vars(H200) | {"major": 10})
RTX5090 = SimpleNamespace(**vars(A100) | {"major": 12, "shared_memory_per_block_optin": 99 << 10})
MI300 = SimpleNamespace(
    major=9, minor=4, multi_processor_count=304, shared_memory_per_block=64 << 10, gcnArchName="gfx942:sramecc+:xnack-"
)
RX7900 = SimpleNamespace(**vars(MI300) | {"major": 11, "minor": 0, "gcnArchName": "gfx1100"})
MAX1100 = SimpleNamespace(gpu_subslice_count=56, local_mem_size=128 << 10)


@pytest.mark.parametrize(
    "facts, early, warpgroups, wgmma, large_blocks",
    [
        (A100, False, False, False, True),
        (H200, True, True, True, True),
        (B200, True, True, False, True),
        (RTX5090, True, False, False, False),
        (MI300, False, False, False, False),
    ],
    ids=["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"],
)
def test_an_arch_takes_the_ways_that_its_gpu_has(facts, early, warpgroups, wgmma, large_blocks, monkeypatch):
    """torch reports 9.4 for an MI300, whose capabilities do not compare with NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if facts is MI300 else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (facts.major, facts.minor))
    gpu = arch_of(torch.device("cuda"))
    assert (gpu.early, gpu.warpgroups, gpu.wgmma, gpu.large_blocks) == (early, warpgroups, wgmma, large_blocks)
    assert gpu.processors == facts.multi_processor_count


@pytest.mark.parametrize(
    "facts, vendor, warp, compiled, e4m3",
    [(H200, "nvidia", 32, True, True), (MI300, "amd", 64, True, True), (RX7900, "amd", 32, False, True)],
    ids=["sm_90", "gfx942", "gfx1100"],
)
def test_a_vendor_gives_warps_compiled_kernels_and_e4m3(facts, vendor, warp, compiled, e4m3, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None if facts is H200 else "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (facts.major, facts.minor))
    device = torch.device("cuda")
    gpu = arch_of(device)
    assert (gpu.vendor, gpu.warp, device_facts.compiled_for(device)) == (vendor, warp, compiled)
    assert stores_e4m3(device) == e4m3


def test_facts_of_an_intel_gpu_come_from_its_own_module(monkeypatch):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: MAX1100)
    device = torch.device("xpu")
    gpu = arch_of(device)
    assert gpu == ("intel", (0, 0), 56, 128 << 10) and gpu.warp == 32
    assert not (gpu.early or gpu.has_e4m3 or stores_e4m3(device) or device_facts.compiled_for(device))
