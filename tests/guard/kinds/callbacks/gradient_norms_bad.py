"""A gradient hook writes down the norm of each gradient, as a number on the host."""

import torch
from torch import nn

model = nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []


def note(grad):
    norms.append(grad.norm().tolist())  # finds: host-read


for parameter in model.parameters():
    parameter.register_hook(note)
for _ in range(2):
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
