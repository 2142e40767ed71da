"""A loader that copies the next batch on a side stream while the model works on the one before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]


class Prefetcher:
    """Iterates over batches on the device. A batch belongs to the current stream once it is given out."""

    def __init__(self, loader: DataLoader, scale: float) -> None:
        self.loader = loader
        self.scale = scale
        self.stream = torch.cuda.Stream()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self.loader)
        following = self._fetch(source)
        while following is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            batch = following
            for tensor in batch:
                tensor.record_stream(current)  # it was made on the side stream
            following = self._fetch(source)
            yield batch

    def _fetch(self, source: Iterator[Batch]) -> Batch | None:
        try:
            images, labels = next(source)
        except StopIteration:
            return None
        with torch.cuda.stream(self.stream):
            images = images.to("cuda", non_blocking=True)
            labels = labels.to("cuda", non_blocking=True)
            return images.float().mul_(self.scale).sub_(0.5), labels


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)
        self.head = torch.nn.Linear(4 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(images)).flatten(1))


@torch.inference_mode()
def evaluate(model: torch.nn.Module, batches: Prefetcher) -> tuple[int, int]:
    right = torch.zeros((), dtype=torch.int64, device="cuda")
    seen = 0
    for images, labels in batches:
        right += (model(images).argmax(-1) == labels).sum()
        seen += len(labels)
    return int(right), seen  # san: ok(one read for the whole set)


def main() -> None:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (50, 3, 16, 16), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (50,), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, pin_memory=True)
    torch.manual_seed(1)
    model = Classifier().to("cuda").eval()  # san: ok(weights go up once)
    batches = Prefetcher(loader, 1 / 255)
    first, second = evaluate(model, batches), evaluate(model, batches)
    assert first == second
    print(f"{first[0]} of {first[1]} right in {len(batches)} batches")


if __name__ == "__main__":
    main()
