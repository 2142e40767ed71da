"""One event object for two batches in flight: the second record replaces the first, which no wait sees any more.

Batch A goes to the host on one stream, batch B on another; the host waits for "the event" and reads A.
"""

from __future__ import annotations

import torch

from gapless.device import Fence, Stream
from gapless.testing.sim import SimDevice


class Event:
    """As in CUDA: a record replaces the one before."""

    fence: Fence

    def record(self, stream: Stream) -> None:
        self.fence = stream.record()

    def synchronize(self) -> None:
        self.fence.wait()


def main() -> list[list[float]]:
    device = SimDevice(seed=1, mood="lazy")
    batch_a, batch_b = torch.full((4,), 1.0), torch.full((4,), 2.0)
    home_a, home_b = torch.zeros(4), torch.zeros(4)
    copied = Event()
    device.bulk_out.launch(device.download, home_a, batch_a)
    copied.record(device.bulk_out)
    # The fault: the same event, while the first record is still needed.
    device.token_out.launch(device.download, home_b, batch_b)
    copied.record(device.token_out)
    copied.synchronize()
    read = [home_a.tolist(), home_b.tolist()]
    device.drain()
    device.close()
    return read


if __name__ == "__main__":
    print("read", main(), "expected", [[1.0] * 4, [2.0] * 4])
