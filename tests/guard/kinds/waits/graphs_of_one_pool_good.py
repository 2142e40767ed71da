"""graphs_of_one_pool_bad, mended: each graph has a pool of its own; two that share one are replayed in order."""

import torch

x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
prefill, decode, last = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(prefill):  # san: ok(set-up)
    first = (x * 2).sum()
with torch.cuda.graph(decode):  # san: ok(set-up)
    second = (y + 1).sum()
with torch.cuda.graph(last, pool=prefill.pool()):  # san: ok(set-up)
    third = (x - 1).sum()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
for _ in range(2):
    prefill.replay()
    last.replay()
    with torch.cuda.stream(side):
        decode.replay()
