"""gradient_norms_bad, mended: the norms stay on the device until something has to show them."""

import torch
from torch import nn

model = nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []


def note(grad):
    assert grad.is_cuda
    norms.append(grad.norm())


for parameter in model.parameters():
    parameter.register_hook(note)
for _ in range(2):
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
