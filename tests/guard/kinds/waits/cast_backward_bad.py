"""Mixed-precision training from one pinned batch: nothing in a step waits for the upload of the one before."""

import torch
from torch import nn
from torch.nn import functional as F

with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)).to(torch.bfloat16)
batch = torch.zeros(4, 8, pin_memory=True)  # san: ok(set-up)
labels = torch.zeros(4, dtype=torch.long, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch.uniform_(0, step + 1)  # finds: race
    x = batch.to("cuda", torch.bfloat16, non_blocking=True)
    loss = F.cross_entropy(model(x).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
