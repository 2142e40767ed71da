"""Clips gradients by their common norm and keeps an average of the weights, all on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

DEVICE = "cuda"


@dataclass(frozen=True)
class Options:
    steps: int = 8
    rows: int = 12
    width: int = 10
    most_norm: float = 0.5
    decay: float = 0.9


class Ema:
    """An exponential moving average of a module's weights. Buffers are copied, not averaged."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.shadow = copy.deepcopy(module).requires_grad_(False).eval()
        self._ours = [one.detach() for one in self.shadow.parameters()]
        self._theirs = [one.detach() for one in module.parameters()]
        self._buffers = list(zip(self.shadow.buffers(), module.buffers(), strict=True))
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        # Early on the average would be of the random start.
        decay = min(self._decay, (1 + step) / (10 + step))
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            ours.lerp_(theirs, 1.0 - decay)
        for ours, theirs in self._buffers:
            ours.copy_(theirs)


def clip(parameters: list[nn.Parameter], most: float) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `most`; returns the norm, on the device."""
    grads = [one.grad for one in parameters if one.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)
    return norm


def make(options: Options) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(options.width, 20, device=DEVICE),
        nn.BatchNorm1d(20, device=DEVICE),  # san: ok(set-up: its counter is uploaded)
        nn.SiLU(),
        nn.Linear(20, options.width, device=DEVICE),
    )


def main(options: Options) -> None:
    model = make(options)
    ema = Ema(model, options.decay)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    norms = torch.empty(options.steps, device=DEVICE)
    worst = torch.zeros((), device=DEVICE)
    for step in range(options.steps):
        x = torch.randn(options.rows, options.width, device=DEVICE)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = clip(parameters, options.most_norm)
        optimizer.step()
        ema.update(step)
        norms[step].copy_(norm)
        worst = torch.maximum(worst, norm)

    x = torch.randn(options.rows, options.width, device=DEVICE)
    with torch.inference_mode():
        difference = (ema.shadow(x) - model.eval()(x)).abs().mean()
    home = torch.empty(options.steps + 2, pin_memory=True)
    home[: options.steps].copy_(norms, non_blocking=True)
    home[options.steps].copy_(worst, non_blocking=True)
    home[options.steps + 1].copy_(difference, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # san: ok(training is over)
    *each, most, apart = home.tolist()
    assert most == max(each) and apart > 0
    print("norms", [round(norm, 2) for norm in each], "apart", round(apart, 4))


main(Options())
