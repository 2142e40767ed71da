"""A model larger than the device: weights stay in pinned memory and are streamed layer by layer, two layers ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LAYERS, WIDTH, HIDDEN, WINDOW = 6, 16, 48, 2


@dataclass(frozen=True)
class Shard:
    """The weights of a layer, flat, as they are stored."""

    flat: torch.Tensor

    @staticmethod
    def views(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat[: WIDTH * HIDDEN].view(WIDTH, HIDDEN), flat[WIDTH * HIDDEN :].view(HIDDEN, WIDTH)


def store(seed: int) -> list[Shard]:
    """Return the layers, all of them views of one pinned allocation."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.empty(LAYERS, 2 * WIDTH * HIDDEN, pin_memory=True)
    for layer in memory:
        layer.normal_(std=WIDTH**-0.5, generator=generator)
    return [Shard(layer) for layer in memory]


class Window:
    """A ring of device buffers, filled on a copy stream and emptied by the compute stream."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.stream = torch.cuda.Stream()
        self.buffers = torch.empty(WINDOW, 2 * WIDTH * HIDDEN, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())
        self.filled = [torch.cuda.Event() for _ in range(WINDOW)]
        self.emptied = [torch.cuda.Event() for _ in range(WINDOW)]
        self.next = 0

    def prefetch(self) -> None:
        """Begin the copy of the next layer; after the last one the first follows."""
        place, layer = self.next % WINDOW, self.next % LAYERS
        self.stream.wait_event(self.emptied[place])
        with torch.cuda.stream(self.stream):
            self.buffers[place].copy_(self.shards[layer].flat, non_blocking=True)
        self.filled[place].record(self.stream)
        self.next += 1

    def use(self, number: int, apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        place, compute = number % WINDOW, torch.cuda.current_stream()
        compute.wait_event(self.filled[place])
        result = apply(*Shard.views(self.buffers[place]))
        self.emptied[place].record(compute)
        return result


class Streamed:
    def __init__(self, shards: list[Shard]) -> None:
        self.window = Window(shards)
        self.count = 0
        for _ in range(WINDOW):
            self.window.prefetch()

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            hidden = self.window.use(self.count, lambda up, down, x=hidden: x + torch.relu(x @ up) @ down)
            self.count += 1
            self.window.prefetch()
        return hidden


def resident(shards: list[Shard], hidden: torch.Tensor) -> torch.Tensor:
    """Compute the same with all weights on the device."""
    for shard in shards:
        up, down = Shard.views(shard.flat.to("cuda", non_blocking=True))
        hidden = hidden + torch.relu(hidden @ up) @ down
    return hidden


def main() -> None:
    shards = store(9)
    model = Streamed(shards)
    worst = torch.zeros((), device="cuda")
    for batch in range(4):
        x = torch.linspace(-1, 1, 3 * WIDTH, device="cuda").view(3, WIDTH) * (batch + 1)
        streamed = model(x)
        worst = torch.maximum(worst, (streamed - resident(shards, x)).abs().max())
    torch.cuda.synchronize()  # san: ok(the end)
    is_close = float(worst) < 1e-4  # san: ok(the result)
    print(f"{model.count} layers used, {model.window.next} copied, equal: {is_close}")


main()
