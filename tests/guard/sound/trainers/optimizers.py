"""Fits one small model by each way in which torch's optimizers stay on the device: foreach, fused, capturable steps,
rates that are device tensors, schedules of every kind, and averaged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DEVICE = torch.device("cuda")
STEPS = 6
Parameters = Iterable[nn.Parameter]


def capturable(parameters: Parameters) -> torch.optim.Optimizer:
    rate = torch.full((), 0.02, device=DEVICE)
    return torch.optim.Adam(parameters, lr=rate, capturable=True)  # san: ok(set-up: it looks at the rate once)


WAYS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "adam capturable": lambda ps: capturable(ps),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.02, fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.02, amsgrad=True, foreach=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.02, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, foreach=True),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "sgd foreach": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=STEPS),
    "sgd fused": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "adamw fused": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(opt, STEPS - 2)],
        milestones=[2],
    ),
    "rmsprop": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
}


def make_model() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(6, 12, device=DEVICE), nn.Tanh(), nn.Linear(12, 1, device=DEVICE))


def make_data() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 24 * 6, device=DEVICE).view(24, 6).sin()
    return x, x.prod(dim=1, keepdim=True) + x[:, :1]


def fit(name: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses of a fit, [STEPS + 1] on the device; the last is that of the averaged weights."""
    model = make_model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = WAYS[name](list(model.parameters()))
    schedule = SCHEDULES[name](optimizer) if name in SCHEDULES else None
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        averaged.update_parameters(model)
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(nn.functional.huber_loss(averaged(x), y))
    return torch.stack(losses)


def main() -> None:
    x, y = make_data()
    table = torch.stack([fit(name, x, y) for name in WAYS])
    home = torch.empty(table.shape, pin_memory=True)
    home.copy_(table, non_blocking=True)
    torch.cuda.synchronize()  # san: ok(every fit is done)
    for name, row in zip(WAYS, home.tolist(), strict=True):
        assert row[STEPS - 1] < row[0], name
        print(f"{name:16} {row[0]:.4f} to {row[STEPS - 1]:.4f}, averaged {row[STEPS]:.4f}")


main()
