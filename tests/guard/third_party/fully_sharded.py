"""torch's FSDP2 in one process: `mixed` trains in bfloat16, `offload` keeps weights and the optimizer on the host."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
options = {
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}
given = options.get(sys.argv[1], {})
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
model = model if sys.argv[1] == "offload" else model.cuda()
for block in model:
    fully_shard(block, **given)
fully_shard(model, **given)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(4, 16, device="cuda")
for _ in range(3):
    model(x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
print("done")
