"""What the tests on a GPU share."""

from __future__ import annotations

import pytest
import torch

from gapless.device import CudaDevice


@pytest.fixture
def warm_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps find the allocator's memory there, as after a warm-up: its growth on the launch path is a finding."""
    opened = CudaDevice.__init__

    def warm(device: CudaDevice) -> None:
        opened(device)
        device.run(take_and_give_back, device.torch_device)

    monkeypatch.setattr(CudaDevice, "__init__", warm)


def take_and_give_back(device: torch.device) -> None:
    """On the compute stream, since cached memory belongs to its stream: one large block, and many of the small kind."""
    held = [torch.empty(256 << 20, dtype=torch.uint8, device=device)]
    held += [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(64)]
    del held
