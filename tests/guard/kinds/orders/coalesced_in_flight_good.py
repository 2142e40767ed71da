"""Two reductions are started together; the metrics are read after the manager has waited for both."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
loss, tokens = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
for _ in range(3):
    loss.add_(0.5)
    tokens.add_(128)
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
        dist.all_reduce(loss)
        dist.all_reduce(tokens)
    manager.wait()
    mean = loss / tokens
dist.destroy_process_group()
