"""Keeps saved activations in pinned host memory: hooks copy them out on one side stream in forward, and in again on
another in backward. Events order the streams; the host waits only for memory that is to be used again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
SMALLEST = 64
"""Elements below which an activation stays where it is"""


@dataclass
class Stored:
    host: Tensor
    arrived: torch.cuda.Event


class Offload:
    """Hooks for saved tensors. `pool` is a free list of pinned buffers by shape and type."""

    def __init__(self) -> None:
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.pool: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, torch.cuda.Event]]] = {}
        self.moved = 0

    def _buffer(self, like: Tensor) -> Tensor:
        free = self.pool.setdefault((like.shape, like.dtype), [])
        if not free:
            return torch.empty(
                like.shape, dtype=like.dtype, pin_memory=True
            )  # san: ok(the pool grows in the first step)
        host, read = free.pop(0)
        read.synchronize()  # san: ok(its upload, a step ago, has long been done)
        return host

    def pack(self, saved: Tensor) -> Tensor | Stored:
        small = saved.numel() < SMALLEST or not saved.is_contiguous()
        if small or not saved.is_cuda or isinstance(saved, nn.Parameter):
            return saved
        host, arrived = self._buffer(saved), torch.cuda.Event()
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(saved, non_blocking=True)
            arrived.record()
        # The copy still reads the activation when forward has dropped it.
        saved.record_stream(self.out)
        self.moved += 1
        return Stored(host, arrived)

    def unpack(self, stored: Tensor | Stored) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        compute, read = torch.cuda.current_stream(), torch.cuda.Event()
        with torch.cuda.stream(self.back):
            self.back.wait_event(stored.arrived)
            there = stored.host.to(DEVICE, non_blocking=True)
            read.record()
        compute.wait_event(read)
        there.record_stream(compute)
        self.pool[stored.host.shape, stored.host.dtype].append((stored.host, read))
        return there


def build() -> nn.Module:
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(24, 24, device=DEVICE), nn.SiLU(), nn.LayerNorm(24, device=DEVICE)]
    return nn.Sequential(*layers)


def train(offload: Offload | None, steps: int = 3) -> Tensor:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.linspace(-1, 1, 8 * 24, device=DEVICE).view(8, 24)
    losses = torch.zeros(steps, device=DEVICE)
    for step in range(steps):
        if offload is None:
            loss = model(x).sub(x.flip(0)).square().mean()
        else:
            with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
                loss = model(x).sub(x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step].copy_(loss.detach())
    return losses


offload = Offload()
plain, moved = train(None), train(offload)
same = torch.stack([plain, moved]).tolist()  # san: ok(the end)
assert same[0] == same[1] and offload.moved > 6
print(offload.moved, "activations were moved:", [round(loss, 3) for loss in same[1]])
