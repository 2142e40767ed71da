"""diffusers' group offloading: the weights of the next block come on a stream of their own while a block computes.

With `bare` the model has nothing beside its blocks.
"""

import sys

import torch
from diffusers.hooks import apply_group_offloading
from torch import nn


class Net(nn.Module):
    def __init__(self, is_bare: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if is_bare else nn.LayerNorm(64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))
        if is_bare:
            del self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) if hasattr(self, "norm") else x


model = Net("bare" in sys.argv).eval()
apply_group_offloading(
    model, torch.device("cuda"), torch.device("cpu"), num_blocks_per_group=1, use_stream=True, non_blocking=True,
    record_stream=True,
)  # fmt: skip
x = torch.randn(8, 64, device="cuda")
with torch.no_grad():
    for _ in range(4):
        x = model(x)
torch.cuda.synchronize()
print("done")
