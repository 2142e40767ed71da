"""A staging buffer is allocated for every step of a loader, through a helper."""

import torch

staging = torch.empty(8, 4, pin_memory=True)  # one buffer, kept: right


def stage(rows: list[float]) -> torch.Tensor:
    home = torch.empty(len(rows), pin_memory=True)  # finds: pinned-alloc
    for at, row in enumerate(rows):
        home[at] = row
    return home.to("cuda", non_blocking=True)


side = torch.cuda.Stream()
total = torch.zeros(4, device="cuda")
for _ in range(4):
    x = stage([1.0, 2.0, 3.0, 4.0])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total += x
    x.record_stream(side)
torch.cuda.current_stream().wait_stream(side)
