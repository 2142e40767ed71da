"""cast_backward_bad, mended: the batch is refilled after the event of its upload."""

import torch
from torch import nn
from torch.nn import functional as F

with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)).to(torch.bfloat16)
batch, uploaded = torch.zeros(4, 8, pin_memory=True), torch.cuda.Event()  # san: ok(set-up)
labels = torch.zeros(4, dtype=torch.long, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    uploaded.synchronize()  # san: ok(the batch is free soon)
    batch.uniform_(0, step + 1)
    x = batch.to("cuda", torch.bfloat16, non_blocking=True)
    uploaded.record()
    loss = F.cross_entropy(model(x).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
