"""A batch is made on the loader's stream and dropped by the step; the loader's next batch may take its memory."""

import torch

compute, loader = torch.cuda.current_stream(), torch.cuda.Stream()
weight = torch.rand(256, device="cuda")
loader.wait_stream(compute)
for step in range(3):
    with torch.cuda.stream(loader):
        batch = torch.full((256,), float(step), device="cuda")  # finds: race
    compute.wait_stream(loader)
    weight = weight + batch
    del batch
