"""A staging buffer is filled again while the copy that reads it may still be on its way.

The host runs ahead of the device, so the copy of one step uploads the numbers of a later one.
"""

from __future__ import annotations

import numpy as np
import torch

from gapless.testing.sim import SimDevice

STEPS = 4


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    stream = device.compute
    staging = device.ring(1, 16).slots[0]
    words, total = torch.zeros(4), torch.zeros(STEPS)

    def upload(step: int) -> None:
        device.upload(words, staging.tensor.view(torch.float32))
        total[step : step + 1].copy_(words.sum(0, keepdim=True))

    for step in range(STEPS):
        # The fault: nothing says that the upload of the step before has been done.
        staging.array.view(np.float32)[:] = step
        stream.launch(upload, step, reads=(staging,))
    device.drain()
    sums = total.tolist()
    device.close()
    return sums


if __name__ == "__main__":
    print("sums of 0, 1, 2, 3 four times:", main(), "expected", [4.0 * step for step in range(STEPS)])
