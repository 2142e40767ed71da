"""A side stream computes what a collective takes, which comes after the stream that is current at its call."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
side = torch.cuda.Stream()
x, total = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
for step in range(3):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        partial = x * step
        total.add_(partial)
    work = dist.all_reduce(total, async_op=True)  # finds: race
    x = x + 1
    work.wait()
    torch.cuda.current_stream().wait_stream(side)
dist.destroy_process_group()
