"""Row numbers of a batch of unequal prompts: repeat_interleave sums the counts on the device and reads the sum back.

Two words in the call cost one engine a third of its throughput.
"""

from __future__ import annotations

import torch

from gapless import guard

COUNTS = [5, 1, 3]

counts = torch.tensor(COUNTS).to("cuda")  # san: ok(start-up)
offsets = torch.arange(3, device="cuda") * 100
for _ in range(3):
    owner = torch.repeat_interleave(offsets, counts)  # waits
    slots = owner + torch.arange(sum(COUNTS), device="cuda")

with guard.allow("the last step has been launched"):
    print(slots.tolist())
