"""Operators that are not torch's own: their kernels may take pinned host memory, and nothing else of the host."""

from __future__ import annotations

import pytest
import torch

from gapless import guard
from gapless.guard.watch import SyncError

LIBRARY = torch.library.Library("foreign_operators", "DEF")
LIBRARY.define("publish(Tensor value, Tensor(a!) home) -> ()")
LIBRARY.impl("publish", lambda value, home: home.copy_(value).untyped_storage() and None, "CPU")


def publish(pinned: bool) -> torch.Tensor:
    value, home = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    guard.device_tensor(value)
    if pinned:
        guard.pinned_tensor(home)
    with guard.no_sync():
        torch.ops.foreign_operators.publish(value, home)
    return home


def test_a_pinned_tensor_beside_device_tensors_is_no_mistake():
    assert publish(pinned=True).tolist() == [0, 1, 2, 3]


def test_any_other_host_tensor_is():
    with pytest.raises(SyncError, match=r"host-operand.*publish"):
        publish(pinned=False)
