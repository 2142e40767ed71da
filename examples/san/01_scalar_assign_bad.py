"""Every step writes one element of a device table from a Python number.

The number becomes a CPU tensor of the element's shape, which is copied to the device while the host waits. It looks
free, and it was found in quantised KV caches, in bad-words masks and in the index tables of attention kernels.
"""

from __future__ import annotations

import torch

from gapless import guard

starts = torch.zeros(9, dtype=torch.int32, device="cuda")
for step in range(4):
    lengths = torch.full((8,), step + 1, dtype=torch.int32, device="cuda")
    starts[0] = step  # waits
    starts[1:] = lengths.cumsum(0) + step

with guard.allow("the last step has been launched"):
    print(starts.tolist())
