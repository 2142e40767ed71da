"""What the tests on a GPU share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gapless.device import AcceleratorDevice

SAID = ("Synchronization debug mode", "TRITON_DEFAULT_FP_FUSION is unset")
"""What torch says once of its debug mode, which does not detect everything, and Triton 3.9 of its next version."""
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
    pytest.mark.filterwarnings(*(f"ignore:{words}" for words in SAID)),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a GPU."""
    for item in items:
        for mark in MARKS if item.path.parent == Path(__file__).parent else ():
            item.add_marker(mark)


@pytest.fixture
def reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For loops without the engine that reserves what steps need: taking memory on the launch path is a finding."""
    opened = AcceleratorDevice.__init__

    def warm(device: AcceleratorDevice) -> None:
        opened(device)
        device.reserve(256 << 20, 0)

    monkeypatch.setattr(AcceleratorDevice, "__init__", warm)
