"""accelerate's cpu_offload: each layer's weights are uploaded before it runs, and dropped behind it."""

import torch
from accelerate import cpu_offload
from torch import nn

model = cpu_offload(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.device("cuda"))
x = torch.ones(2, 8, device="cuda")
with torch.no_grad():
    for _ in range(3):
        x = model(x)
print("done")
