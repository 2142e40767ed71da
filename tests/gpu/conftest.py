"""What the tests on a GPU share."""

from __future__ import annotations

import pytest

from gapless.device import CudaDevice


@pytest.fixture
def reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For loops without the engine that reserves what steps need: taking memory on the launch path is a finding."""
    opened = CudaDevice.__init__

    def warm(device: CudaDevice) -> None:
        opened(device)
        device.reserve(256 << 20, 0)

    monkeypatch.setattr(CudaDevice, "__init__", warm)
