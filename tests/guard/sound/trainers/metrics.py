"""Metrics of a classifier, kept on the device for a whole evaluation: a confusion matrix, a histogram of scores,
calibration, running moments, the worst examples. They are downloaded together, once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
CLASSES, BINS, BATCHES, ROWS = 3, 8, 5, 16


class Metric:
    """A named table on the device that is updated batch by batch."""

    def __init__(self, *shape: int) -> None:
        self.table = torch.zeros(*shape, device=DEVICE)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        raise NotImplementedError


class Confusion(Metric):
    def __init__(self) -> None:
        super().__init__(CLASSES * CLASSES)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        # One bin for each pair; bincount would have to ask for the largest.
        pairs = labels * CLASSES + scores.argmax(-1)
        self.table.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=self.table.dtype))


class Calibration(Metric):
    """Rows are bins of confidence: count, sum of confidences, number of hits."""

    def __init__(self) -> None:
        super().__init__(BINS, 3)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        sure, chosen = scores.softmax(-1).max(-1)
        bins = (sure * BINS).long().clamp_(max=BINS - 1)
        self.table.index_add_(0, bins, torch.stack((torch.ones_like(sure), sure, (chosen == labels).float()), dim=1))


class Histogram(Metric):
    def __init__(self) -> None:
        super().__init__(BINS)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.table += torch.histc(scores.float(), bins=BINS, min=-4.0, max=4.0)


class Moments(Metric):
    """Count, mean and sum of squared differences, joined batch by batch."""

    def __init__(self) -> None:
        super().__init__(3)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        values = nn.functional.cross_entropy(scores, labels, reduction="none")
        count, mean, squares = self.table.unbind()
        apart, total = values.mean() - mean, count + values.numel()
        squares = squares + (values - values.mean()).square().sum() + apart.square() * count * values.numel() / total
        self.table = torch.stack((total, mean + apart * values.numel() / total, squares))


class Worst(Metric):
    def __init__(self, keep: int = 4) -> None:
        super().__init__(keep)
        self.table.fill_(float("-inf"))

    def update(self, scores: Tensor, labels: Tensor) -> None:
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        self.table = torch.cat((self.table, losses)).topk(len(self.table)).values


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(50)
    for _ in range(BATCHES):
        labels = torch.randint(CLASSES, (ROWS,), generator=generator, device=DEVICE)
        x = torch.randn(ROWS, 6, generator=generator, device=DEVICE)
        x[:, :CLASSES] += nn.functional.one_hot(labels, CLASSES)
        yield x, labels


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(51)
    model = nn.Linear(6, CLASSES, device=DEVICE).eval()
    metrics = [Confusion(), Calibration(), Histogram(), Moments(), Worst()]
    for x, labels in batches():
        scores = model(x)
        for metric in metrics:
            metric.update(scores, labels)
    flat = torch.cat([metric.table.flatten() for metric in metrics])
    home = torch.empty(len(flat), pin_memory=True).copy_(flat, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # san: ok(the evaluation is over)
    confusion, calibration, histogram, moments, worst = home.split([metric.table.numel() for metric in metrics])
    assert confusion.sum() == calibration.view(BINS, 3)[:, 0].sum() == moments[0] == BATCHES * ROWS
    assert histogram.sum() <= BATCHES * ROWS * CLASSES
    variance = moments[2] / (moments[0] - 1)
    right = confusion.view(CLASSES, CLASSES).diagonal().sum() / confusion.sum()
    print(f"right {right:.2f}, loss {moments[1]:.2f} +- {variance.sqrt():.2f}, worst {worst.tolist()[0]:.2f}")


main()
