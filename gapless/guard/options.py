"""What a run of the detectors is asked for."""

from __future__ import annotations

from typing import NamedTuple


class DetectorOptions(NamedTuple):
    """The choices of a runner that all of its detectors share."""

    regions: bool = False
    """Check only inside the program's own regions."""
    emulate_cuda: bool = False
    """Emulate CUDA on the CPU, on a machine without it, so that torch.cuda.is_available() is true."""
