"""A request is aborted and its page freed, while a step that was launched before still writes to it.

The page goes to a prefix that is loaded from the host tier, and the late step writes over what was loaded.
"""

from __future__ import annotations

import torch

from gapless.testing.sim import SimDevice

PAGE = 2


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    cache, host_tier = torch.zeros(4, 3), torch.full((3,), 5.0)
    free: list[int] = []

    def step(page: int, value: float) -> None:
        cache[page].fill_(value)

    def load(page: int) -> None:
        device.upload(cache[page], host_tier)

    for value in (1.0, 2.0):
        device.compute.launch(step, PAGE, value)
    # The abort. The fault: the page is free at once, whatever is still in flight.
    free.append(PAGE)
    device.bulk_in.launch(load, free.pop())
    device.bulk_in.record().wait()
    device.drain()
    page = cache[PAGE].tolist()
    device.close()
    return page


if __name__ == "__main__":
    print("the loaded page holds", main(), "expected", [5.0] * 3)
