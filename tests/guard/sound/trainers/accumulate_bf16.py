"""Trains under bfloat16 autocast with accumulated gradients. The loss of every update reaches the log a few steps late,
through a ring of pinned numbers whose events are polled, so that the loop itself waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
MICRO_BATCHES, UPDATES, LOG_EVERY = 4, 6, 2
WIDTH, CLASSES, ROWS = 16, 5, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 32, device=DEVICE), nn.GELU(), nn.LayerNorm(32, device=DEVICE),
            nn.Linear(32, CLASSES, device=DEVICE),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class LateLog:
    """Numbers on their way from the device. A slot is used again when its number has been printed."""

    def __init__(self, slots: int) -> None:
        self.ring = torch.zeros(slots, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(slots)]
        self.free = deque(range(slots))
        self.coming: deque[tuple[int, int]] = deque()
        self.lines: list[str] = []

    def send(self, step: int, value: Tensor) -> None:
        if not self.free:
            self.take(wait=True)
        slot = self.free.popleft()
        self.ring[slot].copy_(value, non_blocking=True)
        self.events[slot].record()
        self.coming.append((step, slot))

    def poll(self) -> None:
        while self.coming and self.events[self.coming[0][1]].query():
            self.take(wait=False)

    def take(self, wait: bool) -> None:
        step, slot = self.coming.popleft()
        if wait:
            self.events[slot].synchronize()  # san: ok(the ring is full, or training has ended)
        self.lines.append(f"step {step}: {float(self.ring[slot]):.3f}")
        self.free.append(slot)

    def close(self) -> list[str]:
        while self.coming:
            self.take(wait=True)
        return self.lines


def micro_batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches on the device: nothing is copied."""
    while True:
        x = torch.randn(ROWS, WIDTH, generator=generator, device=DEVICE)
        yield x, x[:, :CLASSES].argmax(-1)


def train() -> list[str]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    batches = micro_batches(torch.Generator(DEVICE).manual_seed(1))
    log = LateLog(slots=2)
    for step in range(UPDATES):
        total = torch.zeros((), device=DEVICE)
        for _ in range(MICRO_BATCHES):
            x, wanted = next(batches)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), wanted) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            log.send(step, total)
        log.poll()
    return log.close()


if __name__ == "__main__":
    lines = train()
    assert len(lines) == UPDATES // LOG_EVERY
    print("\n".join(lines))
