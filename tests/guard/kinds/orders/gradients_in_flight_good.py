"""Data parallel by hand: the optimizer comes after the works, whose tensors may be freed while they are in flight."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="cuda"), torch.nn.ReLU(), torch.nn.Linear(8, 8, device="cuda"))
works = []


def reduce(parameter):
    works.append(dist.all_reduce(parameter.grad, async_op=True))


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(reduce)
for _ in range(3):
    loss = model(torch.ones(4, 8, device="cuda")).square().mean()
    loss.backward()
    seen = dist.all_reduce(loss.detach() * 2, async_op=True)  # nothing else holds what it works on
    del loss
    for work in works:
        work.wait()
    works.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    seen.wait()
dist.destroy_process_group()
