"""A whole training step in a CUDA graph: warmed up on a side stream, captured once, and replayed for each batch.
Batches are copied into the graph's own input through a ring of pinned buffers.
"""

from __future__ import annotations

import torch
from torch import nn

DEVICE = torch.device("cuda")
ROWS, WIDTH, DEPTH, STEPS = 8, 12, 2, 7


class Captured:
    """Holds the inputs and outputs of the graph: replays read and write these and no others."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.x = torch.zeros(ROWS, WIDTH, device=DEVICE)
        self.y = torch.zeros(ROWS, 1, device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)
        self.total = torch.zeros((), device=DEVICE)
        self.graph = torch.cuda.CUDAGraph()
        self._warm_up()
        self._capture()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.total.add_(self.loss)

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self) -> None:
        with torch.cuda.graph(self.graph):  # san: ok(set-up: once, before the loop)
            self._step()
        self.total.zero_()

    def replay(self) -> None:
        self.graph.replay()


class Feeder:
    """Fills pinned buffers in turn. Each is filled again when its upload has passed."""

    def __init__(self) -> None:
        self.inputs = torch.empty(DEPTH, ROWS, WIDTH, pin_memory=True)
        self.targets = torch.empty(DEPTH, ROWS, 1, pin_memory=True)
        self.uploaded = [torch.cuda.Event() for _ in range(DEPTH)]
        self.generator = torch.Generator().manual_seed(41)

    def feed(self, step: int, captured: Captured) -> None:
        slot = step % DEPTH
        self.uploaded[slot].synchronize()  # san: ok(the upload of two steps ago)
        x, y = self.inputs[slot], self.targets[slot]
        x.normal_(generator=self.generator)
        torch.mean(x, dim=1, keepdim=True, out=y)
        # The copies come after the replay before them on the same stream, so its reads are over.
        captured.x.copy_(x, non_blocking=True)
        captured.y.copy_(y, non_blocking=True)
        self.uploaded[slot].record()


def main() -> None:
    torch.manual_seed(40)
    model = nn.Sequential(nn.Linear(WIDTH, 16, device=DEVICE), nn.Tanh(), nn.Linear(16, 1, device=DEVICE))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    captured, feeder = Captured(model, optimizer), Feeder()
    for step in range(STEPS):
        feeder.feed(step, captured)
        captured.replay()
    mean = (captured.total / STEPS).item()  # san: ok(the end)
    assert mean > 0
    print(f"mean loss of {STEPS} replays {mean:.4f}")


main()
