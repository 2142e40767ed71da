"""Decode steps as CUDA graphs, one for each batch size, with static inputs that are copied into before a replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIZES = (1, 2, 4)
VOCAB, WIDTH, LENGTH = 32, 16, 24


class Net:
    def __init__(self) -> None:
        torch.manual_seed(4)
        self.embed = torch.randn(VOCAB, WIDTH, device="cuda")
        self.gate = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
        self.head = torch.randn(WIDTH, VOCAB, device="cuda")
        self.cache = torch.zeros(max(SIZES), LENGTH, WIDTH, device="cuda")

    def __call__(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = len(tokens)
        hidden = self.embed[tokens]
        cache = self.cache[:rows]
        cache.scatter_(1, places.view(rows, 1, 1).expand(rows, 1, WIDTH), hidden[:, None])
        mixed = torch.tanh(cache.sum(1) @ self.gate)
        return ((hidden + mixed) @ self.head).argmax(-1)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor
    places: torch.Tensor
    output: torch.Tensor


class Runner:
    def __init__(self, net: Net) -> None:
        self.net = net
        self.pool = None
        self.inputs = torch.zeros(2, max(SIZES), dtype=torch.int64, device="cuda")
        self.graphs = {size: self._capture(size) for size in reversed(SIZES)}
        net.cache.zero_()  # warm-up and capture have written it

    def _capture(self, size: int) -> Captured:
        tokens, places = self.inputs[0, :size], self.inputs[1, :size]
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(2):
                self.net(tokens, places)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):  # san: ok(before serving)
            output = self.net(tokens, places)
        self.pool = self.pool or graph.pool()
        return Captured(graph, tokens, places, output)

    def __call__(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        size = next(size for size in SIZES if size >= len(tokens))
        captured = self.graphs[size]
        captured.tokens[: len(tokens)].copy_(tokens)
        captured.places[: len(tokens)].copy_(places)
        captured.graph.replay()
        return captured.output[: len(tokens)].clone()


@torch.inference_mode()
def main() -> None:
    runner = Runner(Net())
    plain = Net()
    for rows in (3, 1, 4):
        runner.net.cache.zero_()
        plain.cache.zero_()
        by_graph = torch.arange(rows, device="cuda")
        eagerly = by_graph
        history = []
        for step in range(6):
            places = torch.full((rows,), step, device="cuda")
            by_graph = runner(by_graph, places)
            eagerly = plain(eagerly, places)
            history.append(torch.stack([by_graph, eagerly]))
        tokens, expected = torch.stack(history, 1).tolist()  # san: ok(the result of all steps)
        assert tokens == expected
        print(rows, [list(row) for row in zip(*tokens, strict=True)])


main()
