"""Muon for the matrices and Adam for the rest, in a few lines of torch."""

import torch
from torch import Tensor, nn

from examples.demo_model.network import Network


def orthogonal(update: Tensor, rounds: int = 5) -> Tensor:
    """Brings the singular values of every matrix of [layers, rows, columns] near to one (Newton-Schulz)."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(rounds):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: Tensor = x.mT if tall else x
    return result.float()


class Muon:
    """Momentum, then an orthogonal update of a fixed size per entry."""

    def __init__(self, weights: list[nn.Parameter], rate: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        self.weights, self.rate, self.momentum, self.decay = weights, rate, momentum, decay
        self.velocity = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the rate times `scale`."""
        rate = self.rate * scale
        for weight, velocity in zip(self.weights, self.velocity, strict=True):
            assert weight.grad is not None
            velocity.lerp_(weight.grad, 1 - self.momentum)
            update = orthogonal(weight.grad.lerp(velocity, self.momentum))
            size = 0.2 * max(weight.shape[-2:]) ** 0.5
            weight.mul_(1 - rate * self.decay).add_(update, alpha=-rate * size)


class Optimizer:
    """Both optimizers behind one step."""

    def __init__(self, network: Network, rate: float) -> None:
        rest = [network.embedding, network.norm, *network.scales.parameters()]
        self.rate, self.muon = rate, Muon(list(network.mats.parameters()), rate)
        self.adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
        self.network = network

    def step(self, scale: float) -> None:
        """One update; gradients are cleared afterwards."""
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.muon.step(scale)
        self.adam.param_groups[0]["lr"] = self.rate * scale
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
