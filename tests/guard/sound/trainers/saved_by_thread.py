"""Saves checkpoints on a thread: a side stream copies the weights to pinned memory, the thread waits for its event and
writes the file, and training goes on at once.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Snapshot:
    step: int
    weights: dict[str, Tensor]
    copied: torch.cuda.Event


class Saver:
    """Two sets of pinned buffers: one may be written to a file while the other is filled."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._stream = torch.cuda.Stream()
        self._free: queue.Queue[dict[str, Tensor]] = queue.Queue()
        for _ in range(2):
            self._free.put({name: self._like(one) for name, one in model.state_dict().items()})
        self._todo: queue.Queue[Snapshot | None] = queue.Queue()
        self.saved: list[Path] = []
        self._thread = threading.Thread(target=self._write, name="saver")
        self._thread.start()

    @staticmethod
    def _like(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def save(self, step: int) -> None:
        home = self._free.get()
        self._stream.wait_stream(torch.cuda.current_stream())
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for name, weight in self._model.state_dict().items():
                home[name].copy_(weight, non_blocking=True)
            copied.record()
        # The next step writes the weights in place, so it has to come after the copies.
        torch.cuda.current_stream().wait_event(copied)
        self._todo.put(Snapshot(step, home, copied))

    def _write(self) -> None:
        while (snapshot := self._todo.get()) is not None:
            snapshot.copied.synchronize()  # san: ok(a thread of its own)
            path = self._folder / f"step{snapshot.step}.pt"
            torch.save({"step": snapshot.step, "model": snapshot.weights}, path)
            self.saved.append(path)
            self._free.put(snapshot.weights)

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()


def main(folder: Path) -> None:
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.ELU(), nn.Linear(8, 8, device=DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saver = Saver(model, folder)
    for step in range(9):
        x = torch.randn(16, 8, device=DEVICE)
        loss = (model(x) - x.cumsum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            saver.save(step)
    saver.close()

    last = torch.load(saver.saved[-1], weights_only=True)
    weight = model[0].weight.detach().cpu()  # san: ok(the end)
    assert torch.equal(last["model"]["0.weight"], weight)
    print([path.name for path in saver.saved], "step", last["step"])


with tempfile.TemporaryDirectory() as name:
    main(Path(name))
