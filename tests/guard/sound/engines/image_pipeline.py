"""Images go through stages by generators: decoded on threads, then copied, resized and classified on three streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.nn import functional

SIZE, BATCH, IMAGES, RING = 16, 4, 20, 3


def decode(number: int) -> np.ndarray:
    """Stands for a JPEG decoder: rows of bytes that depend on the number."""
    generator = np.random.default_rng(number)
    return generator.integers(0, 40 + 10 * number, (3, SIZE, SIZE), dtype=np.uint8)


def batches(pool: ThreadPoolExecutor) -> Iterator[list[np.ndarray]]:
    images = pool.map(decode, range(IMAGES))
    batch: list[np.ndarray] = []
    for image in images:
        batch.append(image)
        if len(batch) == BATCH:
            yield batch
            batch = []


class Upload:
    """A ring of pinned and of device batches."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.host = torch.empty(RING, BATCH, 3, SIZE, SIZE, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(RING, BATCH, 3, SIZE, SIZE, dtype=torch.uint8, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())
        self.sent = [torch.cuda.Event(blocking=True) for _ in range(RING)]
        self.read = [torch.cuda.Event() for _ in range(RING)]

    def __call__(self, source: Iterable[list[np.ndarray]]) -> Iterator[tuple[int, torch.Tensor]]:
        for number, batch in enumerate(source):
            slot = number % RING
            self.sent[slot].synchronize()  # san: ok(three batches ago)
            np.stack(batch, out=self.host[slot].numpy())
            self.stream.wait_event(self.read[slot])
            with torch.cuda.stream(self.stream):
                self.device[slot].copy_(self.host[slot], non_blocking=True)
            self.sent[slot].record(self.stream)
            yield slot, self.device[slot]


class Resize:
    def __init__(self, stream: torch.cuda.Stream, upload: Upload) -> None:
        self.stream = stream
        self.upload = upload
        self.mean = torch.full((3, 1, 1), 0.45, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, source: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.cuda.Event]]:
        for slot, images in source:
            self.stream.wait_event(self.upload.sent[slot])
            with torch.cuda.stream(self.stream):
                scaled = images.float().div_(255).sub_(self.mean)
                self.upload.read[slot].record()
                small = functional.interpolate(scaled, scale_factor=0.5, mode="bilinear", align_corners=False)
                made = self.stream.record_event()
            yield small, made


class Classify:
    def __init__(self) -> None:
        torch.manual_seed(30)
        self.conv = torch.nn.Conv2d(3, 8, 3, device="cuda")
        self.head = torch.nn.Linear(8, 5, device="cuda")

    @torch.inference_mode()
    def __call__(self, source: Iterable[tuple[torch.Tensor, torch.cuda.Event]]) -> Iterator[torch.Tensor]:
        current = torch.cuda.current_stream()
        for images, made in source:
            current.wait_event(made)
            hidden = functional.relu(self.conv(images)).mean((2, 3))
            images.record_stream(current)  # the stream before makes new ones for each batch
            yield self.head(hidden).argmax(-1)


def main() -> None:
    upload = Upload(torch.cuda.Stream())
    resize, classify = Resize(torch.cuda.Stream(), upload), Classify()
    with ThreadPoolExecutor(2) as pool:
        classes = list(classify(resize(upload(batches(pool)))))
    print(torch.cat(classes).tolist())  # san: ok(the result)


main()
