"""A tensor is given up while a stream that it does not belong to still reads it.

The caching allocator knows the stream on which memory was allocated, and gives it out there again at once. It knows
nothing of other streams that use it.
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
            batch = torch.empty(1024, device="cuda")  # allocated on the loader's stream
            batch.copy_(staging[step], non_blocking=True)
        compute.wait_stream(loader)
        total.add_(batch)
        # The fault: this frees the batch, and the loader may fill its memory again while compute adds it.
        del batch
    return total.sum().item()  # san: ok(the program ends here)


if __name__ == "__main__":
    print("total", main(), "expected", 1024.0 * STEPS)
