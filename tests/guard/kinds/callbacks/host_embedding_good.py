"""host_embedding_bad, mended: the embedding is on the device, too."""

import torch
from torch import nn

table = nn.Embedding(8, 4, device="cuda")
model = nn.Linear(4, 2, device="cuda")
rows = torch.arange(8, device="cuda")
for _ in range(2):
    loss = model(table(rows)).square().sum()
    loss.backward()
assert table.weight.grad.is_cuda
