"""Every step makes a device tensor of a Python list: pageable memory, and a copy that the host waits for."""

from __future__ import annotations

import torch

from gapless import guard

total = torch.zeros(4, dtype=torch.int64, device="cuda")
for step in range(5):
    lengths = [step + row for row in range(4)]
    total += torch.tensor(lengths, device="cuda")  # waits

with guard.allow("the last step has been launched"):
    print(total.tolist())
