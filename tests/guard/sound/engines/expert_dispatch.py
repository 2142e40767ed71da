"""A mixture of experts that run on four streams, with fixed room for each of them instead of counts on the host."""

from __future__ import annotations

import torch
from torch import nn

TOKENS, WIDTH, EXPERTS, TOP, STREAMS = 16, 12, 6, 2, 4
ROOM = TOKENS


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False, device="cuda")
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Mixture(nn.Module):
    """Each expert has a row for every token; rows past its load are zero, and stay so without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, device="cuda")
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.ready = torch.cuda.Event()
        self.finished = [torch.cuda.Event() for _ in range(STREAMS)]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight and the place of each choice; the place is its expert's row, by the order of tokens."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        flat = nn.functional.one_hot(chosen, EXPERTS).view(-1, EXPERTS)
        row = ((flat.cumsum(0) - 1) * flat).sum(-1)
        return weights / weights.sum(-1, keepdim=True), chosen.view(-1) * ROOM + row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, places = self.route(x)
        inputs = x.new_zeros(EXPERTS * ROOM, WIDTH).index_copy(0, places, x.repeat_interleave(TOP, 0))
        outputs = torch.empty_like(inputs)
        self.run_experts(inputs.view(EXPERTS, ROOM, WIDTH), outputs.view(EXPERTS, ROOM, WIDTH))
        return (outputs[places].view(-1, TOP, WIDTH) * weights[..., None]).sum(1)

    def run_experts(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        self.ready.record(current)
        for number, stream in enumerate(self.streams):
            stream.wait_event(self.ready)
            with torch.cuda.stream(stream):
                for expert in range(number, EXPERTS, STREAMS):
                    outputs[expert].copy_(self.experts[expert](inputs[expert]))
                self.finished[number].record(stream)
        for event in self.finished:
            current.wait_event(event)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the same with every expert on every token."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (picked * weights[..., None]).sum(1)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(6)
    layers = [Mixture() for _ in range(2)]
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    y, expected = x, x
    for layer in layers:
        y = y + layer(y)
        expected = expected + layer.dense(expected)
    difference = torch.stack([(y - expected).abs().max(), y.abs().mean()])
    worst, size = difference.tolist()  # san: ok(the result)
    assert worst < 1e-4, worst
    print(f"mean size {size:.3f} after {len(layers)} layers")


if __name__ == "__main__":
    main()
