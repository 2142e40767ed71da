"""shape_by_copy_bad, mended: a tensor without memory has the shape, and copies nothing."""

import torch

x = torch.ones(3, device="cuda")
for _ in range(2):
    x.sum()
