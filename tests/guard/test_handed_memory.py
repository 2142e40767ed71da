"""Memory that is handed over by its address, or that is none: dlpack, registered host memory, meta and fake tensors."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import pytest
import torch
from torch.utils import dlpack

from gapless import guard
from gapless.guard.detectors import Detectors
from gapless.guard.emulate import emulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


def rules(region) -> list[str]:
    return [finding.rule for finding in region.report.findings]


WAYS = {
    "tensor": torch.from_dlpack,
    "capsule": lambda x: torch.from_dlpack(dlpack.to_dlpack(x)),
    "method": lambda x: dlpack.from_dlpack(x.__dlpack__()),
    "stream": lambda x: dlpack.from_dlpack(x.__dlpack__(stream=1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_memory_through_dlpack_is_the_same_on_the_same_device(region, way):
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    y = WAYS[way](x[:, 1:])
    assert y.is_cuda and y.data_ptr() == x[:, 1:].data_ptr() and (y.shape, y.stride()) == ((2, 2), (3, 1))
    assert (x[:, 1:] + y).is_cuda and rules(region) == []
    assert x.__dlpack_device__() == (dlpack.DLDeviceType.kDLCUDA, 0)
    host = WAYS[way](torch.ones(3)) if way != "stream" else torch.ones(3)
    assert not host.is_cuda and not host.is_pinned()


def test_pinned_memory_through_dlpack_stays_pinned_and_a_copy_is_a_copy(region):
    pinned = torch.zeros(4, pin_memory=True)
    assert torch.from_dlpack(pinned).is_pinned()
    x = torch.ones(4, device="cuda")
    copy = torch.from_dlpack(x, copy=True)
    assert copy.is_cuda and copy.data_ptr() != x.data_ptr()


def test_numpy_takes_no_memory_of_a_device_by_dlpack(region):
    with pytest.raises(BufferError):
        np.from_dlpack(torch.ones(3, device="cuda"))
    assert np.from_dlpack(torch.ones(3)).sum() == 3


def test_a_tensor_on_meta_copies_nothing(region):
    x, layer = torch.ones(3, device="cuda"), torch.nn.Linear(2, 2, device="cuda")
    on_meta = [x.to("meta"), x.to(device="meta"), torch.empty_like(x, device="meta"), x.to(x.to("meta"))]
    assert all(one.is_meta and not one.is_cuda for one in [*on_meta, *layer.to("meta").parameters()])
    assert layer.to_empty(device="cuda").weight.is_cuda and rules(region) == []


def test_a_copy_to_meta_is_no_wait_for_the_host(san_source):
    source = """
        import torch
        staging = torch.zeros(4, pin_memory=True)  # san: ok(set-up)
        for step in range(2):
            staging.fill_(step)
            x = staging.to("cuda", non_blocking=True)
            x.to("meta")
    """
    _, report, _ = san_source(source, "--device-tensors", "cuda")
    assert {(entry["line"], entry["rule"]) for entry in report["findings"]} == {(5, "race")}


@pytest.mark.process
def test_the_memory_of_fake_tensors_is_not_asked_for(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    detectors = Detectors(["sync", "race"], emulate_cuda=True)
    with detectors, warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            x = distribute_tensor(torch.ones(4, 4, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)])
            assert (x @ x).sum().to_local().is_cuda
        finally:
            distributed.destroy_process_group()
    assert detectors.findings() == []


def test_registered_memory_is_pinned_until_it_is_unregistered(region):
    runtime, mapped = torch.cuda.cudart(), mmap.mmap(-1, 4096)
    over_map = torch.from_numpy(np.frombuffer(mapped, np.float32))
    for tensor in (over_map, torch.zeros(64), torch.zeros(64).share_memory_()):
        assert not tensor.is_pinned()
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        assert tensor.is_pinned() and tensor[5:9].is_pinned() and not torch.zeros(64).is_pinned()
        with pytest.raises(torch.cuda.CudaError, match="already mapped"):
            torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        tensor.to("cuda", non_blocking=True)
        assert int(runtime.cudaHostUnregister(tensor.data_ptr())) == 0 and not tensor.is_pinned()
    assert rules(region) == []
    assert runtime.cudaHostUnregister(over_map.data_ptr()) != runtime.cudaError.success
    free, total = runtime.cudaMemGetInfo(0)
    assert 0 < free <= total and runtime.cudaProfilerStart() == runtime.cudaProfilerStop() == 0


def test_streams_and_events_with_a_new_of_their_own_are_made_as_torchs(region):
    class Named(torch.cuda.Stream):
        def __new__(cls, name, **options):
            made = super().__new__(cls, priority=-1, **options)
            made.name = name
            return made

        def __init__(self, name, **options):
            self.length = len(name)

    class Timed(torch.cuda.Event):
        def __new__(cls):
            return super().__new__(cls, enable_timing=True)

    stream, other = Named("copies"), Named("more")
    assert (stream.name, stream.length, stream.priority) == ("copies", 6, -1)
    assert stream != other and isinstance(stream, torch.cuda.Stream) and stream.device.type == "cuda"
    first, second = Timed(), Timed()
    with stream:
        first.record()
        second.record()
    assert first.elapsed_time(second) >= 0
    assert type("Mine", (torch.cuda.ExternalStream,), {})(7).cuda_stream == 7
