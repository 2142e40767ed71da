"""12_memory_reuse_bad, mended: the stream that the memory belongs to waits for the reader before it loads again.

`batch.record_stream(compute)` would do as well, at a price: the allocator then polls events, and may grow.
"""

from __future__ import annotations

import torch

STEPS = 4


def main() -> float:
    compute, loader = torch.cuda.current_stream(), torch.cuda.Stream()
    staging = torch.ones(STEPS, 1024, pin_memory=True)  # san: ok(once, at the start)
    total = torch.zeros(1024, device="cuda")
    for step in range(STEPS):
        with torch.cuda.stream(loader):
            batch = torch.empty(1024, device="cuda")
            batch.copy_(staging[step], non_blocking=True)
        compute.wait_stream(loader)
        total.add_(batch)
        loader.wait_stream(compute)
        del batch
    return total.sum().item()  # san: ok(the program ends here)


if __name__ == "__main__":
    print("total", main(), "expected", 1024.0 * STEPS)
