"""An embedding stays on the host, and its rows go to the device: so their gradient has to come back, in backward."""

import torch
from torch import nn

table = nn.Embedding(8, 4)
model = nn.Linear(4, 2, device="cuda")
rows = torch.arange(8)
for _ in range(2):
    staged = table(rows).to("cuda")  # finds: upload
    loss = model(staged).square().sum()
    loss.backward()  # finds: copy-to-host
assert not table.weight.grad.is_cuda
