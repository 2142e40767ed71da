"""06_staging_reuse_bad, mended: two staging slots in a ring, each given out again only after its fence."""

from __future__ import annotations

import numpy as np
import torch

from gapless.device import RingSlot
from gapless.testing.sim import SimDevice

STEPS = 4


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    stream = device.compute
    ring = device.ring(2, 16)
    words, total = torch.zeros(4), torch.zeros(STEPS)
    fences = []

    def upload(staging: RingSlot, step: int) -> None:
        device.upload(words, staging.tensor.view(torch.float32))
        total[step : step + 1].copy_(words.sum(0, keepdim=True))

    for step in range(STEPS):
        staging = ring.acquire()
        if staging is None:
            fences[step - 2].wait()
            staging = ring.acquire()
        assert staging is not None
        staging.array.view(np.float32)[:] = step
        stream.launch(upload, staging, step, reads=(staging,))
        fences.append(stream.record())
        ring.retire(staging, fences[-1])
    device.drain()
    sums = total.tolist()
    device.close()
    return sums


if __name__ == "__main__":
    print("sums of 0, 1, 2, 3 four times:", main(), "expected", [4.0 * step for step in range(STEPS)])
