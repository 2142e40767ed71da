"""trl's OffloadActivations: what backward needs goes to pinned memory on a stream of its own, and comes back for it."""

import torch
from torch import nn
from trl.models.activation_offloading import OffloadActivations

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
x = torch.randn(32, 64, device="cuda")
for _ in range(3):
    with OffloadActivations(use_pin_memory=True, use_streams=True, min_offload_size=1):
        loss = model(x).pow(2).mean()
    loss.backward()
    model.zero_grad()
print("done")
