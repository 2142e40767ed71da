"""Trains from a DataLoader that collates into pinned memory, with mixup and smoothed labels, and a warm-up schedule."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = torch.device("cuda")
CLASSES, FEATURES, ROWS, EPOCHS = 4, 10, 8, 2


class Blobs(Dataset):
    """Points around one centre for each class; everything is on the host."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        self.labels = torch.arange(count) % CLASSES
        self.points = centres[self.labels] + 0.3 * torch.randn(count, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def mixup(x, target, generator):
    """Mix each row with another. The share and the order are drawn on the device."""
    share = torch.rand(len(x), 1, generator=generator, device=x.device)
    share = torch.maximum(share, 1 - share)
    order = torch.randperm(len(x), generator=generator, device=x.device)
    return share * x + (1 - share) * x[order], share * target + (1 - share) * target[order]


def smoothed(labels, amount=0.1):
    target = torch.full((len(labels), CLASSES), amount / CLASSES, device=labels.device)
    return target.scatter_add_(1, labels[:, None], torch.full_like(labels[:, None], 1 - amount, dtype=target.dtype))


def warm_then_cosine(step: int, warm: int = 3, total: int = 10) -> float:
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Blobs(40, seed=1), batch_size=ROWS, shuffle=True, pin_memory=True, drop_last=True,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(FEATURES, 32, device=DEVICE), nn.ReLU(), nn.Linear(32, CLASSES, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_then_cosine)
    generator = torch.Generator(DEVICE).manual_seed(3)
    losses = []
    for _ in range(EPOCHS):
        total = torch.zeros((), device=DEVICE)
        for points, labels in loader:
            x = points.to(DEVICE, non_blocking=True)
            target = smoothed(labels.to(DEVICE, non_blocking=True))
            x, target = mixup(x, target, generator)
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total.add_(loss.detach())
        losses.append(total / len(loader))
    first, last = torch.stack(losses).tolist()  # san: ok(once, when training is over)
    assert last < first
    print(f"loss {first:.3f} then {last:.3f}, lr {schedule.get_last_lr()[0]:.3f}")


if __name__ == "__main__":
    main()
