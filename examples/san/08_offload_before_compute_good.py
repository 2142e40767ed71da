"""08_offload_before_compute_bad, mended: the store waits for the fence of the step that writes the page."""

from __future__ import annotations

import torch

from gapless.testing.sim import SimDevice

PAGE = 2


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    cache, host_tier = torch.zeros(4, 3), torch.zeros(4, 3)

    def step() -> None:
        cache[PAGE].fill_(7.0)

    def store() -> None:
        device.download(host_tier[PAGE], cache[PAGE])

    device.compute.launch(step)
    device.bulk_out.after(device.compute.record())
    device.bulk_out.launch(store)
    device.bulk_out.record().wait()
    stored = host_tier[PAGE].tolist()
    device.drain()
    device.close()
    return stored


if __name__ == "__main__":
    print("stored", main(), "expected", [7.0] * 3)
