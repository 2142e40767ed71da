"""A page of KV goes to the host tier on a side stream, which does not wait for the stream that fills the page.

The fault of 08 in plain torch.cuda. Copies overlap with compute on a stream of their own, and only an event says that
the page is there.
"""

from __future__ import annotations

import torch

PAGE = 2


def main() -> list[float]:
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    cache = torch.zeros(4, 3, device="cuda")
    host_tier = torch.zeros(4, 3, pin_memory=True)  # san: ok(once, at the start)
    side.wait_stream(compute)

    cache[PAGE].fill_(7.0)
    with torch.cuda.stream(side):
        # The fault: side does not wait for what compute was given since.
        host_tier[PAGE].copy_(cache[PAGE], non_blocking=True)
        stored = side.record_event()
    stored.synchronize()  # san: ok(the program ends here)
    return host_tier[PAGE].tolist()


if __name__ == "__main__":
    print("stored", main(), "expected", [7.0] * 3)
