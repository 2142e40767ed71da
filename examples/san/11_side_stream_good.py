"""11_side_stream_bad, mended: the side stream waits for an event after the step that fills the page."""

from __future__ import annotations

import torch

PAGE = 2


def main() -> list[float]:
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
    cache = torch.zeros(4, 3, device="cuda")
    host_tier = torch.zeros(4, 3, pin_memory=True)  # san: ok(once, at the start)

    cache[PAGE].fill_(7.0)
    side.wait_event(compute.record_event())
    with torch.cuda.stream(side):
        host_tier[PAGE].copy_(cache[PAGE], non_blocking=True)
        stored = side.record_event()
    stored.synchronize()  # san: ok(the program ends here)
    return host_tier[PAGE].tolist()


if __name__ == "__main__":
    print("stored", main(), "expected", [7.0] * 3)
