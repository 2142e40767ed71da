"""Two captured steps share a memory pool, and are replayed on two streams at once."""

import torch

x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
prefill, decode = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(prefill):  # san: ok(set-up)
    first = (x * 2).sum()
with torch.cuda.graph(decode, pool=prefill.pool()):  # san: ok(set-up)
    second = (y + 1).sum()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
for _ in range(2):
    prefill.replay()
    with torch.cuda.stream(side):
        decode.replay()  # finds: race
    torch.cuda.current_stream().wait_stream(side)
