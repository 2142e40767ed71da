"""A GPU as kernels see it: what tiles and launches are chosen by."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gapless.device import facts

LARGE_BLOCK = 160 << 10


class Arch(NamedTuple):
    """Facts about a GPU, and what follows from them. Capabilities of two vendors do not compare."""

    vendor: str
    """nvidia, amd or intel; none for Triton's interpreter"""
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    """Most bytes of shared memory of a block"""

    @property
    def early(self) -> bool:
        """Whether a kernel may begin before the previous one ends (programmatic dependent launch)."""
        return self.vendor == "nvidia" and self.capability >= (9, 0)

    @property
    def warp(self) -> int:
        """Threads that run as one: 64 on AMD's GPUs for data centers."""
        return 64 if self.vendor == "amd" and self.capability < (10, 0) else 32

    def stages(self, wanted: int) -> int:
        """Return the stages of a software pipeline. AMD's compiler holds one in registers, and 64 KiB of shared memory
        have room for one more."""
        return min(wanted, 2) if self.vendor == "amd" else wanted

    def registers(self, most: int) -> dict[str, int]:
        """Return a launch's limit of registers of a thread: NVIDIA's compiler alone has such an option."""
        return {"maxnreg": most} if self.vendor == "nvidia" else {}

    @property
    def has_e4m3(self) -> bool:
        """Whether it converts and multiplies e4m3. gfx942 has another format, fnuz, and gfx950 is not tried."""
        return self.vendor == "nvidia" and self.capability >= (8, 9)

    @property
    def warpgroups(self) -> bool:
        """Whether four warps multiply together: NVIDIA's data center GPUs from Hopper on."""
        return self.early and self.capability < (12, 0)

    @property
    def wgmma(self) -> bool:
        """Whether tensor cores multiply from a block's 227 KiB of shared memory: Hopper. Later ones take at most 512 of
        a product's depth at once."""
        return self.early and self.capability < (10, 0)

    @property
    def large_blocks(self) -> bool:
        """Whether a block may have the shared memory of NVIDIA's data center GPUs, 163 KiB or more; others have 99."""
        return self.shared_memory >= LARGE_BLOCK


def arch_of(device: torch.device) -> Arch:
    vendor, processors = facts.vendor(device), facts.multiprocessors(device)
    return Arch(vendor, facts.capability(device), processors, facts.shared_memory(device))


def stores_e4m3(device: torch.device) -> bool:
    """Return whether Triton's kernels may read and write e4m3: by instructions, or on AMD's GPUs by whole numbers."""
    vendor = facts.vendor(device)
    return vendor == "amd" or (vendor == "nvidia" and facts.capability(device) >= (8, 9))


INTERPRETER = Arch("none", (0, 0), 4, LARGE_BLOCK)
"""Stand-in for a GPU in Triton's interpreter"""
