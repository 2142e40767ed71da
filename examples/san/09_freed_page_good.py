"""09_freed_page_bad, mended: the page is retired after the last step that can touch it, and the load waits."""

from __future__ import annotations

import torch

from gapless.device import Fence
from gapless.testing.sim import SimDevice

PAGE = 2


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    cache, host_tier = torch.zeros(4, 3), torch.full((3,), 5.0)
    retired: list[tuple[int, Fence]] = []

    def step(page: int, value: float) -> None:
        cache[page].fill_(value)

    def load(page: int) -> None:
        device.upload(cache[page], host_tier)

    for value in (1.0, 2.0):
        device.compute.launch(step, PAGE, value)
    # The abort: nothing is freed, only retired at a fence.
    retired.append((PAGE, device.compute.record()))
    page, last_use = retired.pop()
    device.bulk_in.after(last_use)
    device.bulk_in.launch(load, page)
    device.bulk_in.record().wait()
    device.drain()
    held = cache[PAGE].tolist()
    device.close()
    return held


if __name__ == "__main__":
    print("the loaded page holds", main(), "expected", [5.0] * 3)
