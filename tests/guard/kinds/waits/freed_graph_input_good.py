"""freed_graph_input_bad, mended: the table lives as long as its graph."""

import torch


def capture(x):
    scale = torch.linspace(1, 2, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # san: ok(set-up)
        out = x * scale
    return graph, out, scale


x = torch.ones(64, device="cuda")
graph, out, scale = capture(x)
other = torch.zeros(64, device="cuda")
for step in range(3):
    x.fill_(step)
    graph.replay()
    other.add_(out)
