"""Trains a small denoiser and samples from it. The schedule is a table on the device; steps are drawn and looked up
there, and the sampler walks numbers of the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
STEPS, POINTS = 16, 32


class Schedule(NamedTuple):
    signal: Tensor
    noise: Tensor

    @classmethod
    def cosine(cls, steps: int) -> Schedule:
        angle = torch.linspace(0.02, 0.98, steps, device=DEVICE) * (torch.pi / 2)
        return cls(angle.cos(), angle.sin())

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self.signal[t][:, None], self.noise[t][:, None]


class Denoiser(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, width, device=DEVICE)
        self.enter = nn.Linear(2, width, device=DEVICE)
        self.blocks = nn.ModuleList(nn.Linear(width, width, device=DEVICE) for _ in range(2))
        self.leave = nn.Linear(width, 2, device=DEVICE)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.enter(x) + self.time(t)
        for block in self.blocks:
            hidden = hidden + block(nn.functional.silu(hidden))
        return self.leave(hidden)


def ring(count: int, generator: torch.Generator) -> Tensor:
    angle = 2 * torch.pi * torch.rand(count, generator=generator, device=DEVICE)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def train(model: Denoiser, schedule: Schedule, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns the losses, and the mean loss at each step of the schedule."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, foreach=True)
    sums, counts = torch.zeros(STEPS, device=DEVICE), torch.zeros(STEPS, device=DEVICE)
    losses = []
    for _ in range(12):
        x = ring(POINTS, generator)
        t = torch.randint(STEPS, (POINTS,), generator=generator, device=DEVICE)
        noise = torch.randn(x.shape, generator=generator, device=DEVICE)
        signal_part, noise_part = schedule.at(t)
        errors = (model(signal_part * x + noise_part * noise, t) - noise).square().mean(1)
        weight = (signal_part / noise_part).square().clamp(max=5.0).squeeze(1)
        loss = (weight * errors).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        sums.index_add_(0, t, errors.detach())
        counts.scatter_add_(0, t, torch.ones_like(errors))
        losses.append(errors.detach().mean())
    return torch.stack(losses), sums / counts.clamp(min=1)


@torch.inference_mode()
def sample(model: Denoiser, schedule: Schedule, generator: torch.Generator) -> Tensor:
    x = torch.randn(POINTS, 2, generator=generator, device=DEVICE)
    t = torch.empty(POINTS, dtype=torch.long, device=DEVICE)
    for step in reversed(range(STEPS)):
        noise = model(x, t.fill_(step))
        clean = ((x - schedule.noise[step] * noise) / schedule.signal[step]).clamp(-1.5, 1.5)
        x = clean if step == 0 else schedule.signal[step - 1] * clean + schedule.noise[step - 1] * noise
    return x


def main() -> None:
    torch.manual_seed(30)
    generator = torch.Generator(DEVICE).manual_seed(31)
    schedule, model = Schedule.cosine(STEPS), Denoiser()
    losses, by_step = train(model, schedule, generator)
    points = sample(model.eval(), schedule, generator)
    radius = points.norm(dim=1).mean()
    numbers = torch.cat((losses, by_step, radius[None])).to("cpu")  # san: ok(one download at the end)
    first, last = numbers[0].item(), numbers[len(losses) - 1].item()
    assert numbers.isfinite().all() and last < first
    print(f"error {first:.2f} to {last:.2f}, radius {numbers[-1].item():.2f}")


main()
