"""A prefetcher: while the model computes on one batch, a side stream uploads the next from a pinned ring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor


def source(count: int, rows: int) -> Iterator[Batch]:
    """Yield batches on the host, as a decoder of images would."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        images = torch.randint(0, 256, (rows, 3, 8, 8), generator=generator, dtype=torch.uint8)
        yield Batch(images, images.flatten(1).sum(1, dtype=torch.long) % 4)


class Slot:
    def __init__(self, rows: int) -> None:
        self.images = torch.empty(rows, 3, 8, 8, dtype=torch.uint8, pin_memory=True)
        self.labels = torch.empty(rows, dtype=torch.long, pin_memory=True)
        self.read = torch.cuda.Event()


class Prefetcher:
    """Uploads one batch ahead. Slots are filled again when the upload that read them has passed."""

    def __init__(self, batches: Iterable[Batch], rows: int, depth: int = 2) -> None:
        self._batches = iter(batches)
        self._stream = torch.cuda.Stream()
        self._slots = [Slot(rows) for _ in range(depth)]
        self._at = 0
        self._mean = torch.full((1, 3, 1, 1), 127.5, device="cuda")
        self._next = self._upload()

    def _upload(self) -> Batch | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        slot = self._slots[self._at % len(self._slots)]
        self._at += 1
        slot.read.synchronize()  # san: ok(the upload of two batches ago)
        slot.images.copy_(batch.images)
        slot.labels.copy_(batch.labels)
        # The table of means was written on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            images = slot.images.to("cuda", non_blocking=True)
            labels = slot.labels.to("cuda", non_blocking=True)
            slot.read.record()
            images = images.float().sub_(self._mean).div_(self._mean)
        return Batch(images, labels)

    def __iter__(self) -> Iterator[Batch]:
        while self._next is not None:
            compute = torch.cuda.current_stream()
            compute.wait_stream(self._stream)
            batch = self._next
            for part in batch:
                part.record_stream(compute)
            self._next = self._upload()
            yield batch


def main() -> None:
    torch.manual_seed(8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, device="cuda"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4, device="cuda"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen, correct, total = 0, torch.zeros((), dtype=torch.long, device="cuda"), torch.zeros((), device="cuda")
    for images, labels in Prefetcher(source(6, rows=5), rows=5):
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seen += labels.shape[0]
        correct += (logits.detach().argmax(1) == labels).sum()
        total += loss.detach() * labels.shape[0]
    hits, loss = correct.item(), total.item() / seen  # san: ok(the end of the epoch)
    assert seen == 30
    print(f"{seen} images, loss {loss:.3f}, {hits} right")


main()
