"""A scratch tensor grows by `resize_`, while another stream may still read the memory that it had."""

import torch

compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
scratch = torch.ones(1024, device="cuda")
side.wait_stream(compute)
with torch.cuda.stream(side):
    total = scratch.sum()
scratch.resize_(1 << 16)
batch = torch.zeros(1024, device="cuda")  # finds: race
compute.wait_stream(side)
batch.add_(total)
