"""Time of launches on a GPU, without that of launching them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Program = Callable[[], Any]


def seconds(programs: Sequence[Program]) -> float:
    """Of one of the programs, which run one behind the other as one graph."""
    torch.cuda.synchronize()  # another stream has made the operands
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for program in programs[:2]:
            program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for program in programs:
            program()
    best = float("inf")
    with torch.cuda.stream(stream):
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / len(programs))
    return best
