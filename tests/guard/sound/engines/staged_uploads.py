"""Double-buffered uploads: batches are packed into two pinned halves and copied on a stream of their own."""

import numpy as np
import torch

BATCHES, ROWS, WIDTH = 9, 16, 32


class Stage:
    """Half of the staging memory, with two events: copied to the device, and used there."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.view = host.numpy()
        self.device = torch.empty(host.shape, device="cuda")
        self.copied = torch.cuda.Event(blocking=True)
        self.used = torch.cuda.Event()


class Uploader:
    def __init__(self) -> None:
        memory = torch.empty(2, ROWS, WIDTH, pin_memory=True)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.stages = [Stage(half) for half in memory]

    def submit(self, number: int, rows: np.ndarray) -> Stage:
        stage = self.stages[number % 2]
        stage.copied.synchronize()  # san: ok(two batches ago, and on this thread nothing else is to be done)
        np.copyto(stage.view[: len(rows)], rows)
        stage.view[len(rows) :] = 0
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(stage.used)
            stage.device.copy_(stage.host, non_blocking=True)
            stage.copied.record()
        return stage


def batches(seed: int):
    generator = np.random.default_rng(seed)
    for number in range(BATCHES):
        yield generator.standard_normal((ROWS - number % 3, WIDTH), dtype=np.float32)


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
    total = torch.zeros(WIDTH, device="cuda")
    uploader, compute = Uploader(), torch.cuda.current_stream()
    pending = None
    for number, rows in enumerate(batches(11)):
        stage = uploader.submit(number, rows)
        if pending is not None:
            consume(pending, compute, weight, total)
        pending = stage
    assert pending is not None
    consume(pending, compute, weight, total)
    print([round(value, 3) for value in total[:5].tolist()])  # san: ok(the result)


def consume(stage: Stage, compute: torch.cuda.Stream, weight: torch.Tensor, total: torch.Tensor) -> None:
    compute.wait_event(stage.copied)
    hidden = torch.relu(stage.device @ weight)
    total.add_(hidden.sum(0))
    stage.used.record()


main()
