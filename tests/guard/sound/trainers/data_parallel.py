"""DistributedDataParallel in a group of one rank: buckets, no_sync for accumulated gradients, a communication hook, and
a mean over ranks that is started early and waited for late.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = torch.device("cuda", 0)
MICRO, UPDATES, ROWS = 2, 4, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 32, device=DEVICE)
        self.second = nn.Linear(32, 32, device=DEVICE)
        self.out = nn.Linear(32, 1, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.out(hidden + torch.relu(self.second(hidden)))


def halved(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce gradients as bfloat16."""
    small = bucket.buffer().bfloat16().div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return work.get_future().then(back)


def train(model: DistributedDataParallel) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    means = []
    for _ in range(UPDATES):
        total = torch.zeros((), device=DEVICE)
        for micro in range(MICRO):
            x = torch.randn(ROWS, 10, device=DEVICE)
            # Gradients are reduced once an update.
            with model.no_sync() if micro < MICRO - 1 else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), x[:, :1]) / MICRO
                loss.backward()
            total += loss.detach()
        work = dist.all_reduce(total, async_op=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        work.wait()
        means.append(total / dist.get_world_size())
    return torch.stack(means)


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(80)
        plain = DistributedDataParallel(Net(), device_ids=[0], bucket_cap_mb=1, gradient_as_bucket_view=True)
        hooked = DistributedDataParallel(Net(), device_ids=[0])
        hooked.register_comm_hook(dist.group.WORLD, halved)
        both = torch.stack((train(plain), train(hooked)))
        rows = both.tolist()  # san: ok(the end)
    finally:
        dist.destroy_process_group()
    for row in rows:
        print(" ".join(f"{loss:.3f}" for loss in row))


main()
