"""Follows the memory of Triton's kernels, which its interpreter runs: they act as the stream that is current."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np

from .emulated_triton import KernelUses, Runs
from .race_checker import RaceChecker
from .race_index import FIRST_ARGUMENT
from .race_report import READ, WRITE
from .race_shadow import Extent

_RUNS_APART = 32
"""The largest number of runs of bytes that are noted each by itself."""


def follow(checker: RaceChecker, touched: KernelUses) -> None:
    """The calling thread has launched a kernel that touched this memory."""
    device = checker.device
    if device is None or device.captures():
        return
    together = [(tensor, READ) for tensor, _, _ in touched]
    for tensor, writes, runs in touched:
        stream = device.stream_for(tensor, together)
        with nullcontext() if stream is None else checker.agents.acting_as(stream):
            for region in _regions(runs):
                checker.reach_part(tensor, region, WRITE if writes else READ)


def _regions(runs: Runs) -> Iterator[Extent]:
    if len(runs) <= _RUNS_APART:
        yield from ((low, high, None, None) for low, high in runs)
        return
    by_size: dict[int, list[int]] = defaultdict(list)
    for low, high in runs:
        by_size[high - low].append(low)
    for size, starts in by_size.items():
        first, extent = starts[0], starts[-1] - starts[0] + size
        offsets = np.array(starts, np.int64) - first
        # As an index that chooses runs of bytes.
        chosen = FIRST_ARGUMENT, first, (extent, size), (1, 1), 1, 0, (offsets.tobytes(),)
        yield first, first + extent, None, chosen
