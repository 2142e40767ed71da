"""recorded_storage_bad, mended as the report says: record_stream keeps the memory until the step is done with it."""

import torch

compute, loader = torch.cuda.current_stream(), torch.cuda.Stream()
weight = torch.rand(256, device="cuda")
loader.wait_stream(compute)
for step in range(3):
    with torch.cuda.stream(loader):
        batch = torch.full((256,), float(step), device="cuda")
    compute.wait_stream(loader)
    batch.record_stream(compute)  # san: ok(its cost is known)
    weight = weight + batch
    del batch
