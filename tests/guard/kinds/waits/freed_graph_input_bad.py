"""A captured step reads a table that only the function which captured it held."""

import torch


def capture(x):
    scale = torch.linspace(1, 2, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # san: ok(set-up)
        out = x * scale
    return graph, out  # the table is freed here


x = torch.ones(64, device="cuda")
graph, out = capture(x)
other = torch.zeros(64, device="cuda")  # may be given the table's memory
for step in range(3):
    x.fill_(step)
    graph.replay()  # finds: race
    other.add_(out)
