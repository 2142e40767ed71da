"""Tensor parallel by functional collectives: a bucket of sums is reduced together, and read before that ends."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
left, right = torch.ones(4, 8, device="cuda"), torch.ones(4, 8, device="cuda")
for _ in range(3):
    both = ops.all_reduce_coalesced([left, right], "sum", name)
    left.mul_(0.5)  # the collective works on a copy
    right = torch.relu(both[1])  # finds: race
    left = functional.wait_tensor(both[0])
dist.destroy_process_group()
