"""A tensor's shape is asked for by a copy to the host."""

import torch

x = torch.ones(3, device="cuda")
for _ in range(2):
    x.cpu()  # finds: copy-to-host
