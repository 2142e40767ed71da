"""Pinned memory that numpy writes and reads, unregistered: what a copy in flight does not allow is found."""

from __future__ import annotations

import ctypes
import linecache

import numpy as np
import pytest
import torch

from gapless.guard.detectors import Detectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def races(program) -> list[tuple[str, str]]:
    """Run it under the race detector; returns rule and source line of what is found."""
    detectors = Detectors(["race"], emulate_cuda=True)
    with detectors:
        kept = program()
    del kept
    found = [entry.finding for entry in detectors.findings()]
    return [(one.rule, linecache.getline(__file__, one.user.line).partition("#")[0].strip()) for one in found]


def staging(n: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
    return torch.zeros(n, pin_memory=True), torch.zeros(n, device="cuda"), torch.cuda.Event()


def test_a_write_by_numpy_that_does_not_wait_for_the_copy():
    def program():
        host, device, done = staging()
        view = host.numpy()
        for step in range(3):
            view[:4] = step
            device.copy_(host, non_blocking=True)
            done.record()

    assert races(program) == [("race", "view[:4] = step")]


def test_writes_that_wait_and_writes_elsewhere_are_right():
    def program():
        host, device, done = staging()
        view, grid = host.numpy(), host.numpy().reshape(4, 4)
        for step in range(3):
            done.synchronize()
            view[:4] = step
            np.add(view[:4], 1, out=view[:4])
            view[[1, 2]] = 5
            device[:4].copy_(host[:4], non_blocking=True)
            done.record()
            view[8:] = 1
            grid[1:3, 1:3] += 1
            grid[1] = view[4:8]
            view[[4, 9]] = view[4:8][[0, 1]]
            np.copyto(view[12:], 3)
            view[5:9].fill(2)

    assert races(program) == []


WRITES = {
    "ufunc": lambda view: np.add(view[:2], 1, out=view[:2]),
    "in place": lambda view: view[:2].__iadd__(1),
    "function": lambda view: np.copyto(view, 3),
    "method": lambda view: view.sort(),
    "list": lambda view: view.__setitem__([3, 1], 2),
    "mask": lambda view: view.__setitem__(np.arange(16) == 3, 2),
    "one": lambda view: view.__setitem__(3, 2),
    "at": lambda view: np.add.at(view, [1], 1),
    "out": lambda view: np.stack([np.ones(8), np.ones(8)], out=view.reshape(2, 8)),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_way_of_writing_is_seen(name):
    def program():
        host, device, _ = staging()
        view = host.numpy()
        device.copy_(host, non_blocking=True)
        WRITES[name](view)

    assert [rule for rule, _ in races(program)] == ["race"]


READS = {
    "sum": lambda view: view.sum(),
    "element": lambda view: view[3],
    "list": lambda view: view[[1, 3]],
    "tolist": lambda view: view[:2].tolist(),
    "function": lambda view: np.concatenate([view, view]),
    "iteration": lambda view: list(view),
    "operator": lambda view: view + 1,
    "print": lambda view: repr(view),
    "assigned": lambda view: np.zeros(16).__setitem__(slice(None), view) or view + 0,
}


@pytest.mark.parametrize("name", READS)
def test_a_view_of_a_download_is_read_after_its_fence(name):
    def early():
        host, device, done = staging()
        view = host.numpy()
        host.copy_(device, non_blocking=True)
        done.record()
        READS[name](view)

    def late():
        host, device, done = staging()
        host.copy_(device, non_blocking=True)
        view = host.numpy()
        done.record()
        done.synchronize()
        READS[name](view)

    assert [rule for rule, _ in races(early)] == ["race"]
    assert races(late) == []


def test_writes_that_no_library_shows_are_found_by_checksum():
    def by_address():
        host, device, _ = staging()
        device.copy_(host, non_blocking=True)
        ctypes.memset(host.data_ptr(), 1, 8)
        return host

    def by_alias():
        host, device, _ = staging()
        plain = np.frombuffer(memoryview(host.numpy()), np.float32)
        for step in range(2):
            plain[:4] = step + 1
            device[:4].copy_(torch.from_numpy(plain[:4]), non_blocking=True)
        return host

    assert races(by_address) == [("overwritten", "device.copy_(host, non_blocking=True)")]
    assert races(by_alias) == [("overwritten", "device[:4].copy_(torch.from_numpy(plain[:4]), non_blocking=True)")]


def test_unseen_writes_after_the_fence_are_right():
    def program():
        host, device, done = staging()
        for step in range(3):
            ctypes.memset(host.data_ptr(), step, 8)
            device.to(torch.float32).copy_(host, non_blocking=True)
            done.record()
            done.synchronize()
        del host
        host, device, _ = staging()
        device.copy_(host, non_blocking=True)  # nobody writes it any more

    assert races(program) == []


def test_an_alias_of_pinned_memory_is_pinned():
    detectors = Detectors(["sync"], emulate_cuda=True)
    with detectors:
        host, device, _ = staging()
        alias = torch.from_numpy(np.asarray(host.numpy())[4:8])
        assert alias.is_pinned() and not torch.from_numpy(np.zeros(4, np.float32)).is_pinned()
        device[4:8].copy_(alias, non_blocking=True)
    assert detectors.findings() == []


def test_a_watched_array_is_an_array_to_all_who_ask():
    import copy
    import pickle

    detectors = Detectors(["race"], emulate_cuda=True)
    with detectors:
        view = staging(4)[0].numpy()
        assert isinstance(view, np.ndarray) and type(view).__name__ == "ndarray"
        assert repr(view) == "array([0., 0., 0., 0.], dtype=float32)"
        for other in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view), view.copy(), view + 1, view[[0]]):
            assert type(other) is np.ndarray
        view += 1
        assert view[1] == 1 and view.sum() == 4
        assert np.array_equal(view, np.ones(4)) and torch.as_tensor(view).sum() == 4
