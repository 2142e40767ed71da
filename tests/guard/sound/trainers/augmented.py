"""Augments images with numpy on a thread, into a ring of pinned buffers that both sides hand over through queues."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch
from torch import nn

DEVICE = torch.device("cuda")
ROWS, SIDE, CROP, BATCHES, SLOTS = 6, 10, 8, 7, 3
MEAN, SPREAD = np.float32(0.45), np.float32(0.25)


class Slot:
    def __init__(self) -> None:
        self.images = torch.empty(ROWS, 1, CROP, CROP, pin_memory=True)
        self.labels = torch.empty(ROWS, dtype=torch.int64, pin_memory=True)
        self.images_np, self.labels_np = self.images.numpy(), self.labels.numpy()
        self.uploaded: torch.cuda.Event | None = None


class Augmenter(threading.Thread):
    """Takes free slots, waits for their last upload, and fills them with crops, flips and noise."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="augmenter", daemon=True)
        self.rng = np.random.default_rng(seed)
        self.images = self.rng.random((32, SIDE, SIDE), dtype=np.float32)
        self.labels = (self.images.mean((1, 2)) > 0.5).astype(np.int64)
        self.free: queue.Queue[Slot] = queue.Queue()
        self.full: queue.Queue[Slot | None] = queue.Queue()
        for _ in range(SLOTS):
            self.free.put(Slot())

    def run(self) -> None:
        for _ in range(BATCHES):
            slot = self.free.get()
            if slot.uploaded is not None:
                slot.uploaded.synchronize()  # san: ok(this thread launches nothing)
            self.fill(slot)
            self.full.put(slot)
        self.full.put(None)

    def fill(self, slot: Slot) -> None:
        chosen = self.rng.choice(len(self.images), ROWS, replace=False)
        tops, lefts = self.rng.integers(0, SIDE - CROP + 1, (2, ROWS))
        for row, (image, top, left) in enumerate(zip(self.images[chosen], tops, lefts, strict=True)):
            crop = image[top : top + CROP, left : left + CROP]
            slot.images_np[row, 0] = crop[:, ::-1] if self.rng.random() < 0.5 else crop
        slot.images_np += self.rng.normal(0, 0.02, slot.images_np.shape).astype(np.float32)
        np.subtract(slot.images_np, MEAN, out=slot.images_np)
        np.divide(slot.images_np, SPREAD, out=slot.images_np)
        slot.labels_np[:] = self.labels[chosen]


def upload(slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
    images = slot.images.to(DEVICE, non_blocking=True)
    labels = slot.labels.to(DEVICE, non_blocking=True)
    slot.uploaded = torch.cuda.Event()
    slot.uploaded.record()
    return images, labels


def main() -> None:
    torch.manual_seed(60)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, device=DEVICE), nn.ReLU(), nn.Flatten(), nn.Linear(54, 2, device=DEVICE)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    augmenter = Augmenter(seed=61)
    augmenter.start()
    losses = torch.zeros(BATCHES, device=DEVICE)
    step = 0
    while (slot := augmenter.full.get()) is not None:
        images, labels = upload(slot)
        augmenter.free.put(slot)
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[step].copy_(loss.detach())
        step += 1
    augmenter.join()
    values = losses.tolist()  # san: ok(the last batch has been launched)
    assert step == BATCHES and all(np.isfinite(values))
    print(" ".join(f"{value:.3f}" for value in values))


main()
