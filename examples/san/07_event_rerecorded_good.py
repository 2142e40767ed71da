"""07_event_rerecorded_bad, mended: every batch has an event of its own, and both are waited for."""

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
    copied_a, copied_b = Event(), Event()
    device.bulk_out.launch(device.download, home_a, batch_a)
    copied_a.record(device.bulk_out)
    device.token_out.launch(device.download, home_b, batch_b)
    copied_b.record(device.token_out)
    copied_a.synchronize()
    copied_b.synchronize()
    read = [home_a.tolist(), home_b.tolist()]
    device.drain()
    device.close()
    return read


if __name__ == "__main__":
    print("read", main(), "expected", [[1.0] * 4, [2.0] * 4])
