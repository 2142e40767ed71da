"""A staging buffer is refilled after a query of its event whose answer decides nothing."""

import torch

staging, done = torch.zeros(256, pin_memory=True), torch.cuda.Event()  # san: ok(set-up)
target = torch.zeros(256, device="cuda")
for step in range(4):
    done.query()
    staging.fill_(step)  # finds: race
    target.copy_(staging, non_blocking=True)
    done.record()
