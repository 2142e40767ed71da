"""What the tests on a GPU share."""

from __future__ import annotations

import pytest

from gapless.device import CudaDevice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch say once that its debug mode does not detect everything."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:Synchronization debug mode"))


@pytest.fixture
def reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For loops without the engine that reserves what steps need: taking memory on the launch path is a finding."""
    opened = CudaDevice.__init__

    def warm(device: CudaDevice) -> None:
        opened(device)
        device.reserve(256 << 20, 0)

    monkeypatch.setattr(CudaDevice, "__init__", warm)
