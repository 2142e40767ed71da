"""Tests on one GPU by several workers at once."""

from __future__ import annotations

import os
from functools import cache

import torch

SHARE = 0.9
"""Share of the GPU's memory that all workers may take together; their contexts, 0.5 GiB each, take of the rest"""


@cache
def take_share() -> None:
    """Bound what this worker allocates. What it keeps and does not use counts too, and is given back first."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.cuda.set_per_process_memory_fraction(SHARE / workers)
