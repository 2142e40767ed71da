"""Storages of an emulated device: where they say that they are, and where their copies are."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from gapless import guard
from gapless.guard.emulate import emulated_cuda

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


def test_a_storage_is_where_its_tensor_is(region):
    x, host = torch.ones(4, device="cuda"), torch.ones(4)
    for storage in (x.untyped_storage(), x.storage()):
        assert storage.is_cuda and storage.device == x.device and storage.get_device() == 0
    assert not host.untyped_storage().is_cuda and host.storage().device == torch.device("cpu")
    assert "device=cuda:0" in repr(torch.empty(0, device="cuda").untyped_storage())
    assert region.report.findings == []


def test_the_copies_of_a_storage_are_where_a_gpu_has_them(region):
    storage = torch.ones(4, device="cuda").untyped_storage()
    assert storage.cuda() is storage and storage.clone().is_cuda and copy.deepcopy(storage).is_cuda
    assert copy.deepcopy(torch.nn.Linear(3, 3, device="cuda")).weight.untyped_storage().is_cuda
    assert region.report.findings == []
    assert not storage.cpu().is_cuda
    assert [finding.rule for finding in region.report.findings] == ["copy-to-host"]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_saved_tensor_is_loaded_where_it_was_or_where_it_is_asked_for(region, zipped):
    file = io.BytesIO()
    torch.save(torch.ones(4, device="cuda"), file, _use_new_zipfile_serialization=zipped)
    for place, is_cuda in ((None, True), ("cpu", False)):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded.is_cuda == loaded.untyped_storage().is_cuda == is_cuda


def test_outside_of_regions_torch_is_told_where_the_memory_is():
    with emulated_cuda():
        with guard.no_sync(mode="record"):
            x = torch.ones(4, device="cuda")
        assert copy.deepcopy(x).tolist() == [1.0] * 4
    assert "device" not in vars(torch.UntypedStorage)


def test_a_copy_to_meta_copies_nothing(region):
    x, meta = torch.ones(4, device="cuda"), torch.empty(4, device="meta")
    assert meta.copy_(x).is_meta and meta.copy_(x, non_blocking=True).is_meta
    assert region.report.findings == []
